"""Silver reasoning chains from annotations, in units of triples, sentences or passages.

KiRAG (section 3.4) trains its aligner on chains that an LLM found and a reader approved. Benchmarks
annotate the same thing: 2WikiMultihopQA writes the evidence triples down, MuSiQue the
decomposition, HotpotQA the supporting sentences. A chain here is those annotations mapped to the
*units* the aligner ranks, plus which step needs which earlier one, so that no LLM is needed.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from absl import logging

from cirag_jax.datasets import sentences
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage, Question, Triple

UnitKind = Literal["triple", "sentence", "passage"]
UNIT_KINDS: tuple[UnitKind, ...] = ("triple", "sentence", "passage")


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """What the aligner ranks: the text it embeds and the passage it came from."""

    text: str
    passage_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """The units that support one question.

    ``parents[i]`` lists the earlier steps that step ``i`` needs: step ``i`` can extend a partial
    chain once they are in it. ``comparison`` marks questions whose steps have no order of their
    own.
    """

    question_id: str
    question: str
    steps: tuple[Unit, ...]
    parents: tuple[tuple[int, ...], ...]
    comparison: bool

    def next_steps(self, done: Sequence[int]) -> tuple[int, ...]:
        """Steps that can extend the partial chain ``done``, in annotation order."""
        return tuple(
            step
            for step in range(len(self.steps))
            if step not in done and all(parent in done for parent in self.parents[step])
        )


def query_text(question: str, chain: Sequence[str], kind: UnitKind) -> str:
    """The aligner's query: the question and, once there are any, the units found so far.

    An empty chain gives the bare question, as KiRAG trains it; its released inference code appends
    an empty list instead, a mismatch that we do not copy (spec, section 2, difference 3).
    """
    if not chain:
        return question
    found = ". ".join(text.rstrip(" .") for text in chain)
    return f"{question}\nknowledge {kind}s: {found}."


def triple_text(triple: Triple) -> str:
    """``<head; relation; tail>``, the form KiRAG embeds."""
    return f"<{triple.head}; {triple.relation}; {triple.tail}>"


def passage_text(passage: Passage) -> str:
    """What represents a whole passage, for retrieval and as a unit."""
    return f"{passage.title}. {passage.text}"


def units_of(dataset: Dataset, passage_id: str, kind: UnitKind) -> tuple[Unit, ...]:
    """The units of one passage, in reading order, without repeats.

    A sentence carries its passage's title, because its subject is often a pronoun.
    """
    passage = dataset.corpus[passage_id]
    if kind == "triple":
        texts: Iterable[str] = map(triple_text, dataset.triples.get(passage_id, ()))
    elif kind == "sentence":
        found = sentences.sentences_of(passage)
        texts = (f"{passage.title}: {text}" for text in found if text.strip())
    elif kind == "passage":
        texts = (passage_text(passage),)
    else:
        raise UserError(f"config.data.units is {kind!r}; it must be one of {', '.join(UNIT_KINDS)}")
    return tuple(Unit(text, passage_id) for text in dict.fromkeys(texts))


def pool_of(dataset: Dataset, question: Question, kind: UnitKind) -> tuple[Unit, ...]:
    """All units of the question's own candidate passages (its context, else its gold passages)."""
    passage_ids = question.context or question.supporting or ()
    return tuple(
        unit for pid in dict.fromkeys(passage_ids) for unit in units_of(dataset, pid, kind)
    )


def silver_chains(dataset: Dataset, questions: Sequence[Question], kind: UnitKind) -> list[Chain]:
    """Chains of all questions that have one; says how many had none.

    Raises:
      UserError: no question has the annotations that a chain needs.
    """
    chains = [chain for q in questions if (chain := chain_of(dataset, q, kind))]
    if questions and not chains:
        raise UserError(
            f"none of the {len(questions)} questions of {dataset.name} gives a chain of {kind}s: "
            "chains need `evidences`, `decomposition`, `supporting_sentences` or `supporting`, "
            "and units=triple an openie.jsonl"
        )
    logging.info("%d of %d questions have a chain of %ss", len(chains), len(questions), kind)
    return chains


