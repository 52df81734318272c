"""DRAGIN: retrieves when entropy and attention show a need (Su et al., ACL 2024)."""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from cirag_jax.methods.common.evidence import best_scores
from cirag_jax.methods.common.predictions import passage_prediction
from cirag_jax.methods.common.reading import NO_MINIMUM, SearchConfig, search
from cirag_jax.methods.common.writing import (
    PROMPT,
    AnswerFormat,
    answer_of,
    render_writing,
    sentence_of,
    tokens_with_ends,
    writing_messages,
)
from cirag_jax.methods.common.written_answers import first_sentence, has_answer
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program
from cirag_jax.types import (
    Count,
    NonNegativeFloat,
    Passage,
    PositiveInt,
    Prediction,
    Question,
    Step,
)

_ATTENDED = 100  # Attended positions that the backend reports per token; its maximum.


@dataclasses.dataclass(frozen=True)
class DraginConfig(SearchConfig):
    """DRAGIN's settings.

    Attributes:
      threshold: a sentence that has a word with a larger score is written again with passages (the
        code: 0.8 to 1.2, by dataset and model).
      num_query_words: maximum number of words of a query (the code: 25 to 35).
      num_passages: passages that are shown when a sentence is written again.
      rerank_from: passages retrieved for reranking, which keeps the best num_passages; 0 disables
        reranking.
      min_score: reranked passages with this score or less are dropped; the default drops none.
      max_rounds: maximum number of retrievals and continuations.
      max_chars: no further text is written after this number of characters (ours; the code limits
        tokens).
      reader_format: text (the answer is the one that the text states), or a format of a reader
        that answers from the retrieved passages: documents, thought, chain, brief. Without
        passages, the answer is that of the text.
    """

    threshold: NonNegativeFloat = 1.0
    num_query_words: PositiveInt = 25
    num_passages: PositiveInt = 3
    rerank_from: Count = 0
    min_score: float = NO_MINIMUM
    max_rounds: PositiveInt = 5
    max_chars: PositiveInt = 1500
    reader_format: AnswerFormat = "text"

    @property
    def needs(self) -> Needs:
        """Needs a generator that reports entropies and attention, and what the settings add."""
        return Needs(
            roles=("generator", *(("reader",) if self.reader_format != "text" else ())),
            abilities={"generator": ("entropy", "attention", "continue_final")},
            rankers=("passages",) if self.rerank_from else (),
        )


def dragin(question: Question, config: DraginConfig) -> Program[Prediction]:
    """Answers a question in continuations; retrieves at the first sentence that needs facts."""
    text, written, steps = question.question, "", list[Step[str]]()
    errors = collections.Counter[str]()
    collected, best = dict[str, Passage](), dict[str, float]()
    for _ in range(config.max_rounds):
        response: Generated = yield Generate(
            writing_messages(text, (), written),
            "generator",
            continue_final=bool(written),
            entropy=True,
            attention=_ATTENDED,
        )
        words = scored_words(response)
        need = find_need(response, words, config.threshold)
        if need is None:
            addition = PROMPT.read(response.text).strip()
            steps.append(Step("", thought=addition, response=response.text))
        else:
            before = PROMPT.read(response.text[: need.start]).strip()
            query = query_of(f"{text} {written}", words, need, config.num_query_words)
            if not query:
                errors["query_empty"] += 1
                query = text
            retrieved = yield from search(query, config)
            ids = retrieved.ids
            best = best_scores([*best.items(), *zip(ids, retrieved.scores, strict=True)])
            collected |= {passage.id: passage for passage in retrieved.passages}
            begun = f"{written} {before}".strip()
            rewriting: Generated = yield Generate(
                writing_messages(text, retrieved.passages, begun),
                "generator",
                continue_final=bool(begun),
            )
            sentence = sentence_of(rewriting).text
            errors["rewriting_empty"] += not sentence
            addition = f"{before} {sentence or PROMPT.read(need.text)}".strip()
            score = max(word.score for word in need.words)
            notes = {"look_ahead": response.text, "score": score}
            steps.append(Step(query, ids, thought=addition, response=rewriting.text, notes=notes))
        errors["text_empty"] += not addition
        is_repeated = bool(addition) and addition in written
        errors["repeated_sentence"] += is_repeated
        if not addition or is_repeated:
            break
        written = f"{written} {addition}".strip()
        is_complete = need is None and response.finish_reason == "stop"
        if has_answer(addition) or is_complete or len(written) >= config.max_chars:
            break
    ranked = sorted(collected.values(), key=lambda passage: -best[passage.id])
    attempt = yield from answer_of(
        text, written, ranked[: config.num_passages], config.reader_format, errors
    )
    return passage_prediction((passage.id for passage in ranked), steps, [attempt], errors)


