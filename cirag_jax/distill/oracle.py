"""The oracle, which makes the integrator's decisions from the annotations of a question.

A decision has the facts to keep ("core"), a rationale, and the next query or the stop. Rationales
and queries name only answers that the question or a kept fact states. To ensure this, `decide` uses
templates without answers if necessary.
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
from cirag_jax.triples.normalization import Normalization, normalize
from cirag_jax.types import Dataset, Passage, Question, Step, Triple, Unit

# Each template has only one wording, because students cannot learn random choices.
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
    """The annotations of a question, for decisions on triples.

    Attributes:
      question: the annotated question.
      hops: the facts that the question needs; empty without annotations.
      statements: key of a triple (`fact_key`) -> triples with this key from gold passages.
      passages: gold passages by id.
      normalization: triples with equal normal forms are the same fact.
    """

    question: Question
    hops: tuple[Hop, ...]
    statements: Mapping[str, tuple[Triple, ...]]
    passages: Mapping[str, Passage]
    normalization: Normalization

    def facts(self, triples: Sequence[Triple]) -> list[tuple[Triple, ...]]:
        """Returns, for each triple, the equal triples of the gold passages.

        A triple without equal triples is returned with similar triples of the gold passages: the
        same ends, and a related relation.
        """
        return [
            self.statements.get(fact_key(t, self.normalization))
            or (t, *(gold for gold in self._by_ends.get(_ends(t), ()) if _are_alike(t, gold)))
            for t in triples
        ]

    @functools.cached_property
    def _by_ends(self) -> Mapping[Any, list[Triple]]:
        by_ends: dict[Any, list[Triple]] = {}
        for statements in self.statements.values():
            for triple in statements:
                by_ends.setdefault(_ends(triple), []).append(triple)
        return by_ends

    def context(self, triple: Triple) -> tuple[str, str]:
        """Returns the passage title and the sentence of a triple; "" if unknown."""
        passage = self.passages.get(triple.passage_id or "")
        if passage is None:
            return "", ""
        sentences = sentences_of(passage)
        at = triple.sentence
        return passage.title, sentences[at] if at is not None and at < len(sentences) else ""

    def supports(
        self, triples: Sequence[Triple], known: Mapping[int, str] | None = None
    ) -> list[Support]:
        """Returns which triples solve hops, given the answers ``known`` of solved hops."""
        return supports_of(self.hops, known or {}, self.facts(triples), self.context)

    def is_unclear(self, triples: Sequence[Triple], known: Mapping[int, str]) -> bool:
        """Returns whether no triple supports a hop although one might; this is not trained on."""
        return not self.supports(triples, known) and bool(
            near_misses(self.hops, known, self.facts(triples))
        )

    def known(self, triples: Sequence[Triple]) -> dict[int, str]:
        """Returns hop -> answer for the hops that core triples solve."""
        return _values(self.supports(triples))

    def is_solved(self, triples: Sequence[Triple]) -> bool:
        """Returns whether core triples support every hop."""
        return len(self.known(triples)) == len(self.hops)


@dataclasses.dataclass(frozen=True)
class SentenceGold:
    """The annotations of a question, for decisions on sentences.

    Methods accept `Sentence` objects with texts, or the lines of sentences in a prompt
    (`compact.line`). Sentences with equal lines are treated as one sentence.

    Attributes:
      question: the question, with ``supporting_sentences``.
      hops: the facts that the question needs; empty if the passages of hops and supporting
        sentences do not match.
      answers: answer of each hop, if possible in the words of the sentences; "" without answer.
      sentences: line of a supporting sentence -> the hops that the sentence supports.
      passages: id of the passage of each hop.
    """

    question: Question
    hops: tuple[Hop, ...]
    answers: tuple[str, ...]
    sentences: Mapping[str, tuple[int, ...]]
    passages: tuple[str, ...]

    def known(
        self, sentences: Sequence[Unit], known: Mapping[int, str] | None = None
    ) -> dict[int, str]:
        """Returns hop -> answer for the hops in ``known`` and the hops that ``sentences`` solve.

        Only a reachable hop can be solved. Solving it may make other hops reachable.
        """
        solved = dict(known or {})
        stated = {hop for unit in sentences for hop in self.sentences.get(compact.line(unit), ())}
        while new := stated & set(reachable(self.hops, solved)):
            solved |= {hop: self.answers[hop] for hop in new}
        return solved

    def supports(self, sentences: Sequence[Unit], known: Mapping[int, str]) -> list[int]:
        """Returns the hops that ``sentences`` solve and that are not in ``known``."""
        return [hop for hop in self.known(sentences, known) if hop not in known]

    def is_unclear(self, sentences: Sequence[Unit], known: Mapping[int, str]) -> bool:
        """Returns whether the best decision of a round is unclear; this is not trained on.

        Either no hop is solved although a sentence supports an unreachable hop, or a kept sentence
        lacks an answer that a later hop needs (the annotation is inexact).
        """
        lines = [line for unit in sentences if (line := compact.line(unit)) in self.sentences]
        new = self.supports(lines, known)
        if not new:
            return any(set(self.sentences[line]) - known.keys() for line in lines)
        parents = {parent for hop in self.hops for parent in hop.parents if self.answers[parent]}
        return any(
            not names(line, self.answers[hop])
            for line in lines
            for hop in parents.intersection(new, self.sentences[line])
        )

    def is_solved(self, sentences: Sequence[Unit]) -> bool:
        """Returns whether core sentences support every hop."""
        return len(self.known(sentences)) == len(self.hops)


AnyGold = Gold | SentenceGold


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """An earlier round: the query and the kept facts."""

    query: str
    kept: tuple[Unit, ...]


def gold_of(
    question: Question,
    corpus: Mapping[str, Passage],
    triples: Mapping[str, Sequence[Triple] | None],
    normalization: Normalization,
) -> Gold:
    """Returns the annotations of a question; ``triples`` maps passage ids to triples."""
    ids = [i for i in question.supporting or () if i in corpus]
    gold_triples = [triple for i in ids for triple in triples.get(i) or ()]
    statements = add_statements({}, gold_triples, normalization)
    passages = {i: corpus[i] for i in ids}
    return Gold(question, hops_of(question, corpus), statements, passages, normalization)


def add_statements(
    statements: Mapping[str, tuple[Triple, ...]],
    triples: Sequence[Triple],
    normalization: Normalization,
) -> dict[str, tuple[Triple, ...]]:
    """Returns the ``statements`` of a `Gold` with additional triples."""
    merged = dict(statements)
    for triple in triples:
        key = fact_key(triple, normalization)
        merged[key] = (*merged.get(key, ()), triple)
    return merged


def sentence_gold_of(question: Question, dataset: Dataset) -> SentenceGold:
    """Returns the annotations of a question, for decisions on sentences.

    The passage of a hop is chosen as in the silver chains of the aligner (`datasets.chains`).
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
        stated_answers = [answer for answer in hop.answers if _padded(answer) in stated]
        answers.append(next(iter((*stated_answers, *hop.answers)), ""))
    if lines.keys() - set(passages):  # A hop has been assigned to a wrong passage.
        return SentenceGold(question, (), (), {}, ())
    sentences = {
        line: tuple(index for index, id in enumerate(passages) if id == passage_id)
        for passage_id, gold_lines in lines.items()
        for line in gold_lines
    }
    return SentenceGold(question, hops, tuple(answers), sentences, tuple(passages))


