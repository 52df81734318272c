"""Training examples of the reader: a question with evidence, and an answer or a refusal.

The evidence mixes gold lines, in their order, with distractors that share many words with the
question, usually from its context. Some examples lack one gold triple, or the gold lines of one
passage. Their target is a refusal, after which CIRAG's cascade reads more text (section 3.4). Some
prompts do not allow refusals, like the last prompt of the cascade. Prompts are the same as in
inference. The loss is on the answer and its end token.
"""

import collections
import dataclasses
import itertools
import re
import zlib
from collections.abc import Iterable, Sequence
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
    """Settings of the evidence.

    Attributes:
      granularities: kinds of evidence lines to draw from: triples, sentences, passages. A question
        without annotations of the drawn kind gets sentences, or else passages. The gold sentences
        of a decomposed question (MuSiQue) state its steps; they are used only if one of them states
        the answer.
      distractors: maximum number of distracting triples or sentences; for passages, half of it.
      missing: share of examples that lack one gold triple, or the gold lines of one passage.
      forced: share of prompts that do not allow a refusal, if the evidence has the answer.
      reader_format: see `methods.common.reading_prompts.answer_messages`.
      seed: seed of all random choices.
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
    """A question with lines of evidence.

    ``sufficient`` is False if gold evidence is missing. ``may_refuse`` is True if the prompt allows
    a refusal. ``chain`` contains the annotated facts that lead to the answer, up to the first fact
    that the evidence lacks, and the conclusion of a comparison.
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
    """Returns a reading for each question, and the number of questions without gold evidence."""
    facts = [(fact, q.id) for q in dataset.questions for fact in q.evidences or ()]
    readings = []
    for question in questions:
        rng = np.random.default_rng([settings.seed, zlib.crc32(question.id.encode())])
        drawn = str(rng.choice(settings.granularities))
        for granularity in (drawn, "sentence", "passage"):
            gold, others = _pools(dataset, question, granularity, facts, rng)
            if gold:
                chain = _facts(dataset, question)
                readings.append(
                    _draw_reading(question, granularity, gold, others, chain, settings, rng)
                )
                break
    return readings, len(questions) - len(readings)


def reading_examples(
    tokenizer: ChatTokenizer,
    readings: Sequence[Reading],
    reader_format: str,
    *,
    max_length: int,
    answer_weight: float = 1.0,
) -> tuple[list[Example], dict[str, int]]:
    """Returns the readings as conversations.

    Conversations of more than ``max_length`` tokens are dropped and counted as
    ``dropped_too_long``. ``answer_weight`` is the loss weight of tokens of the answer and of the
    conclusion before it.
    """
    examples, reasons = [], collections.Counter[str]()
    for reading in readings:
        is_refused = not reading.sufficient and reading.may_refuse
        answer = None if is_refused else reading.question.answers[0]
        chain = reading.chain if reader_format == "chain" else ()
        output = Message("assistant", reading_prompts.render_answer(answer, chain))
        turns = [*messages_of(reading, reader_format), output]
        example = chat_examples(
            tokenizer, turns, (len(turns) - 1,), source=reading.question.id, split=_reading_parts
        )
        example = weighted(example, {Part.ANSWER: answer_weight})
        if len(example.tokens_T) <= max_length:
            examples.append(example)
        else:
            reasons["dropped_too_long"] += 1
    return examples, dict(reasons)


def _reading_parts(text: str) -> list[tuple[int, Part]]:
    """Splits an output into two parts: the facts, and the conclusion with the answer."""
    start = next(match.start() for match in _CONCLUDES.finditer(text))
    return [(0, Part.FACTS), (start, Part.ANSWER)] if start else [(0, Part.ANSWER)]


def messages_of(reading: Reading, reader_format: str) -> tuple[Message, ...]:
    """Returns the prompt of a reading."""
    return reading_prompts.answer_messages(
        reading.question.question,
        reading.granularity,
        reading.evidence,
        may_refuse=reading.may_refuse,
        reader_format=reader_format,
    )


# Lines of evidence, grouped by passage or fact.
_Groups = list[list[str]]


