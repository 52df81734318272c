"""Silver reasoning chains built from annotations; steps are triples, sentences or passages.

KiRAG (section 3.4) trains its aligner on chains that an LLM found and a reader model approved.
Benchmarks annotate the same information: 2WikiMultihopQA has evidence triples, MuSiQue has
decompositions, and HotpotQA has supporting sentences. This module maps these annotations
(`annotations.Hop`) to the units that the aligner ranks, and records the parents of each step. It
needs no LLM.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from absl import logging

from cirag_jax.datasets import annotations, sentences
from cirag_jax.datasets.annotations import Hop
from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage, Question, Role, Triple
from cirag_jax.validation import check_value

UnitKind = Literal["triple", "sentence", "passage"]
UNIT_KINDS: tuple[UnitKind, ...] = get_args(UnitKind)


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A text that the aligner ranks, and the id of its passage."""

    text: str
    passage_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """The units that support the answer to one question; their texts are distinct.

    Step ``i`` can extend any partial chain that contains its parents, the earlier steps
    ``parents[i]``. ``comparison`` marks questions whose steps have no order.
    """

    question_id: str
    question: str
    steps: tuple[Unit, ...]
    parents: tuple[tuple[int, ...], ...]
    comparison: bool

    def next_steps(self, done: Sequence[int]) -> tuple[int, ...]:
        """Returns the steps that can extend the partial chain ``done``, in annotation order."""
        return tuple(
            step
            for step in range(len(self.steps))
            if step not in done and all(parent in done for parent in self.parents[step])
        )


def query_text(
    question: str, chain: Sequence[str], kind: UnitKind, *, list_when_empty: bool = False
) -> str:
    """Returns the aligner's query: the question and the units of the chain so far.

    An empty chain gives the bare question, as in KiRAG's training. KiRAG's released inference code
    appends an empty list instead, a mismatch that ``list_when_empty`` reproduces.
    """
    if not chain and not list_when_empty:
        return question
    units = ". ".join(text.rstrip(" .") for text in chain)
    return f"{question}\nknowledge {kind}s: {units}."


def triple_text(triple: Triple) -> str:
    """Returns ``<head; relation; tail>``, the form that KiRAG embeds."""
    return f"<{triple.head}; {triple.relation}; {triple.tail}>"


def role_of(kind: UnitKind) -> Role:
    """Returns the role in which an encoder embeds units of this kind."""
    return "triple" if kind == "triple" else "passage"


def passage_text(passage: Passage) -> str:
    """Returns the text of a passage, both for retrieval and as a unit."""
    return f"{passage.title}. {passage.text}"


def sentence_text(passage: Passage, index: int) -> str:
    """Returns a sentence with its passage's title, because its subject may be a pronoun."""
    return f"{passage.title}: {sentences.sentences_of(passage)[index]}"


def sentence_texts(passage: Passage) -> dict[str, int]:
    """Returns the distinct nonblank sentences of a passage, as units with their indices."""
    indices: dict[str, int] = {}
    for index, text in enumerate(sentences.sentences_of(passage)):
        if text.strip():
            indices.setdefault(sentence_text(passage, index), index)
    return indices


def unit_texts(passage: Passage, kind: UnitKind, triples: Iterable[Triple]) -> list[str]:
    """Returns the texts of the distinct units of one passage, in reading order."""
    if kind == "triple":
        return list(dict.fromkeys(map(triple_text, triples)))
    if kind == "sentence":
        return list(sentence_texts(passage))
    check_value("config.data.units", kind, UnitKind)
    return [passage_text(passage)]


def units_of(dataset: Dataset, passage_id: str, kind: UnitKind) -> tuple[Unit, ...]:
    """Returns the distinct units of one passage, in reading order."""
    texts = unit_texts(dataset.corpus[passage_id], kind, dataset.triples.get(passage_id, ()))
    return tuple(Unit(text, passage_id) for text in texts)


def pool_of(dataset: Dataset, question: Question, kind: UnitKind) -> tuple[Unit, ...]:
    """Returns all units of the question's context, or of its gold passages."""
    passage_ids = question.context or question.supporting or ()
    return tuple(
        unit for pid in dict.fromkeys(passage_ids) for unit in units_of(dataset, pid, kind)
    )


def silver_chains(dataset: Dataset, questions: Sequence[Question], kind: UnitKind) -> list[Chain]:
    """Returns the chains of all questions that have one, and logs their number."""
    chains = [chain for q in questions if (chain := chain_of(dataset, q, kind))]
    if questions and not chains:
        raise UserError(
            f"none of the {len(questions)} questions of {dataset.name} yields a chain of {kind}s: "
            "chains need `evidences`, `decomposition`, `supporting_sentences` or `supporting`, "
            "and units=triple also needs triples (openie.jsonl or config.data.triples)"
        )
    logging.info("%d of %d questions have a chain of %ss", len(chains), len(questions), kind)
    return chains


