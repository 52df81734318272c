"""Whether a reader's confidence says how often it is right, and what refusing below it would do."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_BINS = 10
_POINTS = 20  # Of the curve of coverage.


def calibration(confidences: Sequence[float], right: Sequence[bool], total: int) -> dict[str, Any]:
    """Confidence (in [0, 1]) against accuracy, of the answers that were given.

    ``total`` answers were asked for; the others were refused. Ten bins are of equal width.

    Returns:
      ``bins``: of each that is not empty, ``confidence`` (its mean), ``right`` (its share) and
      ``count``; ``error``: the expected calibration error (Guo et al., 2017, equation 3); and
      ``coverage``: for rising thresholds of confidence, ``answered`` (of all that was asked for)
      and ``right`` (of what is answered). Nothing where no answer was given.
    """
    if not len(confidences):
        return {"bins": [], "error": None, "coverage": []}
    confidence_N = np.asarray(confidences, np.float64)
    right_N = np.asarray(right, np.float64)
    bin_N = np.minimum((confidence_N * _BINS).astype(int), _BINS - 1)
    found = []
    for index in np.unique(bin_N):
        inside = bin_N == index
        found.append(
            {
                "confidence": float(confidence_N[inside].mean()),
                "right": float(right_N[inside].mean()),
                "count": int(inside.sum()),
            }
        )
    gaps = (one["count"] * abs(one["confidence"] - one["right"]) for one in found)
    order = np.argsort(-confidence_N, kind="stable")
    correct_N = np.cumsum(right_N[order])
    # A threshold answers all that are equally sure, or none of them.
    changes = np.diff(confidence_N[order], append=-1.0)
    ends = np.flatnonzero(changes) + 1
    shown = np.linspace(0, len(ends) - 1, min(_POINTS, len(ends))).round().astype(int)
    counts = ends[shown]
    coverage = [
        {"answered": float(count / total), "right": float(correct_N[count - 1] / count)}
        for count in counts[::-1]
    ]
    return {"bins": found, "error": sum(gaps) / len(order), "coverage": coverage}
