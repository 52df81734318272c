"""The prediction of a method that answers from passages."""

import collections
from collections.abc import Iterable, Sequence

from cirag_jax.types import Attempt, Prediction, Step


def passage_prediction(
    ids: Iterable[str],
    steps: Iterable[Step],
    attempts: Sequence[Attempt],
    errors: collections.Counter[str],
) -> Prediction:
    """Returns a prediction with the answer of the last attempt and the passages ``ids``, ranked."""
    return Prediction(
        attempts[-1].answer,
        "passage",
        tuple(ids),
        steps=tuple(steps),
        attempts=tuple(attempts),
        parse_errors={kind: count for kind, count in sorted(errors.items()) if count},
    )
