"""Calibration of a reader's confidence, and accuracy if it refuses to answer below a threshold."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_BINS = 10
_POINTS = 20  # of the coverage curve


def calibration(confidences: Sequence[float], right: Sequence[bool], total: int) -> dict[str, Any]:
    """Compares confidence with accuracy in ten bins of equal width.

    Args:
      confidences: confidence of each answer, in [0, 1].
      right: correctness of each answer.
      total: number of questions, including those that the reader refused to answer.

    Returns:
      ``bins``: for each nonempty bin, the mean ``confidence``, the share of ``right`` answers and
      the ``count`` of answers.
      ``error``: the expected calibration error (Guo et al., 2017, equation 3); None without
      answers.
      ``coverage``: for rising confidence thresholds, the share of questions ``answered`` and the
      share of these answers that are ``right``.
    """
    if not len(confidences):
        return {"bins": [], "error": None, "coverage": []}
    confidence_N = np.asarray(confidences, np.float64)
    right_N = np.asarray(right, np.float64)
    bin_N = np.minimum((confidence_N * _BINS).astype(int), _BINS - 1)
    bins = []
    for index in np.unique(bin_N):
        inside = bin_N == index
        bins.append(
            {
                "confidence": float(confidence_N[inside].mean()),
                "right": float(right_N[inside].mean()),
                "count": int(inside.sum()),
            }
        )
    gaps = (b["count"] * abs(b["confidence"] - b["right"]) for b in bins)
    order = np.argsort(-confidence_N, kind="stable")
    correct_N = np.cumsum(right_N[order])
    # Answers of equal confidence are kept or refused together.
    ends = np.flatnonzero(np.diff(confidence_N[order], append=-1.0)) + 1
    shown = np.linspace(0, len(ends) - 1, min(_POINTS, len(ends))).round().astype(int)
    coverage = [
        {"answered": float(count / total), "right": float(correct_N[count - 1] / count)}
        for count in ends[shown][::-1]
    ]
    return {"bins": bins, "error": sum(gaps) / len(order), "coverage": coverage}
