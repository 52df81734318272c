"""Precision, recall and F1 of sets, as ratios of sums over groups.

A macro mean over steps is (sum of the steps' scores) / (number of steps), a micro score (sum of
matches) / (sum of sizes): both are ratios of two sums over questions, so one bootstrap
(`significance`) serves both.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """How a predicted set meets the wanted one, by their sizes.

    ``matched`` is the size of what both have; a sum of similarities where matches are soft.
    ``failed``: nothing was predicted, not even the empty set, which earns 0.
    """

    matched: float
    predicted: int
    wanted: int
    failed: bool = False

    @property
    def precision(self) -> float:
        """Matched over predicted size; two empty sets agree (1), one empty set earns 0."""
        return self._share(self.predicted)

    @property
    def recall(self) -> float:
        """Matched over wanted size; two empty sets agree (1), one empty set earns 0."""
        return self._share(self.wanted)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall: 2 matched / (predicted + wanted)."""
        total = self.predicted + self.wanted
        return 2 * self.matched / total if total else float(not self.failed)

    def _share(self, size: int) -> float:
        agree = self.predicted == self.wanted and not self.failed
        return self.matched / size if size else float(agree)


class Ratio(NamedTuple):
    """A score as the ratio of two sums over groups (questions, passages): float64 each.

    The shares of each group in the numerator and in the denominator.
    """

    top_Q: np.ndarray
    bottom_Q: np.ndarray

    @property
    def value(self) -> float:
        """The score; NaN where nothing counts."""
        bottom = self.bottom_Q.sum()
        return float(self.top_Q.sum() / bottom) if bottom else float("nan")


def mean_of(values: Sequence[float | None] | np.ndarray) -> Ratio:
    """Returns the mean of one value per group; ignores groups with None."""
    top_Q = np.array([value or 0.0 for value in values], np.float64)
    bottom_Q = np.array([value is not None for value in values], np.float64)
    return Ratio(top_Q, bottom_Q)


def ratio(
    tops: Sequence[float], bottoms: Sequence[float], groups: Sequence[int], num_groups: int
) -> Ratio:
    """Sums both by group: ``groups[i]`` is the group of item i, below ``num_groups``."""
    index_N = np.asarray(groups, np.int64)

    def sums(values: Sequence[float]) -> np.ndarray:
        return np.bincount(index_N, np.asarray(values, np.float64), minlength=num_groups)

    return Ratio(sums(tops), sums(bottoms))


def overlap_ratios(
    overlaps: Sequence[Overlap | None], groups: Sequence[int], num_groups: int
) -> dict[str, Ratio]:
    """The macro and micro scores of many sets, one a step or passage; None does not count.

    ``groups`` are, of each, the question or passage that the bootstrap draws as one.

    Returns:
      ``precision``, ``recall`` and ``f1``: means over the sets (macro); ``micro_precision``,
      ``micro_recall`` and ``micro_f1``: of all sets pooled; ``nonempty_f1``: the macro F1
      of those whose wanted set is not empty.
    """
    counted = [(o, g) for o, g in zip(overlaps, groups, strict=True) if o is not None]
    found, where = [o for o, _ in counted], [g for _, g in counted]

    def of(tops: list[float], bottoms: Sequence[float]) -> Ratio:
        return ratio(tops, bottoms, where, num_groups)

    ones = [1.0] * len(found)
    matched = [o.matched for o in found]
    filled = [float(o.wanted > 0) for o in found]
    return {
        "precision": of([o.precision for o in found], ones),
        "recall": of([o.recall for o in found], ones),
        "f1": of([o.f1 for o in found], ones),
        "nonempty_f1": of([o.f1 * w for o, w in zip(found, filled, strict=True)], filled),
        "micro_precision": of(matched, [o.predicted for o in found]),
        "micro_recall": of(matched, [o.wanted for o in found]),
        "micro_f1": of([2 * m for m in matched], [o.predicted + o.wanted for o in found]),
    }
