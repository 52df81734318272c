"""Vector-PRF: the best passages move the query's vector (Li et al., TOIS 2023), without training.

The reader then reads the passages nearest to the moved vector.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

from cirag_jax.errors import UserError
from cirag_jax.methods.common.predictions import passage_prediction
from cirag_jax.methods.common.reading import ReaderFormat, read, render_reader
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Needs, Program, Retrieve, Retrieved
from cirag_jax.types import (
    Feedback,
    NonNegativeFloat,
    Passage,
    PositiveInt,
    Prediction,
    Question,
    Step,
)
from cirag_jax.validation import check_at_most, check_fields


@dataclasses.dataclass(frozen=True)
class VectorPrfConfig:
    """Vector-PRF's settings, with the defaults of pyserini.

    Attributes:
      combination: average (the mean of the vectors of query and passages), or rocchio (alpha times
        the query's vector plus beta times the mean of the passages' vectors).
      num_feedback: passages whose vectors move the query's vector (pyserini: 3, or 5 for rocchio).
      alpha: weight of the query's vector; only for rocchio.
      beta: weight of the mean of the passages' vectors; only for rocchio.
      num_passages: passages retrieved with the moved vector.
      num_read: number of these passages that the reader reads.
      reader_format: documents (FlashRAG), or a format of CIRAG's reader: thought, chain, brief.
    """

    needs = Needs(roles=("reader",), feedback=True)

    combination: Literal["average", "rocchio"] = "average"
    num_feedback: PositiveInt = 3
    alpha: NonNegativeFloat = 0.4
    beta: NonNegativeFloat = 0.6
    num_passages: PositiveInt = 10
    num_read: PositiveInt = 10
    reader_format: ReaderFormat = "documents"

    def __post_init__(self):
        check_fields(self)
        check_at_most(self, "num_passages", "num_read")
        if self.combination == "rocchio" and not self.alpha + self.beta > 0:
            raise UserError("combination=rocchio needs an alpha or a beta above 0.")


def vector_prf(question: Question, config: VectorPrfConfig) -> Program[Prediction]:
    """Answers a question: retrieves, retrieves again with feedback, and reads."""
    text, errors = question.question, collections.Counter[str]()
    first: Retrieved = yield Retrieve(text, config.num_feedback)
    steps = [Step(text, first.ids)]
    retrieved = first
    if first.passages:
        retrieved = yield Retrieve(text, config.num_passages, feedback_from(first.passages, config))
        notes = {"feedback": len(first.passages)}
        steps.append(Step(text, retrieved.ids, kept=first.ids, notes=notes))
    passages = retrieved.passages[: config.num_read]
    attempt = yield from read(text, "passage", passages, config.reader_format, errors)
    return passage_prediction(retrieved.ids, steps, [attempt], errors)


METHOD = Method(
    vector_prf, VectorPrfConfig, lambda config: render_reader(config.reader_format, "passage")
)


def feedback_from(passages: Sequence[Passage], config: VectorPrfConfig) -> Feedback:
    """Returns the feedback of at least one passage."""
    query_weight = weight = 1 / (len(passages) + 1)
    if config.combination == "rocchio":
        query_weight, weight = config.alpha, config.beta / len(passages)
    return Feedback(query_weight, tuple((passage.id, weight) for passage in passages))
