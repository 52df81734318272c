"""Features of the granularity router, and the cascade's question to it."""

from collections.abc import Sequence

import numpy as np

from cirag_jax.runtime.requests import Program, Route, Routed
from cirag_jax.types import Attempt, Granularity, Step

SCALARS = ("rounds", "kept", "best kept", "mean kept", "worst kept", "best of last round")
# Further features after a refusal, from the log-probabilities of its tokens.
REFUSAL_SCALARS = ("first log-probability", "mean log-probability", "lowest log-probability")
NUM_SCALARS = {False: len(SCALARS), True: len(SCALARS) + len(REFUSAL_SCALARS)}


def scalars(steps: Sequence[Step], refusal: Attempt | None = None) -> tuple[float, ...]:
    """Returns `SCALARS` of a question's rounds, and `REFUSAL_SCALARS` of a refused attempt.

    The scores are the aligner's; those of facts without a score are ignored, and scores are 0 if
    there are none.
    """
    kept = [
        scores[fact]
        for step in steps
        if (scores := dict(zip(step.candidates, step.scores, strict=False)))
        for fact in step.kept
        if fact in scores
    ]
    last = steps[-1].scores if steps else ()
    values = (
        len(steps),
        sum(len(step.kept) for step in steps),
        max(kept, default=0.0),
        float(np.mean(kept)) if kept else 0.0,
        min(kept, default=0.0),
        max(last, default=0.0),
    )
    if refusal is not None and refusal.logprobs:
        logprobs = refusal.logprobs
        values += (logprobs[0], float(np.mean(logprobs)), min(logprobs))
    return tuple(map(float, values))


def probability(
    question: str, granularity: Granularity, steps: Sequence[Step], refusal: Attempt | None
) -> Program[float]:
    """Returns the router's probability that reading a granularity is worthwhile."""
    refused = refusal is not None and bool(refusal.logprobs)
    routed: Routed = yield Route(question, granularity, scalars(steps, refusal), refused)
    return routed.probability
