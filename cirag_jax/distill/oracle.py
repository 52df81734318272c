"""The oracle: the decision of a round that a question's annotations call for.

It has core triples, a rationale, and the next query or the stop. Thoughts and queries name no
answer that neither the question nor a kept triple states: `decide` checks its sentences for such
answers and falls back on templates without them.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.datasets import chains
from cirag_jax.datasets.annotations import Hop, fill, hops_of, names, words
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.distill.supports import Support, near_misses, reachable, stems, supports_of
from cirag_jax.methods.cirag import compact, prompts
from cirag_jax.triples.normalization import Normalization, normalise
from cirag_jax.types import Dataset, Passage, Question, Step, Triple, Unit

# One wording each: a student cannot learn a choice that nothing in the conversation decides.
_FOUND = "{Noun} is {value}."
_FOUND_FREE = 'A fact answers "{asks}" with {value}.'
_FOUND_PLAIN = "A fact about {head} helps."
_NOTHING = "None of these facts helps."
_MISSING = "{Noun} is still missing."
_MISSING_FREE = 'Still open is "{asks}"'
_MISSING_PLAIN = "A further fact is still missing."
_ENOUGH = "The query can be answered now."


@dataclasses.dataclass(frozen=True)
class Gold:
    """What the annotations of a question say of triples.

    Attributes:
      question: with its annotations.
      hops: the facts it needs; empty where nothing is annotated.
      statements: key of a triple (`fact_key`) -> its statements in the question's gold passages.
      passages: gold passages by id.
      normalization: normalisation by which triples are equal.
    """

    question: Question
    hops: tuple[Hop, ...]
    statements: Mapping[str, tuple[Triple, ...]]
    passages: Mapping[str, Passage]
    normalization: Normalization

    def facts(self, triples: Sequence[Triple]) -> list[tuple[Triple, ...]]:
        """Each triple with its statements in gold passages, itself where it has none.

        What says the same supports the same: equal triples, and triples of other passages with
        equal ends and a related relation.
        """
        return [
            self.statements.get(fact_key(t, self.normalization))
            or (t, *(gold for gold in self._by_ends.get(_ends(t), ()) if _are_alike(t, gold)))
            for t in triples
        ]

    @functools.cached_property
    def _by_ends(self) -> Mapping[Any, list[Triple]]:
        found: dict[Any, list[Triple]] = {}
        for statements in self.statements.values():
            for triple in statements:
                found.setdefault(_ends(triple), []).append(triple)
        return found

    def context(self, triple: Triple) -> tuple[str, str]:
        """Title and sentence of a triple of a gold passage; "" where that is not known."""
        passage = self.passages.get(triple.passage_id or "")
        if passage is None:
            return "", ""
        sentences = sentences_of(passage)
        at = triple.sentence
        return passage.title, sentences[at] if at is not None and at < len(sentences) else ""

    def supports(
        self, triples: Sequence[Triple], known: Mapping[int, str] | None = None
    ) -> list[Support]:
        """Supports of hops among ``triples``, where those in ``known`` are solved."""
        return supports_of(self.hops, known or {}, self.facts(triples), self.context)

    def is_unclear(self, triples: Sequence[Triple], known: Mapping[int, str]) -> bool:
        """Whether none of ``triples`` supports a hop, but some may: a round not to learn from."""
        return not self.supports(triples, known) and bool(
            near_misses(self.hops, known, self.facts(triples))
        )

    def known(self, triples: Sequence[Triple]) -> dict[int, str]:
        """The hops that core triples solve, with their answers."""
        return _values(self.supports(triples))

    def is_solved(self, triples: Sequence[Triple]) -> bool:
        """Whether core triples support every hop."""
        return len(self.known(triples)) == len(self.hops)


@dataclasses.dataclass(frozen=True)
class SentenceGold:
    """What the annotations of a question say of sentences, which are compared as a prompt shows
    them (`compact.line`): as `Sentence` with its text, or as that line.

    Attributes:
      question: with ``supporting_sentences``.
      hops: the facts it needs; empty where hops and passages of such sentences do not match.
      answers: of each hop, in the words of its sentences where these state it; "": it has none.
      sentences: line of a supporting sentence -> the hops of its passage, all of which it supports.
      passages: of each hop the id of its passage.
    """

    question: Question
    hops: tuple[Hop, ...]
    answers: tuple[str, ...]
    sentences: Mapping[str, tuple[int, ...]]
    passages: tuple[str, ...]

    def known(
        self, sentences: Sequence[Unit], known: Mapping[int, str] | None = None
    ) -> dict[int, str]:
        """The hops that ``sentences`` solve beside those in ``known``, with their answers.

        A hop is solved when it can be reached; others may become reachable by it.
        """
        found = dict(known or {})
        stated = {hop for one in sentences for hop in self.sentences.get(compact.line(one), ())}
        while new := stated & set(reachable(self.hops, found)):
            found |= {hop: self.answers[hop] for hop in new}
        return found

    def supports(self, sentences: Sequence[Unit], known: Mapping[int, str]) -> list[int]:
        """The hops that ``sentences`` solve, but for those in ``known``."""
        return [hop for hop in self.known(sentences, known) if hop not in known]

    def is_unclear(self, sentences: Sequence[Unit], known: Mapping[int, str]) -> bool:
        """Whether this is a round not to learn from.

        Either a supporting sentence is there, though nobody can know it yet, or one that is kept
        does not name what the next hop asks about (an annotation that points at another sentence).
        """
        lines = [line for one in sentences if (line := compact.line(one)) in self.sentences]
        new = self.supports(lines, known)
        if not new:
            return any(set(self.sentences[line]) - known.keys() for line in lines)
        asked = {parent for hop in self.hops for parent in hop.parents if self.answers[parent]}
        return any(
            not names(line, self.answers[hop])
            for line in lines
            for hop in asked.intersection(new, self.sentences[line])
        )

    def is_solved(self, sentences: Sequence[Unit]) -> bool:
        """Whether core sentences support every hop."""
        return len(self.known(sentences)) == len(self.hops)


AnyGold = Gold | SentenceGold


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """A round that has been decided: what was asked in it and what was kept."""

    query: str
    kept: tuple[Unit, ...]


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
    passages = {i: corpus[i] for i in ids}
    return Gold(question, hops_of(question, corpus), statements, passages, normalization)


def sentence_gold_of(question: Question, dataset: Dataset) -> SentenceGold:
    """Gathers what a question's annotations say of sentences.

    A hop's passage is the one that is most about it, as for the aligner's silver chains.

    Args:
      question: the question.
      dataset: with its gold passages.
    """
    lines: dict[str, list[str]] = {}
    for passage_id, index in question.supporting_sentences or ():
        text = chains.sentence_text(dataset.corpus[passage_id], index)
        lines.setdefault(passage_id, []).append(compact.line(text))
    hops = hops_of(question, dataset.corpus)
    first = {index: hop.answers[0] for index, hop in enumerate(hops) if hop.answers}
    passages, answers = [], []
    for index, hop in enumerate(hops):
        units = chains.units_of_hop(dataset, hop, index, first, "sentence")
        if not units or units[0].passage_id not in lines:
            return SentenceGold(question, (), (), {}, ())
        passages.append(units[0].passage_id)
        stated = _padded(" ".join(lines[passages[-1]]))
        worded = [answer for answer in hop.answers if _padded(answer) in stated]
        answers.append(next(iter((*worded, *hop.answers)), ""))
    if lines.keys() - set(passages):  # then some hop was taken for one of another passage
        return SentenceGold(question, (), (), {}, ())
    sentences = {
        line: tuple(index for index, own in enumerate(passages) if own == passage_id)
        for passage_id, found in lines.items()
        for line in found
    }
    return SentenceGold(question, hops, tuple(answers), sentences, tuple(passages))


def _ends(triple: Triple) -> tuple[frozenset[str], frozenset[str]]:
    return words(triple.head), words(triple.tail)


def _are_alike(a: Triple, b: Triple) -> bool:
    """Whether two relations share a word's beginning ("born in", "was born at")."""
    return bool(stems(words(a.relation)) & stems(words(b.relation)))


