"""Inputs of the metrics in `cirag_jax.evaluation.metrics`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.evaluation import answers
from cirag_jax.types import Passage, Prediction, Question

NAMES = ("answers", "recall", "ranking", "hits")  # default metric families


class AnsweredQuestion(NamedTuple):
    """A question and a prediction; None if the method failed before it read evidence."""

    question: Question
    prediction: Prediction | None


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Settings of the metrics.

    Attributes:
      profile: answer scorer, a key of `answers.PROFILES`.
      recall_at: the K of all scores at K.
      passages: loads the passages by id, for metrics that need their texts.
      token_vectors: returns unit-length vectors [T, D] of the tokens of each text, for BERTScore.
    """

    profile: str = answers.DEFAULT
    recall_at: tuple[int, ...] = (3, 5)
    passages: Callable[[], Mapping[str, Passage]] = dict
    token_vectors: Callable[[Sequence[str]], Mapping[str, np.ndarray]] | None = None

    def __post_init__(self):
        """Raises UserError for invalid values of the config."""
        answers.check_profile(self.profile)
        ks = self.recall_at
        if not ks or any(not isinstance(k, int) or k < 1 for k in ks) or len(set(ks)) < len(ks):
            raise UserError(
                f"config.recall_at={ks} must be distinct numbers of at least 1, as in "
                '--config.recall_at="(2, 5)".'
            )