def _ends(triple: Triple) -> tuple[frozenset[str], frozenset[str]]:
    return words(triple.head), words(triple.tail)


def _are_alike(a: Triple, b: Triple) -> bool:
    """Returns whether two relations share a stem ("born in", "was born at")."""
    return bool(stems(words(a.relation)) & stems(words(b.relation)))


def fact_key(triple: Triple, normalization: Normalization) -> str:
    """Returns the key of a triple, which is its text in a prompt."""
    return prompts.render_facts((triple,), normalization)


def decide(gold: AnyGold, rounds: Sequence[Round], query: str, candidates: Sequence[Any]) -> Step:
    """Returns the decision of a round, which is to stop if and only if every hop is supported.

    Args:
      gold: the annotations, with at least one hop.
      rounds: the earlier rounds.
      query: the query of this round.
      candidates: the candidates, best first: triples as in the prompt, or sentences.

    Returns:
      The step, with the thought (empty for sentences), the kept candidates and the next query.
    """
    if isinstance(gold, SentenceGold):
        return _decide_on_sentences(gold, rounds, query, candidates)
    kept_earlier: list[Any] = [triple for earlier in rounds for triple in earlier.kept]
    known_before = gold.known(kept_earlier)
    shown = {fact_key(triple, gold.normalization): triple for triple in reversed(candidates)}
    supports = gold.supports(candidates, known_before)
    kept = [shown[fact_key(candidates[s.place], gold.normalization)] for s in supports]
    known = {**known_before, **_values(supports)}
    stated = [gold.question.question, *known.values()]
    stated += [
        f"{t.head} {t.relation} {t.tail}" for t in (*kept_earlier, *(s.triple for s in supports))
    ]
    unsupported = _UnsupportedAnswers(gold, known, stated)
    asked = {earlier.query for earlier in rounds} | {query}
    target, next_query = _next_query(gold, known, asked, unsupported)
    thought = _rationale(gold, supports, known, target, unsupported)
    return Step(query, kept=tuple(dict.fromkeys(kept)), thought=thought, next_query=next_query)