def chain_of(dataset: Dataset, question: Question, kind: UnitKind) -> Chain | None:
    """Returns the silver chain of one question, or None if its annotations yield no unit."""
    comparison = question.type == "comparison"
    hops = annotations.hops_of(question, dataset.corpus)
    answers = {index: hop.answers[0] for index, hop in enumerate(hops) if hop.answers}
    # A unit may state several hops (one sentence, two triples). Equal texts of several passages are
    # one step, because the aligner ranks texts.
    steps: dict[str, Unit] = {}
    last_step: list[int | None] = []  # The last step of each hop.
    parents: dict[int, set[int]] = collections.defaultdict(set)
    for index, hop in enumerate(hops):
        needed = {last_step[parent] for parent in hop.parents}
        step = None
        for unit in units_of_hop(dataset, hop, index, answers, kind):
            steps.setdefault(unit.text, unit)
            step = list(steps).index(unit.text)
            if not comparison:
                # A unit that was already in the chain only depends on steps before it.
                parents[step] |= {p for p in needed if p is not None and p < step}
            needed = {step}
        last_step.append(step)
    if not steps:
        return None
    return Chain(
        question.id,
        question.question,
        tuple(steps.values()),
        tuple(tuple(sorted(parents[i])) for i in range(len(steps))),
        comparison,
    )


class _Fact(NamedTuple):
    """A unit's subject (a head entity or a sub-question), and the answer it must state."""

    about: str
    answer: str


def _fact_of(hop: Hop, index: int, answers: Mapping[int, str]) -> _Fact:
    if hop.triple is not None:
        return _Fact(hop.triple[0], hop.triple[2])
    about = hop.keywords if hop.is_entity else hop.about
    return _Fact(annotations.fill(about, answers), answers.get(index, ""))


def units_of_hop(
    dataset: Dataset, hop: Hop, index: int, answers: Mapping[int, str], kind: UnitKind
) -> list[Unit]:
    """Returns the units that state the ``index``-th hop of a question.

    A hop with annotated sentences but no triple gives one unit per sentence. Any other hop gives
    one unit, from its best place. Each ``#k`` is replaced with the k-th of ``answers``.
    """
    fact, places = _fact_of(hop, index, answers), hop.places
    if places and (hop.triple is not None or places[0][1] is None):
        places = (max(places, key=functools.partial(_place_score, dataset, fact)),)
    units = (_unit_at(dataset, hop, fact, *place, kind) for place in places)
    return [unit for unit in units if unit is not None]


def _unit_at(
    dataset: Dataset, hop: Hop, fact: _Fact, passage_id: str, sentence: int | None, kind: UnitKind
) -> Unit | None:
    passage = dataset.corpus[passage_id]
    if kind == "passage":
        return Unit(passage_text(passage), passage_id)
    if kind == "sentence":
        texts = sentences.sentences_of(passage)
        if not texts:
            return None
        if sentence is None:
            sentence = max(range(len(texts)), key=lambda i: _statement_score(fact, texts[i]))
        return Unit(sentence_text(passage, sentence), passage_id)
    best = _triple_at(dataset, hop, fact, passage_id, sentence)
    return None if best is None else Unit(triple_text(best), passage_id)


def _triple_at(
    dataset: Dataset, hop: Hop, fact: _Fact, passage_id: str, sentence: int | None
) -> Triple | None:
    """Returns the extracted triple that states the fact, else the annotated triple or None."""
    triples = dataset.triples.get(passage_id, ())
    if hop.triple is None and sentence is not None:
        # A supporting sentence (HotpotQA) annotates no triple; take its triple nearest to the fact.
        triples = [t for t in triples if t.sentence == sentence]
    best = max(triples, key=lambda t: _statement_score(fact, triple_text(t)), default=None)
    if best is not None and (
        _statement_score(fact, triple_text(best))
        >= 1.0  # It states the answer, or all words of the subject.
        or (hop.triple is None and sentence is not None)
    ):
        return best
    return None if hop.triple is None else Triple(*hop.triple)


def _place_score(dataset: Dataset, fact: _Fact, place: tuple[str, int | None]) -> float:
    passage = dataset.corpus[place[0]]
    texts = sentences.sentences_of(passage)
    text = passage.text if place[1] is None else texts[place[1]]
    about, title = _words(fact.about), _words(passage.title)
    is_about = 2 * len(about & title) / (len(about) + len(title) or 1)
    return 2.0 * is_about + _statement_score(fact, f"{passage.title} {text}")


def _statement_score(fact: _Fact, text: str) -> float:
    """Scores how well a text states a fact: 1 for the answer, plus up to 1 for the subject."""
    words, answer, about = _words(text), _words(fact.answer), _words(fact.about)
    has_answer = bool(answer) and len(answer & words) / len(answer) > 0.5
    return float(has_answer) + (len(about & words) / len(about) if about else 0.0)


@functools.lru_cache(maxsize=65536)
def _words(text: str) -> frozenset[str]:
    """All words, including stop words, because a film may be called "On"."""
    return frozenset(re.findall(r"\w+", text.lower()))
