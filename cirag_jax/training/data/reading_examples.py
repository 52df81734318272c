"""Supervised examples of the reader: evidence at a granularity, answered or refused.

A question's gold evidence stands among distractors of its own context, those nearest to it in
words, at places drawn by the seed; what leads to the answer keeps its order, as a chain that was
collected hop by hop has it. In a share of the examples one gold passage's evidence is
missing, and the right output is the refusal: so the cascade learns when to escalate (CIRAG, section
3.4). A share is asked without leave to refuse, as the cascade's last reading is. Messages and chat
template are those of inference; the loss is on the answer and the token that ends it.
"""

import collections
import dataclasses
import itertools
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cirag_jax.datasets.annotations import fact_of, fill, hops_of, words
from cirag_jax.datasets.chains import UNIT_KINDS, UnitKind, chain_of, sentence_texts
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.types import Message
from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.evidence import passage_line, sentence_line, triple_line
from cirag_jax.training.data.comparisons import BEFORE, OTHER, SAME, conclusion
from cirag_jax.training.data.examples import Example, Part, chat_examples, weighted
from cirag_jax.types import Count, Dataset, Question, Triple, UnitInterval
from cirag_jax.validation import check_fields

_CONCLUDES = re.compile(rf"^(?:Answer:|[^;\n]*; (?:{BEFORE}|{SAME}|{OTHER}); )", re.M)


@dataclasses.dataclass(frozen=True)
class ReadingSettings:
    """What evidence looks like.

    Attributes:
      granularities: one is drawn for each question, as often as it is listed; where a question has
        no annotation of it, sentences or else passages take its place. Of a decomposed question
        (MuSiQue) the sentences are those that state its steps, if one states the answer.
      distractors: most distractors of a triple's or a sentence's pool; passages have half as many.
      missing: share of the examples without one gold passage's evidence.
      forced: share of the examples whose evidence has the answer, be it whole or not, that are
        asked without the permission to refuse, and answered.
      reader_format: as in `methods.common.reading_prompts.answer_messages`.
      seed: of everything that is drawn.
    """

    granularities: tuple[UnitKind, ...] = UNIT_KINDS
    distractors: Count = 4
    missing: UnitInterval = 0.25
    forced: UnitInterval = 0.25
    reader_format: reading_prompts.ReaderFormat = "brief"
    seed: int = 0

    def __post_init__(self):
        check_fields(self)
        if not self.granularities:
            raise UserError("granularities must not be empty.")


class Reading(NamedTuple):
    """A question with evidence.

    Attributes:
      question: the question.
      granularity: of the evidence.
      evidence: as the reader sees it.
      sufficient: whether no gold evidence is missing.
      may_refuse: whether the reader is told that it may; if not, it is to answer.
      chain: annotated facts that lead to the answer, as far as the evidence states them, and what
        a comparison concludes from them.
    """

    question: Question
    granularity: str
    evidence: tuple[str, ...]
    sufficient: bool
    may_refuse: bool
    chain: tuple[tuple[str, str, str], ...] = ()


def make_readings(
    dataset: Dataset, questions: Sequence[Question], settings: ReadingSettings
) -> tuple[list[Reading], int]:
    """One reading a question, and how many questions have no gold passages to read.

    Args:
      dataset: with the questions' passages.
      questions: of it.
      settings: what the evidence looks like.
    """
    facts = [(fact, q.id) for q in dataset.questions for fact in q.evidences or ()]
    found = []
    for question in questions:
        rng = np.random.default_rng([settings.seed, zlib.crc32(question.id.encode())])
        wanted = str(rng.choice(settings.granularities))
        for granularity in (wanted, "sentence", "passage"):
            gold, others = _pools(dataset, question, granularity, facts, rng)
            if gold:
                chain = _facts(dataset, question)
                found.append(
                    _draw_reading(question, granularity, gold, others, chain, settings, rng)
                )
                break
    return found, len(questions) - len(found)


def reading_examples(
    tokenizer: ChatTokenizer,
    readings: Sequence[Reading],
    reader_format: str,
    *,
    max_length: int,
    answer_weight: float = 1.0,
) -> tuple[list[Example], dict[str, int]]:
    """The readings as conversations; their source is the question's id.

    Args:
      tokenizer: of the student.
      readings: what is asked.
      reader_format: as in `methods.common.reading_prompts.answer_messages`.
      max_length: most tokens of an example; longer ones are dropped whole.
      answer_weight: of each token of the answer and of the comparison before it; one of the facts
        weighs 1.

    Returns:
      The examples, and how many were ``dropped_too_long``.
    """
    examples, reasons = [], collections.Counter[str]()
    for made in readings:
        refused = not made.sufficient and made.may_refuse
        answer = None if refused else made.question.answers[0]
        turns = [
            *messages_of(made, reader_format),
            Message(
                "assistant",
                reading_prompts.render_answer(
                    answer, made.chain if reader_format == "chain" else ()
                ),
            ),
        ]
        example = chat_examples(
            tokenizer, turns, (len(turns) - 1,), source=made.question.id, split=_reading_parts
        )
        example = weighted(example, {Part.ANSWER: answer_weight})
        if len(example.tokens_T) <= max_length:
            examples.append(example)
        else:
            reasons["dropped_too_long"] += 1
    return examples, dict(reasons)


def _reading_parts(text: str) -> list[tuple[int, Part]]:
    """Where a reader's facts begin, and what it concludes from them."""
    start = next(found.start() for found in _CONCLUDES.finditer(text))
    return [(0, Part.FACTS), (start, Part.ANSWER)] if start else [(0, Part.ANSWER)]