def fact_key(triple: Triple, normalization: Normalization) -> str:
    """A triple as a prompt shows it: equal for those that a model cannot tell apart."""
    return prompts.render_facts((triple,), normalization)


def decide(gold: AnyGold, rounds: Sequence[Round], query: str, candidates: Sequence[Any]) -> Step:
    """The oracle's decision about ``candidates``; it stops if and only if every hop is supported.

    Args:
      gold: the question's annotations, with at least one hop.
      rounds: those before, with what the teacher kept.
      query: what this round asked.
      candidates: best first: triples as the prompt shows them, sentences as ``gold`` takes them.

    Returns:
      The step with thought (none about sentences, whose format has none), kept and next query;
      ``kept`` holds candidates.
    """
    if isinstance(gold, SentenceGold):
        return _decide_on_sentences(gold, rounds, query, candidates)
    past: list[Any] = [triple for one in rounds for triple in one.kept]
    before = gold.known(past)
    shown = {fact_key(triple, gold.normalization): triple for triple in reversed(candidates)}
    supports = gold.supports(candidates, before)
    kept = [shown[fact_key(candidates[s.place], gold.normalization)] for s in supports]
    known = {**before, **_values(supports)}
    said = [gold.question.question, *known.values()]
    said += [f"{triple.head} {triple.relation} {triple.tail}" for triple in past]
    said += [f"{s.triple.head} {s.triple.relation} {s.triple.tail}" for s in supports]
    unsupported = _Unsupported(gold, known, said)
    asked = {one.query for one in rounds} | {query}
    target, next_query = _next_query(gold, known, asked, unsupported)
    thought = _rationale(gold, supports, known, target, unsupported)
    return Step(query, kept=tuple(dict.fromkeys(kept)), thought=thought, next_query=next_query)


