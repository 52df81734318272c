"""Input of the metrics in `cirag_jax.evaluation.metrics`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cirag_jax.errors import UserError
from cirag_jax.evaluation import answers
from cirag_jax.types import Passage, Prediction, Question

NAMES = ("answers", "recall", "hits")  # Measured unless a config says otherwise.


class Answered(NamedTuple):
    """A question and a method's prediction; None where it failed."""

    question: Question
    prediction: Prediction | None


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How a run is scored.

    Attributes:
      profile: scorer of answers, a key of `answers.PROFILES`.
      recall_at: the K of recall@K and hit@K.
      passages: texts of the passages by id, read when a metric asks for them.
    """

    profile: str = answers.DEFAULT
    recall_at: tuple[int, ...] = (3, 5)
    passages: Callable[[], Mapping[str, Passage]] = dict

    def __post_init__(self):
        """Raises UserError where the config that it is made from cannot be scored by."""
        answers.check_profile(self.profile)
        ks = self.recall_at
        if not ks or any(not isinstance(k, int) or k < 1 for k in ks) or len(set(ks)) < len(ks):
            raise UserError(
                f"config.recall_at={ks} must be distinct numbers of at least 1, as in "
                '--config.recall_at="(2, 5)".'
            )
