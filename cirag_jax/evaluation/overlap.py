"""Precision, recall and F1 of sets, as ratios of sums over groups.

A macro mean over steps is (sum of the steps' scores) / (number of steps), and a micro score is (sum
of matches) / (sum of sizes). Both are ratios of two sums over questions, so `significance` can use
the same bootstrap for both.
"""

import dataclasses
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Sizes of a predicted set, of the gold set and of their intersection.

    Attributes:
      matched: size of the intersection, or a sum of similarities for soft matches.
      predicted, gold: sizes of the sets.
      failed: whether there is no prediction, not even an empty set; then all scores are 0.
    """

    matched: float
    predicted: int
    gold: int
    failed: bool = False

    @classmethod
    def of(cls, predicted: Set[Any], gold: Set[Any]) -> "Overlap":
        """Returns the overlap of two sets."""
        return cls(len(predicted & gold), len(predicted), len(gold))

    @property
    def precision(self) -> float:
        """Returns matched / predicted; 1 if both sets are empty, 0 if only one is."""
        return self._share(self.predicted)

    @property
    def recall(self) -> float:
        """Returns matched / gold; 1 if both sets are empty, 0 if only one is."""
        return self._share(self.gold)

    @property
    def f1(self) -> float:
        """Returns the harmonic mean of precision and recall, 2 matched / (predicted + gold)."""
        total = self.predicted + self.gold
        return 2 * self.matched / total if total else float(not self.failed)

    def _share(self, size: int) -> float:
        are_equal = self.predicted == self.gold and not self.failed
        return self.matched / size if size else float(are_equal)


class Ratio(NamedTuple):
    """A score as the ratio of two sums over groups (questions or passages)."""

    top_Q: np.ndarray  # Terms of the numerator, float64.
    bottom_Q: np.ndarray  # Terms of the denominator, float64.

    @property
    def value(self) -> float:
        """Returns the score; NaN if the denominator is 0."""
        bottom = self.bottom_Q.sum()
        return float(self.top_Q.sum() / bottom) if bottom else float("nan")


def mean_of(values: Sequence[float | None] | np.ndarray) -> Ratio:
    """Returns the mean of one value per group; ignores groups with None."""
    top_Q = np.array([value or 0.0 for value in values], np.float64)
    bottom_Q = np.array([value is not None for value in values], np.float64)
    return Ratio(top_Q, bottom_Q)


Numbers = Sequence[float] | np.ndarray


def ratio(tops: Numbers, bottoms: Numbers, groups: Sequence[int], num_groups: int) -> Ratio:
    """Sums numerators and denominators by group; item i is in group ``groups[i]``."""
    index_N = np.asarray(groups, np.int64)

    def sums(values: Numbers) -> np.ndarray:
        return np.bincount(index_N, np.asarray(values, np.float64), minlength=num_groups)

    return Ratio(sums(tops), sums(bottoms))


def overlap_ratios(
    overlaps: Sequence[Overlap | None], groups: Sequence[int], num_groups: int
) -> dict[str, Ratio]:
    """Returns macro and micro scores of many sets, for example one set per step; ignores None.

    Args:
      overlaps: overlap of each set with its gold set.
      groups: group of each set (a question or passage), the unit of the bootstrap.
      num_groups: number of groups.

    Returns:
      ``precision``, ``recall`` and ``f1``, means over sets (macro); ``micro_precision``,
      ``micro_recall`` and ``micro_f1`` of all sets pooled; ``nonempty_f1``, the macro F1 over sets
      with nonempty gold.
    """
    pairs = [(o, group) for o, group in zip(overlaps, groups, strict=True) if o is not None]
    sets, group_of = [o for o, _ in pairs], [group for _, group in pairs]

    def total(tops: list[float], bottoms: Sequence[float]) -> Ratio:
        return ratio(tops, bottoms, group_of, num_groups)

    ones = [1.0] * len(sets)
    matched = [o.matched for o in sets]
    nonempty = [float(o.gold > 0) for o in sets]
    return {
        "precision": total([o.precision for o in sets], ones),
        "recall": total([o.recall for o in sets], ones),
        "f1": total([o.f1 for o in sets], ones),
        "nonempty_f1": total([o.f1 * n for o, n in zip(sets, nonempty, strict=True)], nonempty),
        "micro_precision": total(matched, [o.predicted for o in sets]),
        "micro_recall": total(matched, [o.gold for o in sets]),
        "micro_f1": total([2 * m for m in matched], [o.predicted + o.gold for o in sets]),
    }
