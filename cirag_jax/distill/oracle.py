"""The oracle: the decision of a round that a question's annotations call for.

It has core triples, a rationale, and the next query or the stop. Thoughts and queries name no
answer that neither the question nor a kept triple states: `decide` checks its sentences for such
answers and falls back on templates without them.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

from cirag_jax.datasets.annotations import Hop, fill, hops_of
from cirag_jax.distill.supports import Support, reachable, supports_of
from cirag_jax.prompts import cirag as prompts
from cirag_jax.triples.normalization import Normalization, normalise
from cirag_jax.types import Passage, Question, Step, Triple

_FOUND = (
    "{Noun} is {value}.",
    "The facts name {value} as {noun}.",
    "One fact says that {noun} is {value}.",
)
_FOUND_FREE = (
    'A fact answers "{asks}" with {value}.',
    'To "{asks}" the facts say {value}.',
)
_FOUND_PLAIN = ("A fact about {head} helps.", "What is said of {head} helps.")
_NOTHING = (
    "None of these facts helps.",
    "These facts do not help.",
    "None of the candidates is of use here.",
)
_MISSING = (
    "{Noun} is still missing.",
    "Still missing is {noun}.",
    "It remains to find {noun}.",
)
_MISSING_FREE = ('Still open is "{asks}"', 'It remains to find out: "{asks}"')
_MISSING_PLAIN = ("A further fact is still missing.", "Something is still missing.")
_ENOUGH = (
    "The query can be answered now.",
    "These facts suffice for the query.",
    "With this the query can be answered.",
)
_GIVEN_UP = (
    "Asking again would not help.",
    "Another try is not worth it.",
    "The search ends here without it.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Gold:
    """What the annotations of a question say.

    Attributes:
      question: with its annotations.
      hops: the facts it needs; empty where nothing is annotated.
      statements: key of a triple (`fact_key`) -> its statements in the question's gold passages.
      titles: id of a gold passage -> its title.
      normalization: normalisation by which triples are equal.
    """

    question: Question
    hops: tuple[Hop, ...]
    statements: Mapping[str, tuple[Triple, ...]]
    titles: Mapping[str, str]
    normalization: Normalization

    def facts(self, triples: Sequence[Triple]) -> list[tuple[Triple, ...]]:
        """Each triple with its statements in gold passages, itself where it has none."""
        return [self.statements.get(fact_key(t, self.normalization), (t,)) for t in triples]

    def supports(
        self, triples: Sequence[Triple], known: Mapping[int, str] | None = None
    ) -> list[Support]:
        """Supports of hops among ``triples``, where those in ``known`` are solved."""
        return supports_of(self.hops, known or {}, self.facts(triples), self.titles)

    def known(self, triples: Sequence[Triple]) -> dict[int, str]:
        """The hops that core triples solve, with their answers."""
        return _values(self.supports(triples))

    def is_solved(self, triples: Sequence[Triple]) -> bool:
        """Whether core triples support every hop."""
        return len(self.known(triples)) == len(self.hops)


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """A round that has been decided: what was asked in it and what was kept."""

    query: str
    kept: tuple[Triple, ...]


def gold_of(
    question: Question,
    corpus: Mapping[str, Passage],
    triples: Mapping[str, Sequence[Triple] | None],
    normalization: Normalization,
) -> Gold:
    """Gathers what a question's annotations say.

    Args:
      question: the question.
      corpus: with its gold passages.
      triples: of these passages, by id; a passage without any may be left out.
      normalization: normalisation by which triples are equal.
    """
    ids = [i for i in question.supporting or () if i in corpus]
    statements: dict[str, tuple[Triple, ...]] = {}
    for passage_id in ids:
        for triple in triples.get(passage_id) or ():
            key = fact_key(triple, normalization)
            statements[key] = (*statements.get(key, ()), triple)
    titles = {i: corpus[i].title for i in ids}
    return Gold(question, hops_of(question, corpus), statements, titles, normalization)


def fact_key(triple: Triple, normalization: Normalization) -> str:
    """A triple as a prompt shows it: equal for those that a model cannot tell apart."""
    return prompts.render_facts((triple,), normalization)


def decide(
    gold: Gold, rounds: Sequence[Round], query: str, candidates: Sequence[Triple], retries: int
) -> Step:
    """The oracle's decision about ``candidates``.

    Args:
      gold: the question's annotations, with at least one hop.
      rounds: those before, with what the teacher kept.
      query: what this round asked.
      candidates: triples, best first, as the prompt shows them.
      retries: how often one sub-question is rephrased before the teacher gives up.

    Returns:
      The step with thought, kept and next query; ``kept`` holds candidates.
    """
    before = gold.known([triple for past in rounds for triple in past.kept])
    shown = {fact_key(triple, gold.normalization): triple for triple in reversed(candidates)}
    supports = gold.supports(candidates, before)
    kept = [shown[fact_key(s.triple, gold.normalization)] for s in supports]
    known = {**before, **_values(supports)}
    said = [gold.question.question, *known.values()]
    said += [f"{t.head} {t.relation} {t.tail}" for past in rounds for t in past.kept]
    said += [f"{s.triple.head} {s.triple.relation} {s.triple.tail}" for s in supports]
    unsupported = _Unsupported(gold, known, said)
    asked = {past.query for past in rounds} | {query}
    target, next_query = _next_query(gold, known, asked, retries, unsupported)
    thought = _rationale(gold, supports, known, target, next_query, len(rounds), unsupported)
    return Step(query, kept=tuple(dict.fromkeys(kept)), thought=thought, next_query=next_query)


def _values(supports: Sequence[Support]) -> dict[int, str]:
    return {support.hop: support.value for support in reversed(supports)}  # the best support wins


# ------------------------------------------------------------------------------------- next query


def _next_query(
    gold: Gold, known: Mapping[int, str], asked: set[str], retries: int, unsupported: "_Unsupported"
) -> tuple[int | None, str | None]:
    """The hop to ask for, the least tried first, and the query; None: the collection ends."""
    choices = []
    for index in reachable(gold.hops, known):
        texts = [t for t in _variants(gold, index, known) if not unsupported.appear_in(t)]
        tries = sum(text in asked for text in texts)
        left = [text for text in texts if text not in asked]
        if left and tries <= retries:
            choices.append((tries, index, left[0]))
    if choices:
        _, index, text = min(choices)
        return index, text
    return next(iter(reachable(gold.hops, known)), None), None


def _variants(gold: Gold, index: int, known: Mapping[int, str]) -> list[str]:
    """Queries for a hop: in words, in keywords, and the question itself with what is known."""
    hop = gold.hops[index]
    found = ", ".join(dict.fromkeys(value for value in known.values() if value))
    texts = [fill(hop.asks, known), fill(hop.keywords, known)]
    texts += [f"{gold.question.question} ({found})"] if found else []
    return list(dict.fromkeys(text for text in map(_one_line, texts) if text))


# -------------------------------------------------------------------------------------- rationale


def _rationale(
    gold: Gold,
    supports: Sequence[Support],
    known: Mapping[int, str],
    target: int | None,
    next_query: str | None,
    step: int,
    unsupported: "_Unsupported",
) -> str:
    """What was found, and what is still missing: a few short sentences."""

    def say(slot: str, templates: Sequence[str], **values: str) -> str:
        text = f"{gold.question.id}/{step}/{slot}"
        chosen = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0]
        return _one_line(templates[chosen % len(templates)].format(**values))

    sentences = []
    for support in {s.hop: s for s in reversed(supports)}.values():
        hop = gold.hops[support.hop]
        text = ""
        if support.value:
            noun = fill(hop.noun, known)
            text = say(
                f"found {support.hop}",
                _FOUND if noun else _FOUND_FREE,
                noun=noun,
                Noun=_capital(noun),
                asks=fill(hop.asks, known),
                value=support.value,
            )
        if not text or unsupported.appear_in(text):
            text = say(f"found {support.hop}", _FOUND_PLAIN, head=support.triple.head)
        sentences.append(text)
    sentences = sentences[::-1] or [say("nothing", _NOTHING)]
    if target is None:
        return " ".join([*sentences, say("enough", _ENOUGH)])
    hop = gold.hops[target]
    noun, asks = fill(hop.noun, known), fill(hop.asks, known)
    text = ""
    if noun or asks:
        templates = _MISSING if noun else _MISSING_FREE
        text = say("missing", templates, noun=noun, Noun=_capital(noun), asks=asks)
    if not text or unsupported.appear_in(text):
        text = say("missing", _MISSING_PLAIN)
    sentences.append(text)
    if next_query is None:
        sentences.append(say("given up", _GIVEN_UP))
    return " ".join(sentences)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _one_line(text: str) -> str:
    """Text that imitates no header of the prompt's format."""
    return " ".join(re.sub(r"[\[\]#]+", " ", text).split())


class _Unsupported:
    """The answers that neither the question nor a kept triple states.

    Args:
      gold: the question's annotations.
      known: the hops that are solved.
      said: the question, and everything that was kept or found.
    """

    def __init__(self, gold: Gold, known: Mapping[int, str], said: Sequence[str]):
        answers = [a for i, hop in enumerate(gold.hops) if i not in known for a in hop.answers]
        if len(known) < len(gold.hops):
            answers += [a for a in gold.question.answers if a.lower() not in ("yes", "no")]
        open_text = [_padded(text) for text in said]
        texts = {_padded(answer) for answer in answers} - {"  "}
        self._answers = [t for t in texts if not any(t in text for text in open_text)]

    def appear_in(self, text: str) -> bool:
        """Whether ``text`` states one of them."""
        padded = _padded(text)
        return any(answer in padded for answer in self._answers)


def _padded(text: str) -> str:
    return f" {normalise(text, 'unicode')} "
