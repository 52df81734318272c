"""Recall@K and its paired bootstrap."""

from collections.abc import Collection, Hashable, Sequence

import numpy as np


def recall_at(ranked: Sequence[Hashable], gold: Collection[Hashable], k: int) -> float:
    """|top-K and gold| / |gold| (spec, section 0); an empty ranking earns 0.

    Raises:
      ValueError: no gold.
    """
    wanted = set(gold)
    if not wanted:
        raise ValueError("recall needs at least one gold item")
    return len(wanted & set(ranked[:k])) / len(wanted)


def paired_bootstrap(
    a_B: np.ndarray, b_B: np.ndarray, *, samples: int = 10_000, seed: int = 0
) -> dict[str, float]:
    """Mean of ``a - b`` over questions with its 95 % percentile interval.

    Questions are resampled with replacement; both systems keep their scores on the same question
    (Efron and Tibshirani 1993).

    Args:
      a_B: scores of the one system, a question each.
      b_B: scores of the other on the same questions.
      samples: resamples.
      seed: of the resampling.

    Returns:
      ``difference``, ``low`` and ``high``.
    """
    delta_B = np.asarray(a_B, np.float64) - np.asarray(b_B, np.float64)
    rng = np.random.default_rng(seed)
    means = np.empty(samples)
    for start in range(0, samples, 1000):  # A block at a time: bounded memory.
        count = min(1000, samples - start)
        index = rng.integers(0, len(delta_B), (count, len(delta_B)))
        means[start : start + count] = delta_B[index].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {"difference": float(delta_B.mean()), "low": float(low), "high": float(high)}
