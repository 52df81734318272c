"""Multi-step RAG: the first answer and its passages extend the second query (GRADE, A.4)."""

import collections
import dataclasses
from collections.abc import Sequence

from cirag_jax.io import one_line
from cirag_jax.methods.common.evidence import passage_line
from cirag_jax.methods.common.predictions import passage_prediction
from cirag_jax.methods.common.reading import ReaderFormat, SearchConfig, read, render_reader, search
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Needs, Program
from cirag_jax.types import Attempt, Count, Passage, PositiveInt, Prediction, Question, Step
from cirag_jax.validation import check_at_most


@dataclasses.dataclass(frozen=True)
class MultiStepConfig(SearchConfig):
    """The settings of multi-step RAG, with the values of GRADE's appendix A.4.

    Attributes:
      num_rounds: number of rounds of retrieval and reading.
      num_passages: passages retrieved per round.
      num_read: number of retrieved passages that the reader reads.
      num_in_query: passages of a round that its successor's query contains, after the question and
        the answer. Encoders cut long queries at their end.
      rerank_from: passages retrieved for reranking by the question, which keeps the best
        num_passages; 0 disables reranking (as in GRADE).
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
    """

    num_rounds: PositiveInt = 2
    num_passages: PositiveInt = 10
    num_read: PositiveInt = 10
    num_in_query: Count = 10
    rerank_from: Count = 0
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        super().__post_init__()
        check_at_most(self, "num_passages", "num_read", "num_in_query")

    @property
    def needs(self) -> Needs:
        """Needs the reader, and a ranker if passages are reranked."""
        return Needs(roles=("reader",), rankers=("passages",) if self.rerank_from else ())


def multi_step(question: Question, config: MultiStepConfig) -> Program[Prediction]:
    """Answers a question in rounds: retrieve, read, and add answer and passages to the query."""
    text, query = question.question, question.question
    steps, attempts = list[Step[str]](), list[Attempt]()
    errors = collections.Counter[str]()
    for number in range(config.num_rounds):
        retrieved = yield from search(query, config, rank_by=text)
        passages = retrieved.passages[: config.num_read]
        attempt = yield from read(text, "passage", passages, config.reader_format, errors)
        attempts.append(attempt)
        next_query = None
        if attempt.error is None and number + 1 < config.num_rounds:
            in_query = retrieved.passages[: config.num_in_query]
            next_query = extended_query(text, attempt.answer, in_query)
        if next_query == query:  # The next round would repeat this one.
            errors["repeated_query"] += 1
            next_query = None
        steps.append(Step(query, retrieved.ids, next_query=next_query, response=attempt.response))
        if next_query is None:
            break
        query = next_query
    ranked = dict.fromkeys(name for step in reversed(steps) for name in step.passages)
    return passage_prediction(ranked, steps, attempts, errors)


METHOD = Method(
    multi_step, MultiStepConfig, lambda config: render_reader(config.reader_format, "passage")
)


def extended_query(question: str, answer: str, passages: Sequence[Passage]) -> str:
    """Returns the question, the answer and the passages as one line.

    GRADE names these three parts; their order is ours.
    """
    return one_line(" ".join([question, answer, *map(passage_line, passages)]))
