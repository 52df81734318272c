"""Iter-RetGen: what was generated is the next query (Shao et al., Findings of EMNLP 2023)."""

import collections
import dataclasses
from typing import Literal

from cirag_jax.errors import UserError
from cirag_jax.methods.common.reading import ReaderFormat, read
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Needs, Program, Retrieve, Retrieved
from cirag_jax.types import PositiveInt, Prediction, Question, Step
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class IterRetgenConfig:
    """Iter-RetGen's settings (FlashRAG's).

    Attributes:
      num_rounds: rounds of retrieval and reading.
      num_passages: passages retrieved in a round.
      num_read: how many of them the reader gets.
      query_with: what follows the question in the next query: the answer, or the whole response (as
        in the paper, whose reader reasons first: reader_format=thought).
      reader_format: documents (FlashRAG's prompt), or as for CIRAG's reader: thought, chain, brief.
    """

    needs = Needs(roles=("reader",))

    num_rounds: PositiveInt = 3
    num_passages: PositiveInt = 5
    num_read: PositiveInt = 5
    query_with: Literal["answer", "response"] = "answer"
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        check_fields(self)
        if self.num_read > self.num_passages:
            raise UserError(
                f"num_read={self.num_read} must not exceed num_passages={self.num_passages}."
            )


def iter_retgen(asked: Question, config: IterRetgenConfig) -> Program[Prediction]:
    """Retrieves and reads; question and answer together retrieve again. The last round counts."""
    question, query = asked.question, asked.question
    steps, attempts, queries = [], [], []
    errors = collections.Counter[str]()
    found = Retrieved((), ())
    for _ in range(config.num_rounds):
        if query in queries:  # It would find, and read, the same again.
            errors["repeated_query"] += 1
            break
        queries.append(query)
        found = yield Retrieve(query, config.num_passages)
        passages = found.passages[: config.num_read]
        attempt = yield from read(question, "passage", passages, config.reader_format, errors)
        attempts.append(attempt)
        said = attempt.response
        if config.query_with == "answer":
            # What is no answer, a thought cut off before it, names nothing to search for.
            said = attempt.answer if attempt.sufficient else ""
        following = " ".join(f"{question} {said}".split())
        ids = tuple(p.id for p in found.passages)
        steps.append(Step(query, ids, next_query=following, response=attempt.response))
        query = following
    steps[-1] = dataclasses.replace(steps[-1], next_query=None)
    return Prediction(
        attempts[-1].answer,
        "passage",
        tuple(passage.id for passage in found.passages),
        steps=tuple(steps),
        attempts=tuple(attempts),
        parse_errors=dict(errors),
    )


METHOD = Method(iter_retgen, IterRetgenConfig)