# --------------------------------------------------------------- when to retrieve (section 3.1)


class Word(NamedTuple):
    """A word of a response.

    Attributes:
      text: the word.
      start: its position in the response.
      entropy: mean entropy of its tokens.
      received: mean of the largest attention weights that later tokens gave to its tokens.
      attended: (text, position) -> mean attention weight that its tokens gave to a token.
      score: the score S of section 3.1, scaled as in the code; 0 for stop words.
    """

    text: str
    start: int
    entropy: float
    received: float
    attended: dict[tuple[str, int], float]
    score: float = 0.0


class Need(NamedTuple):
    """A sentence that needs passages: its start, its text, and its words above the threshold."""

    start: int
    text: str
    words: tuple[Word, ...]


_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about above after again all also although am an and any are as at be because "
        "been before being below between both but by can could did do does doing down "
        "during each either few for from further had has have having he her here hers him "
        "his how i if in into is it its itself just me more most my no nor not now of off "
        "on once only or other our out over own per same she should so some such than that "
        "the their them then there these they this those through to too under until up upon "
        "very was we were what when where which while who whom whose why will with would "
        "you your answer",
    )
)


def is_content(word: str) -> bool:
    """Returns whether a word is not a stop word and may be part of a query."""
    return word.lower() not in _STOP_WORDS


def scored_words(response: Generated) -> list[Word]:
    """Returns the words of a response with means over their tokens; scores are still 0."""
    tokens, words = tokens_with_ends(response), list[Word]()
    for match in _WORD.finditer(response.text):
        parts = [
            token for token, end in tokens if token.offset < match.end() and end > match.start()
        ]
        attended = collections.defaultdict[tuple[str, int], float](float)
        for token in parts:
            for piece, position, weight in token.attended:
                attended[piece, position] += _number(weight) / len(parts)
        words.append(
            Word(
                match[0],
                match.start(),
                _mean([token.entropy for token in parts]),
                _mean([token.received for token in parts]),
                dict(attended),
            )
        )
    return words


def find_need(response: Generated, words: Sequence[Word], threshold: float) -> Need | None:
    """Returns the first sentence that has a word with a score above ``threshold``.

    The score of a word is its entropy times the attention that it receives, as a share of the
    attention of all words of the sentence, times their number (DRAGIN's code).
    """
    start, text = 0, response.text
    while start < len(text):
        sentence = first_sentence(text[start:])
        if not sentence:
            return None
        begin = max(text.find(sentence, start), start)
        start = begin + len(sentence)
        within = [word for word in words if begin <= word.start < start]
        total = sum(word.received for word in within) or math.inf
        scores = [w.entropy * w.received / total * len(within) for w in within]
        high = tuple(
            word._replace(score=score)
            for word, score in zip(within, scores, strict=True)
            if score > threshold and is_content(word.text)
        )
        if high:
            return Need(begin, sentence, high)
    return None


# ------------------------------------------------------------- what to retrieve (section 3.2)


def query_of(context: str, words: Sequence[Word], need: Need, num_words: int) -> str:
    """Returns the words that the words of a need attend to most, in the order of the text.

    The words come from ``context`` (question and text so far) and from the response up to the last
    word of the need, without the words of the need themselves.

    Backends report attention by token, so a word gets the largest weight of the tokens whose text
    is the word or its beginning (ours).
    """
    by_position = collections.Counter[tuple[str, int]]()
    for word in need.words:
        by_position.update(word.attended)
    weights = dict[str, float]()
    for (piece, _), weight in by_position.items():
        piece = piece.strip().lower()
        weights[piece] = max(weights.get(piece, 0.0), weight)
    hits = {word.start for word in need.words}
    earlier = (w.text for w in words if w.start < max(hits) and w.start not in hits)
    candidates = dict[str, str]()  # Each word once, at its first place.
    for text in (*_WORD.findall(context), *earlier):
        if is_content(text):
            candidates.setdefault(text.lower(), text)

    def weight_of(lower: str) -> float:
        shortest = min(2, len(lower))
        return max(weights.get(lower[:end], 0.0) for end in range(shortest, len(lower) + 1))

    weighted = {lower: weight for lower in candidates if (weight := weight_of(lower)) > 0}
    best = {*sorted(weighted, key=lambda lower: -weighted[lower])[:num_words]}
    return " ".join(text for lower, text in candidates.items() if lower in best)


def _mean(values: Sequence[float | None]) -> float:
    return sum(map(_number, values)) / len(values) if values else 0.0


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


METHOD = Method(dragin, DraginConfig, lambda config: render_writing(config.reader_format))