def _decide_on_sentences(
    gold: SentenceGold, rounds: Sequence[Round], query: str, candidates: Sequence[Any]
) -> Step:
    """Keeps every new sentence that supports a solved hop."""
    kept_earlier: list[Any] = [sentence for earlier in rounds for sentence in earlier.kept]
    known = gold.known([*kept_earlier, *candidates])
    kept_lines = set(map(compact.line, kept_earlier))
    kept = [
        sentence
        for sentence in candidates
        if known.keys() & gold.sentences.get(compact.line(sentence), ())
        and compact.line(sentence) not in kept_lines
    ]
    stated = [gold.question.question, *known.values(), *map(compact.line, [*kept_earlier, *kept])]
    asked = {earlier.query for earlier in rounds} | {query}
    _, next_query = _next_query(gold, known, asked, _UnsupportedAnswers(gold, known, stated))
    return Step(query, kept=tuple(kept), next_query=next_query)


def _values(supports: Sequence[Support]) -> dict[int, str]:
    return {support.hop: support.value for support in reversed(supports)}  # The best is set last.


def _next_query(
    gold: AnyGold, known: Mapping[int, str], asked: set[str], unsupported: "_UnsupportedAnswers"
) -> tuple[int | None, str | None]:
    """Returns the reachable hop with the fewest queries so far, and the next query for it.

    Returns (None, None) if every hop is supported.
    """
    choices = []
    for index in reachable(gold.hops, known):
        texts = [t for t in queries(gold, index, known) if not unsupported.appear_in(t)]
        unasked = [text for text in texts if text not in asked]
        # If all queries were used, repeats the first. Without queries, uses the question.
        text = [*unasked, *texts, gold.question.question][0]
        choices.append((len(texts) - len(unasked), index, text))
    if not choices:
        return None, None
    _, index, text = min(choices)
    return index, text


def queries(gold: AnyGold, index: int, known: Mapping[int, str]) -> list[str]:
    """Returns the queries for a hop: sub-question, keywords, and question with known answers."""
    hop = gold.hops[index]
    answers = ", ".join(dict.fromkeys(value for value in known.values() if value))
    texts = [fill(hop.sub_question, known), fill(hop.keywords, known)]
    texts += [f"{gold.question.question} ({answers})"] if answers else []
    return list(dict.fromkeys(text for text in map(_one_line, texts) if text))


def _rationale(
    gold: Gold,
    supports: Sequence[Support],
    known: Mapping[int, str],
    target: int | None,
    unsupported: "_UnsupportedAnswers",
) -> str:
    """Returns short sentences about what was found and what is missing."""
    sentences = []
    for support in {s.hop: s for s in reversed(supports)}.values():
        hop, text = gold.hops[support.hop], ""
        if support.value:
            noun = fill(hop.noun, known)
            text = (_FOUND if noun else _FOUND_FREE).format(
                Noun=_capital(noun), asks=fill(hop.sub_question, known), value=support.value
            )
        if not text or unsupported.appear_in(text):
            text = _FOUND_PLAIN.format(head=support.triple.head)
        sentences.append(text)
    sentences = sentences[::-1] or [_NOTHING]
    if target is None:
        return _one_line(" ".join([*sentences, _ENOUGH]))
    hop, text = gold.hops[target], ""
    noun, asks = fill(hop.noun, known), fill(hop.sub_question, known)
    if noun or asks:
        text = (_MISSING if noun else _MISSING_FREE).format(Noun=_capital(noun), asks=asks)
    if not text or unsupported.appear_in(text):
        text = _MISSING_PLAIN
    return _one_line(" ".join([*sentences, text]))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _one_line(text: str) -> str:
    """Returns the text on one line, without header markup of the prompt format."""
    return " ".join(re.sub(r"[\[\]#]+", " ", text).split())


class _UnsupportedAnswers:
    """The answers of a question that neither the question nor a kept fact states.

    ``known`` are the solved hops, and ``stated`` the question and the kept facts.
    """

    def __init__(self, gold: AnyGold, known: Mapping[int, str], stated: Sequence[str]):
        answers = [a for i, hop in enumerate(gold.hops) if i not in known for a in hop.answers]
        if len(known) < len(gold.hops):
            answers += [a for a in gold.question.answers if a.lower() not in ("yes", "no")]
        padded = [_padded(text) for text in stated]
        texts = {_padded(answer) for answer in answers} - {"  "}
        self._answers = [t for t in texts if not any(t in text for text in padded)]

    def appear_in(self, text: str) -> bool:
        """Returns whether ``text`` contains one of these answers."""
        padded = _padded(text)
        return any(answer in padded for answer in self._answers)


def _padded(text: str) -> str:
    return f" {normalize(text, 'unicode')} "
