"""Iter-RetGen: the answer extends the next query (Shao et al., Findings of EMNLP 2023)."""

import collections
import dataclasses
from typing import Literal

from cirag_jax.io import one_line
from cirag_jax.methods.common.predictions import passage_prediction
from cirag_jax.methods.common.reading import ReaderFormat, SearchConfig, read, render_reader, search
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Needs, Program, Retrieved
from cirag_jax.types import Count, PositiveInt, Prediction, Question, Step
from cirag_jax.validation import check_at_most


@dataclasses.dataclass(frozen=True)
class IterRetgenConfig(SearchConfig):
    """Iter-RetGen's settings, with FlashRAG's defaults.

    Attributes:
      num_rounds: number of rounds of retrieval and reading.
      num_passages: passages retrieved per round.
      num_read: number of retrieved passages that the reader reads.
      query_with: text appended to the question in the next query: the answer, or the complete
        response. The paper uses the response, and its reader reasons first (reader_format=thought).
      rerank_from: passages retrieved for reranking, which keeps the best num_passages; 0 disables
        reranking.
      min_score: reranked passages with this score or less are dropped.
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
    """

    num_rounds: PositiveInt = 3
    num_passages: PositiveInt = 5
    num_read: PositiveInt = 5
    query_with: Literal["answer", "response"] = "answer"
    rerank_from: Count = 0
    min_score: float = 0.0
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        super().__post_init__()
        check_at_most(self, "num_passages", "num_read")

    @property
    def needs(self) -> Needs:
        """Needs the reader, and a ranker if passages are reranked."""
        return Needs(roles=("reader",), rankers=("passages",) if self.rerank_from else ())


def iter_retgen(question: Question, config: IterRetgenConfig) -> Program[Prediction]:
    """Answers a question in rounds: retrieve, read, and add the answer to the query."""
    query = question.question
    steps, attempts, queries = [], [], []
    errors = collections.Counter[str]()
    retrieved = Retrieved((), ())
    for _ in range(config.num_rounds):
        if query in queries:  # The round would repeat an earlier round.
            errors["repeated_query"] += 1
            break
        queries.append(query)
        retrieved = yield from search(query, config)
        passages = retrieved.passages[: config.num_read]
        attempt = yield from read(
            question.question, "passage", passages, config.reader_format, errors
        )
        attempts.append(attempt)
        if attempt.error is not None:
            steps.append(Step(query, retrieved.ids))
            break
        addition = attempt.response
        if config.query_with == "answer":
            # A refusal, or a response cut off before its answer, makes a poor query.
            addition = attempt.answer if attempt.sufficient else ""
        next_query = one_line(f"{question.question} {addition}")
        steps.append(Step(query, retrieved.ids, next_query=next_query, response=attempt.response))
        query = next_query
    steps[-1] = dataclasses.replace(steps[-1], next_query=None)
    return passage_prediction(retrieved.ids, steps, attempts, errors)


METHOD = Method(
    iter_retgen, IterRetgenConfig, lambda config: render_reader(config.reader_format, "passage")
)
