"""FLARE: retrieves for sentences with improbable tokens (Jiang et al., EMNLP 2023)."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from cirag_jax.io import one_line
from cirag_jax.llm.types import Message, Token
from cirag_jax.methods.common.evidence import best_scores
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.predictions import passage_prediction
from cirag_jax.methods.common.reading import NO_MINIMUM, SearchConfig, search
from cirag_jax.methods.common.writing import (
    AnswerFormat,
    Sentence,
    answer_of,
    render_writing,
    sentence_of,
    writing_messages,
)
from cirag_jax.methods.common.written_answers import has_answer
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program, Retrieved
from cirag_jax.types import (
    Count,
    Passage,
    PositiveInt,
    Prediction,
    Question,
    Step,
    UnitInterval,
)


@dataclasses.dataclass(frozen=True)
class FlareConfig(SearchConfig):
    """FLARE's settings, with the defaults of FlashRAG and DualRAG's code.

    Attributes:
      threshold: a sentence that has a token of this probability or less is written again with
        passages (the paper's theta).
      query_threshold: tokens of this probability or less are left out of the query, or asked for
        (the paper's beta).
      query: query for a sentence: masked (the sentence without its improbable tokens), generated (a
        question for each run of improbable tokens), or sentence (the complete sentence).
      max_questions: maximum number of questions per sentence; only for generated.
      first_retrieval: retrieve for the question first and show these passages when a sentence is
        written for the first time (the paper's Figure 1).
      num_passages: passages that are shown when a sentence is written again.
      rerank_from: passages retrieved for reranking, which keeps the best num_passages; 0 disables
        reranking (DualRAG's code: 50).
      min_score: reranked passages with this score or less are dropped; the default drops none.
      max_rounds: maximum number of sentences.
      max_tokens: no further sentence is written after this number of tokens.
      reader_format: text (the answer is the one that the sentences state), or a format of a reader
        that answers from the retrieved passages: documents, thought, chain, brief. Without
        passages, the answer is that of the sentences.
    """

    threshold: UnitInterval = 0.2
    query_threshold: UnitInterval = 0.2
    query: Literal["masked", "generated", "sentence"] = "masked"
    max_questions: PositiveInt = 3
    first_retrieval: bool = False
    num_passages: PositiveInt = 5
    rerank_from: Count = 0
    min_score: float = NO_MINIMUM
    max_rounds: PositiveInt = 5
    max_tokens: PositiveInt = 256
    reader_format: AnswerFormat = "text"

    @property
    def needs(self) -> Needs:
        """Needs a generator that reports log-probabilities, and what the settings add."""
        return Needs(
            roles=(
                "generator",
                *(("questioner",) if self.query == "generated" else ()),
                *(("reader",) if self.reader_format != "text" else ()),
            ),
            abilities={"generator": ("logprobs", "continue_final")},
            rankers=("passages",) if self.rerank_from else (),
        )


def flare(question: Question, config: FlareConfig) -> Program[Prediction]:
    """Answers a question sentence by sentence; retrieves for sentences that are not certain."""
    text, written, steps = question.question, list[str](), list[Step[str]]()
    errors, num_tokens = collections.Counter[str](), 0
    collected, best = dict[str, Passage](), dict[str, float]()

    def retrieve(queries: Sequence[str]) -> Program[tuple[Passage, ...]]:
        nonlocal best
        rankings = list[Retrieved]()
        for query in queries:
            ranking = yield from search(query, config)
            rankings.append(ranking)
            best = best_scores([*best.items(), *zip(ranking.ids, ranking.scores, strict=True)])
        passages = interleaved([ranking.passages for ranking in rankings])[: config.num_passages]
        collected.update((passage.id, passage) for passage in passages)
        return passages

    def write(passages: Sequence[Passage]) -> Program[tuple[str, Sentence]]:
        begun = " ".join(written)
        response: Generated = yield Generate(
            writing_messages(text, passages, begun),
            "generator",
            continue_final=bool(begun),
            logprobs=True,
        )
        return response.text, sentence_of(response)

    first: tuple[Passage, ...] = ()
    if config.first_retrieval:
        first = yield from retrieve([text])
        steps.append(Step(text, tuple(passage.id for passage in first)))
    while len(written) < config.max_rounds and num_tokens < config.max_tokens:
        response, sentence = yield from write(first)
        queries, ids = list[str](), ()
        notes = {"look_ahead": sentence.text, "lowest_probability": lowest(sentence)}
        num_tokens += len(sentence.tokens)
        if sentence.text and lowest(sentence) <= config.threshold:
            queries = yield from queries_for(text, " ".join(written), sentence, config, errors)
        if queries:
            passages = yield from retrieve(queries)
            ids = tuple(passage.id for passage in passages)
            response, rewritten = yield from write(passages)
            errors["rewriting_empty"] += not rewritten.text
            sentence = rewritten if rewritten.text else sentence
        query, *more = queries or [""]
        steps.append(
            Step(
                query,
                ids,
                thought=sentence.text,
                response=response,
                more_queries=tuple(more),
                notes=notes,
            )
        )
        errors["sentence_empty"] += not sentence.text
        is_repeated = sentence.text in written
        errors["repeated_sentence"] += is_repeated
        if not sentence.text or is_repeated:
            break
        written.append(sentence.text)
        if has_answer(sentence.text) or sentence.is_last:
            break
    ranked = sorted(collected.values(), key=lambda passage: -best[passage.id])
    attempt = yield from answer_of(
        text, " ".join(written), ranked[: config.num_passages], config.reader_format, errors
    )
    return passage_prediction((passage.id for passage in ranked), steps, [attempt], errors)


def queries_for(
    question: str,
    written: str,
    sentence: Sentence,
    config: FlareConfig,
    errors: collections.Counter[str],
) -> Program[list[str]]:
    """Returns the queries for a sentence; possibly none."""
    if config.query == "generated":
        spans = improbable_spans(sentence, config.query_threshold)[: config.max_questions]
        text = f"{written} {sentence.text}".strip()
        responses: Sequence[Generated] = ()
        if spans:
            responses = yield [
                Generate(question_messages(question, text, span), "questioner") for span in spans
            ]
        asked = [parse_question(response.text) for response in responses]
        errors["question_empty"] += asked.count("")
        queries = list(dict.fromkeys(filter(None, asked)))
    elif config.query == "masked":
        queries = [masked(sentence, config.query_threshold)]
    else:
        queries = [sentence.text]
    # As in FlashRAG, a sentence without a query is accepted.
    queries = [query for query in queries if any(map(str.isalnum, query))]
    errors["query_empty"] += not queries
    return queries


def probability(token: Token) -> float:
    """Returns a token's probability; 0 if its log-probability is missing or not a number."""
    logprob = -math.inf if token.logprob is None else token.logprob
    return math.exp(min(logprob, 0.0)) if logprob == logprob else 0.0


def lowest(sentence: Sentence) -> float:
    """Returns the lowest probability of a sentence's tokens; 1 without tokens."""
    return min((probability(token) for token, _ in sentence.tokens), default=1.0)


def masked(sentence: Sentence, threshold: float) -> str:
    """Returns a sentence without its improbable tokens (the paper's equation for q_t)."""
    return one_line(
        "".join(text for token, text in sentence.tokens if probability(token) > threshold)
    )


def improbable_spans(sentence: Sentence, threshold: float) -> list[str]:
    """Returns the runs of improbable tokens that contain a letter or a digit."""
    runs = itertools.groupby(sentence.tokens, lambda pair: probability(pair[0]) <= threshold)
    spans = (one_line("".join(text for _, text in run)) for is_low, run in runs if is_low)
    return list(dict.fromkeys(span for span in spans if any(map(str.isalnum, span))))


def interleaved(rankings: Sequence[Sequence[Passage]]) -> tuple[Passage, ...]:
    """Returns the passages of several rankings by their place, each once."""
    rows = itertools.zip_longest(*rankings)
    passages = (passage for row in rows for passage in row if passage is not None)
    return tuple({passage.id: passage for passage in passages}.values())


# -------------------------------------------------------------------------- prompt and parser

_MAX_CHARS = 300
_QUESTIONER = Prompt(
    "questioner", labels={"question": "Question:", "text": "Text:", "term": "Term:"}
)
_INSTRUCTION = (
    "A text answers a question, but one of its terms is uncertain. Write one question to which "
    "this term is the answer, so that it can be looked up. Name the subject of the text instead of "
    "using a pronoun, and do not write the term itself. Write the question and nothing else."
)


def question_messages(question: str, text: str, term: str) -> tuple[Message, ...]:
    """Returns the conversation that requests a question to which ``term`` is the answer."""
    turn = f"Question: {one_line(question)}\nText: {one_line(text)}\nTerm: {one_line(term)}"
    return _QUESTIONER.conversation(_INSTRUCTION, (), Message("user", turn))


def parse_question(text: str) -> str:
    """Returns the first line with content, without its label, or an empty text."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    label, colon, rest = line.partition(":")
    if colon and label.strip(" *").lower() in ("question", "q"):
        line = rest
    return one_line(line.strip(" *\"'"))[:_MAX_CHARS]


def _render(config: FlareConfig) -> None:
    render_writing(config.reader_format)
    if config.query == "generated":
        question_messages("", "", "")


METHOD = Method(flare, FlareConfig, _render)