def _pools(
    dataset: Dataset,
    question: Question,
    granularity: str,
    facts: Sequence[tuple[tuple[str, str, str], str]],
    rng: np.random.Generator,
) -> tuple[_Groups, list[str]]:
    """Returns the gold evidence, and the distractors sorted by `_nearest`.

    Passages with the text of a gold passage are no distractors.
    """
    corpus, gold = dataset.corpus, tuple(question.supporting or ())
    gold_lines = {passage_line(corpus[i]) for i in gold if i in corpus}
    context = [corpus[i] for i in question.context or () if i in corpus and i not in gold]
    context = [passage for passage in context if passage_line(passage) not in gold_lines]
    if granularity == "triple":
        lines = [[triple_line(Triple(*fact), "ascii")] for fact in question.evidences or ()]
        triples = [t for p in context for t in dataset.triples.get(p.id, ())]
        if not triples and facts:  # If nothing was extracted, uses facts of other questions.
            chosen = rng.choice(len(facts), min(60, len(facts)), replace=False)
            triples = [Triple(*facts[i][0]) for i in chosen if facts[i][1] != question.id]
        triple_lines = [triple_line(triple, "ascii") for triple in triples]
        return _distinct(lines), _nearest(question, triple_lines)
    if granularity == "sentence":
        places: dict[str, list[int]] = {}
        for passage_id, index in _gold_sentences(dataset, question):
            if passage_id in corpus:
                places.setdefault(passage_id, []).append(index)
        lines = [[sentence_line(corpus[i], s) for s in indices] for i, indices in places.items()]
        others = [
            sentence_line(passage, index)
            for passage in (*context, *(corpus[i] for i in places))
            for index in range(len(sentences_of(passage)))
            if index not in places.get(passage.id, ())
        ]
        groups = _distinct(lines)
        return groups, _nearest(question, others, itertools.chain.from_iterable(groups))
    lines = [[passage_line(corpus[i])] for i in gold if i in corpus]
    return _distinct(lines), _nearest(question, [passage_line(passage) for passage in context])


def _distinct(groups: _Groups) -> _Groups:
    """Returns distinct groups; if one of two equal groups were dropped, no evidence would lack."""
    return [list(group) for group in dict.fromkeys(map(tuple, groups))]


def _gold_sentences(dataset: Dataset, question: Question) -> Sequence[tuple[str, int]]:
    """Returns the gold sentences: annotated, or found through the decomposition.

    Sentences found through the decomposition state its steps. If none of these sentences contains
    the answer, returns ().
    """
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
    """Returns the annotated facts that lead to the answer.

    If a sub-question cannot be written as a fact, its text with the relation "answer" is used.
    """
    if question.evidences or not question.decomposition:
        return tuple(question.evidences or ())
    hops = hops_of(question, dataset.corpus)
    answers = {index: hop.answers[0] for index, hop in enumerate(hops) if hop.answers}
    return tuple(
        fact_of(hop, answers)
        or (fill(hop.sub_question, answers).rstrip("?"), "answer", hop.answers[0])
        for hop in hops
        if hop.answers
    )


def _nearest(question: Question, lines: Sequence[str], gold: Iterable[str] = ()) -> list[str]:
    """Returns distinct lines, sorted by the words that they share with the question and ``gold``.

    With gold lines, other facts about their people and the same facts about other people are near,
    as in a search with the question and the facts found so far.
    """
    known = words(" ".join((question.question, *gold)))
    return sorted(dict.fromkeys(lines), key=lambda line: -len(known & words(line)))


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
    near = [line for line in others if line not in kept]
    if not sufficient and question.answers[0].casefold() not in question.question.casefold():
        near = [line for line in near if not _states_answer(question, [line])] or near
    near = near[: 2 * most]
    count = int(rng.integers(min(1, most), most + 1)) if most else 0
    drawn = rng.permutation(len(near))[:count]
    lines = list(kept)
    for i in drawn:  # The gold lines keep their order.
        lines.insert(int(rng.integers(len(lines) + 1)), near[i])
    # An answer may be forced even if the evidence is insufficient.
    can_answer = sufficient or _states_answer(question, lines)
    may_refuse = bool(not can_answer or rng.random() >= settings.forced)
    chain = (*chain, *conclusion(question)) if sufficient else _stated(chain, kept)
    return Reading(question, granularity, tuple(lines), sufficient, may_refuse, chain)


def _states_answer(question: Question, lines: Sequence[str]) -> bool:
    """Returns whether a line has the answer, or the answer is yes or no."""
    answer = question.answers[0].casefold()
    return answer in ("yes", "no") or any(answer in line.casefold() for line in lines)


def _stated(
    chain: Sequence[tuple[str, str, str]], lines: Sequence[str]
) -> tuple[tuple[str, str, str], ...]:
    """Returns the facts before the first fact that no line states.

    A line states a fact if it contains the tail and at least half of the head's words.
    """

    def stated(fact: tuple[str, str, str]) -> bool:
        head = words(fact[0])
        return any(
            fact[2].casefold() in line.casefold() and 2 * len(head & words(line)) >= len(head)
            for line in lines
        )

    return tuple(itertools.takewhile(stated, chain))