def _decide_on_sentences(
    gold: SentenceGold, rounds: Sequence[Round], query: str, candidates: Sequence[Any]
) -> Step:
    """Kept is every supporting sentence that is new and whose hop is solved by now."""
    past: list[Any] = [sentence for one in rounds for sentence in one.kept]
    known = gold.known([*past, *candidates])
    before = set(map(compact.line, past))
    kept = [
        sentence
        for sentence in candidates
        if known.keys() & gold.sentences.get(compact.line(sentence), ())
        and compact.line(sentence) not in before
    ]
    said = [gold.question.question, *known.values(), *map(compact.line, [*past, *kept])]
    asked = {one.query for one in rounds} | {query}
    _, next_query = _next_query(gold, known, asked, _Unsupported(gold, known, said))
    return Step(query, kept=tuple(kept), next_query=next_query)


def _values(supports: Sequence[Support]) -> dict[int, str]:
    return {support.hop: support.value for support in reversed(supports)}  # the best support wins


# ------------------------------------------------------------------------------------- next query


def _next_query(
    gold: AnyGold, known: Mapping[int, str], asked: set[str], unsupported: "_Unsupported"
) -> tuple[int | None, str | None]:
    """The hop to ask for, the least tried first, and the query; None: every hop is supported."""
    choices = []
    for index in reachable(gold.hops, known):
        texts = [t for t in queries(gold, index, known) if not unsupported.appear_in(t)]
        left = [text for text in texts if text not in asked]
        # Where everything was tried, the first is asked again; where all give the answer away, x.
        choices.append((len(texts) - len(left), index, [*left, *texts, gold.question.question][0]))
    if not choices:
        return None, None
    _, index, text = min(choices)
    return index, text


def queries(gold: AnyGold, index: int, known: Mapping[int, str]) -> list[str]:
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
    unsupported: "_Unsupported",
) -> str:
    """What was found, and what is still missing: a few short sentences."""
    sentences = []
    for support in {s.hop: s for s in reversed(supports)}.values():
        hop, text = gold.hops[support.hop], ""
        if support.value:
            noun = fill(hop.noun, known)
            text = (_FOUND if noun else _FOUND_FREE).format(
                Noun=_capital(noun), asks=fill(hop.asks, known), value=support.value
            )
        if not text or unsupported.appear_in(text):
            text = _FOUND_PLAIN.format(head=support.triple.head)
        sentences.append(text)
    sentences = sentences[::-1] or [_NOTHING]
    if target is None:
        return _one_line(" ".join([*sentences, _ENOUGH]))
    hop, text = gold.hops[target], ""
    noun, asks = fill(hop.noun, known), fill(hop.asks, known)
    if noun or asks:
        text = (_MISSING if noun else _MISSING_FREE).format(Noun=_capital(noun), asks=asks)
    if not text or unsupported.appear_in(text):
        text = _MISSING_PLAIN
    return _one_line(" ".join([*sentences, text]))


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

    def __init__(self, gold: AnyGold, known: Mapping[int, str], said: Sequence[str]):
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