def chain_of(dataset: Dataset, question: Question, kind: UnitKind) -> Chain | None:
    """The silver chain of one question, or None where the annotations do not reach."""
    comparison = question.type == "comparison"
    facts = _annotated_facts(dataset, question)
    steps: dict[Unit, int] = {}  # A unit may state several facts (one sentence, two triples).
    step_of_fact: list[int | None] = []
    parents: dict[int, set[int]] = collections.defaultdict(set)
    for fact in facts:
        unit = _unit_of_fact(dataset, question, fact, kind)
        step = None if unit is None else steps.setdefault(unit, len(steps))
        step_of_fact.append(step)
        if step is not None and not comparison:
            needed = {step_of_fact[i] for i in fact.parents}
            # A unit that is already in the chain needs nothing that comes after it.
            parents[step] |= {p for p in needed if p is not None and p < step}
    if not steps:
        return None
    return Chain(
        question.id,
        question.question,
        tuple(steps),
        tuple(tuple(sorted(parents[i])) for i in range(len(steps))),
        comparison,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Fact:
    """One annotated step, before it is placed on a unit.

    ``about`` is what the unit should be about (head entity, sub-question), ``answer`` what it
    should state; ``places`` the (passage, sentence) pairs it may stand in, sentence None
    meaning any.
    """

    about: str
    answer: str
    places: tuple[tuple[str, int | None], ...]
    parents: tuple[int, ...]
    triple: Triple | None = None


def _annotated_facts(dataset: Dataset, question: Question) -> list[_Fact]:
    if question.evidences and question.supporting:
        return _facts_of_evidences(question)
    if question.decomposition:
        return _facts_of_decomposition(question)
    if question.supporting_sentences:
        return _facts_of_supporting_sentences(dataset, question)
    return _facts_of_supporting_passages(question)


def _facts_of_evidences(question: Question) -> list[_Fact]:
    """2WikiMultihopQA: gold triples; a triple needs the one whose tail is its head."""
    places = question.supporting_sentences or tuple((p, None) for p in question.supporting or ())
    evidences = question.evidences or ()
    facts = []
    for index, (head, relation, tail) in enumerate(evidences):
        parents = tuple(i for i in range(index) if _same_name(evidences[i][2], head))
        triple = Triple(head, relation, tail)
        facts.append(_Fact(head, tail, tuple(places), parents, triple))
    return facts


def _facts_of_decomposition(question: Question) -> list[_Fact]:
    """MuSiQue: ``#k`` in a sub-question stands for the k-th answer and makes that step a parent."""
    steps = question.decomposition or ()
    facts = []
    for index, step in enumerate(steps):
        refs = [int(r) - 1 for r in re.findall(r"#(\d+)", step.question) if 0 < int(r) <= index]
        asked = re.sub(
            r"#(\d+)",
            lambda m: steps[int(m[1]) - 1].answer if 0 < int(m[1]) <= len(steps) else m[0],
            step.question,
        )
        places = ((step.supporting, None),) if step.supporting else ()
        facts.append(_Fact(asked, step.answer, places, tuple(refs)))
    return facts


def _facts_of_supporting_sentences(dataset: Dataset, question: Question) -> list[_Fact]:
    """HotpotQA: supporting sentences in reading order, the answer's passage last.

    The annotation lists passages in no order; a bridge question is read from the passage that leads
    on to the one that holds the answer.
    """
    by_passage: dict[str, list[int]] = {}
    for passage_id, sentence in question.supporting_sentences or ():
        by_passage.setdefault(passage_id, []).append(sentence)

    def holds_answer(passage_id: str) -> bool:
        text = passage_text(dataset.corpus[passage_id]).lower()
        return any(answer.lower() in text for answer in question.answers)

    facts = []
    for passage_id in sorted(by_passage, key=holds_answer):
        for sentence in sorted(by_passage[passage_id]):
            parents = (len(facts) - 1,) if facts else ()
            facts.append(_Fact(question.question, "", ((passage_id, sentence),), parents))
    return facts


def _facts_of_supporting_passages(question: Question) -> list[_Fact]:
    """Only gold passages are known: one step each, in the given order."""
    answer = question.answers[0] if question.answers else ""
    return [
        _Fact(question.question, answer, ((pid, None),), (index - 1,) if index else ())
        for index, pid in enumerate(question.supporting or ())
    ]


def _unit_of_fact(dataset: Dataset, question: Question, fact: _Fact, kind: UnitKind) -> Unit | None:
    """The unit that states the fact best, among the places that the annotation allows."""
    if not fact.places:
        return None
    passage_id, sentence = max(fact.places, key=functools.partial(_place_score, dataset, fact))
    passage = dataset.corpus[passage_id]
    if kind == "passage":
        return Unit(passage_text(passage), passage_id)
    if kind == "sentence":
        texts = sentences.sentences_of(passage)
        if not texts:  # A blank passage states nothing.
            return None
        if sentence is None:
            sentence = max(range(len(texts)), key=lambda i: _states(fact, texts[i]))
        return Unit(f"{passage.title}: {texts[sentence]}", passage_id)
    best = _triple_of_fact(dataset, fact, passage_id, sentence)
    return None if best is None else Unit(triple_text(best), passage_id)


def _triple_of_fact(
    dataset: Dataset, fact: _Fact, passage_id: str, sentence: int | None
) -> Triple | None:
    """The extracted triple that states the fact, else the annotated one, else None."""
    triples = dataset.triples.get(passage_id, ())
    if triples:
        best = max(triples, key=lambda t: _states(fact, triple_text(t)))
        if _states(fact, triple_text(best)) >= 1.0:  # It names the answer, or all that is asked.
            return best
    if fact.triple is not None:
        return fact.triple
    # A supporting sentence (HotpotQA) names no fact: take its triple nearest to the question.
    inside = [t for t in triples if sentence is not None and t.sentence == sentence]
    return max(inside, key=lambda t: _states(fact, triple_text(t)), default=None)


def _place_score(dataset: Dataset, fact: _Fact, place: tuple[str, int | None]) -> float:
    passage = dataset.corpus[place[0]]
    texts = sentences.sentences_of(passage)
    text = passage.text if place[1] is None else texts[place[1]]
    return 2.0 * _overlap(fact.about, passage.title) + _states(fact, f"{passage.title} {text}")


def _states(fact: _Fact, text: str) -> float:
    """How well ``text`` states the fact: 1 for the answer, up to 1 for what it is about."""
    words = _words(text)
    answer = _words(fact.answer)
    named = bool(answer) and len(answer & words) / len(answer) > 0.5
    about = _words(fact.about)
    return float(named) + (len(about & words) / len(about) if about else 0.0)


def _overlap(a: str, b: str) -> float:
    """F1 of the two word sets."""
    words_a, words_b = _words(a), _words(b)
    total = len(words_a) + len(words_b)
    return 2 * len(words_a & words_b) / total if total else 0.0


def _same_name(a: str, b: str) -> bool:
    return _overlap(a, b) > 0.6


@functools.lru_cache(maxsize=65536)
def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))