def messages_of(made: Reading, reader_format: str) -> tuple[Message, ...]:
    """What the reader is asked."""
    return reading_prompts.answer_messages(
        made.question.question,
        made.granularity,
        made.evidence,
        may_refuse=made.may_refuse,
        reader_format=reader_format,
    )


# ----------------------------------------------------------------------------------------- evidence

# Lines of evidence, those of one passage (or fact) together.
_Groups = list[list[str]]


def _pools(
    dataset: Dataset,
    question: Question,
    granularity: str,
    facts: Sequence[tuple[tuple[str, str, str], str]],
    rng: np.random.Generator,
) -> tuple[_Groups, list[str]]:
    """Gold evidence by passage, and what else may be retrieved for the question, nearest first."""
    corpus, gold = dataset.corpus, tuple(question.supporting or ())
    context = [corpus[i] for i in question.context or () if i in corpus and i not in gold]
    if granularity == "triple":
        own = [[triple_line(Triple(*fact), "ascii")] for fact in question.evidences or ()]
        stated = [t for p in context for t in dataset.triples.get(p.id, ())]
        if not stated and facts:  # nobody extracted any: those that other questions need
            some = rng.choice(len(facts), min(60, len(facts)), replace=False)
            stated = [Triple(*facts[i][0]) for i in some if facts[i][1] != question.id]
        return own, _nearest(question, [triple_line(triple, "ascii") for triple in stated])
    if granularity == "sentence":
        places: dict[str, list[int]] = {}
        for passage_id, index in _gold_sentences(dataset, question):
            if passage_id in corpus:
                places.setdefault(passage_id, []).append(index)
        own = [[sentence_line(corpus[i], s) for s in found] for i, found in places.items()]
        others = [
            sentence_line(passage, index)
            for passage in (*context, *(corpus[i] for i in places))
            for index in range(len(sentences_of(passage)))
            if index not in places.get(passage.id, ())
        ]
        return own, _nearest(question, others)
    own = [[passage_line(corpus[i])] for i in gold if i in corpus]
    return own, _nearest(question, [passage_line(passage) for passage in context])


def _gold_sentences(dataset: Dataset, question: Question) -> Sequence[tuple[str, int]]:
    """Those annotated; of a decomposition, those that state its steps, if one has the answer."""
    if question.supporting_sentences is not None or not question.decomposition:
        return question.supporting_sentences or ()
    chain = chain_of(dataset, question, "sentence")
    steps = chain.steps if chain else ()
    if not any(
        answer.lower() in step.text.lower() for answer in question.answers for step in steps
    ):
        return ()
    places = (
        (step.passage_id, sentence_texts(dataset.corpus[step.passage_id]).get(step.text))
        for step in steps
    )
    return [(passage_id, index) for passage_id, index in places if index is not None]


def _facts(dataset: Dataset, question: Question) -> tuple[tuple[str, str, str], ...]:
    """What leads to the answer, as annotated.

    A step in free words is a fact, too: what it asks, and its answer.
    """
    if question.evidences or not question.decomposition:
        return tuple(question.evidences or ())
    hops = hops_of(question, dataset.corpus)
    known = {index: hop.answers[0] for index, hop in enumerate(hops) if hop.answers}
    return tuple(
        fact_of(hop, known) or (fill(hop.asks, known).rstrip("?"), "answer", hop.answers[0])
        for hop in hops
        if hop.answers
    )


def _nearest(question: Question, lines: Sequence[str]) -> list[str]:
    """Lines by falling share of the question's words, each once."""
    asked = words(question.question)
    return sorted(dict.fromkeys(lines), key=lambda line: -len(asked & words(line)))


def _draw_reading(
    question: Question,
    granularity: str,
    gold: _Groups,
    others: Sequence[str],
    chain: tuple[tuple[str, str, str], ...],
    settings: ReadingSettings,
    rng: np.random.Generator,
) -> Reading:
    sufficient = bool(rng.random() >= settings.missing)
    if not sufficient:
        gold = list(gold)
        gold.pop(int(rng.integers(len(gold))))
    most = settings.distractors if granularity != "passage" else settings.distractors // 2
    kept = [line for group in gold for line in group]
    near = [line for line in others if line not in kept][: 2 * most]
    count = int(rng.integers(min(1, most), most + 1)) if most else 0
    drawn = rng.permutation(len(near))[:count]
    lines = list(kept)
    for i in drawn:  # Gold keeps its order.
        lines.insert(int(rng.integers(len(lines) + 1)), near[i])
    # Without the permission it answers as well as it can: from insufficient evidence, too.
    can_answer = sufficient or _states_answer(question, lines)
    may_refuse = bool(not can_answer or rng.random() >= settings.forced)
    chain = (*chain, *conclusion(question)) if sufficient else _stated(chain, kept)
    return Reading(question, granularity, tuple(lines), sufficient, may_refuse, chain)


def _states_answer(question: Question, lines: Sequence[str]) -> bool:
    """Whether a line has the answer; of a yes or a no, anything lets it be guessed."""
    answer = question.answers[0].casefold()
    return answer in ("yes", "no") or any(answer in line.casefold() for line in lines)


def _stated(
    chain: Sequence[tuple[str, str, str]], lines: Sequence[str]
) -> tuple[tuple[str, str, str], ...]:
    """The facts before the first that no line states: its tail, half of its head's words."""

    def stated(fact: tuple[str, str, str]) -> bool:
        head = words(fact[0])
        return any(
            fact[2].casefold() in line.casefold() and 2 * len(head & words(line)) >= len(head)
            for line in lines
        )

    return tuple(itertools.takewhile(stated, chain))
