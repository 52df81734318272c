"""GRADE's difficulty matrix (Lee, Kwon and Jin): errors by hops and by retrieval difficulty D_r.

D_r is the distance of a question from its gold evidence, 1 - min_i cos(q, c_i) (equation 1). A row
of the matrix has all questions with the same number of hops, and its columns are the quartiles of
their D_r. Undefined values are None with a ``reason``, never 0 or NaN.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.significance import interval, paired_interval

AGGREGATES = ("min", "mean", "power_mean")
NUM_BINS = 4
CAUSES = ("retriever", "reader", "unanswered")  # Component responsible for a wrong answer.

_MIN_POINTS = 3  # Minimum number of points of a correlation; two points always lie on a line.
_EQUAL = 1e-9  # Values that differ by at most this are equal.

Embed = Callable[[Sequence[str], Any], np.ndarray]
Values = dict[str, Any]


# ---------------------------------------------------------------------------- retrieval difficulty


def similarities(
    questions: Sequence[str], gold: Sequence[Sequence[Sequence[str]]], embed: Embed
) -> list[np.ndarray]:
    """Returns the cosine of each question with each of its gold items, float64 [C_q] each.

    Args:
      questions: texts of the questions.
      gold: gold items of each question; an item is a list of texts, and its most similar text
        counts.
      embed: returns unit-length vectors, like `retrieval.encoders.Encoder.encode`.
    """
    texts = list(dict.fromkeys(text for items in gold for item in items for text in item))
    row = {text: index for index, text in enumerate(texts)}
    query_QD, passage_ND = embed(questions, "query"), embed(texts, "passage")
    return [
        np.array(
            [(passage_ND[[row[t] for t in item]] @ query_D).max() for item in items], np.float64
        )
        for query_D, items in zip(query_QD, gold, strict=True)
    ]


def retrieval_difficulty(similarity_C: np.ndarray, how: str = "min", power: float = -2.0) -> float:
    """Returns D_r = 1 - the minimum, mean or power mean of the similarities (section 4.4).

    The power mean is (sum_i s_i^p / n)^(1/p). Negative similarities count as 0. If p is negative
    and a similarity is 0, the power mean is 0, its limit.
    """
    if how == "min":
        return float(1 - similarity_C.min())
    if how == "mean":
        return float(1 - similarity_C.mean())
    if how != "power_mean" or power == 0:
        raise ValueError(f"unknown aggregate {how!r} with power {power}")
    positive_C = np.maximum(similarity_C, 0.0)
    if power < 0 and not positive_C.all():
        return 1.0
    return float(1 - (positive_C**power).mean() ** (1 / power))


# -------------------------------------------------------------------------------------- the matrix


@dataclasses.dataclass(frozen=True)
class DifficultyBins:
    """Questions, binned by hops and by quartiles of D_r.

    Attributes:
      hops_Q: number of hops, int64.
      difficulty_Q: D_r, float64.
      bin_Q: column of each question, from 0; -1 if its row has no quartiles; int64.
      edges: number of hops -> the three quartiles.
      reasons: number of hops -> the reason why the row has no quartiles.
    """

    hops_Q: np.ndarray
    difficulty_Q: np.ndarray
    bin_Q: np.ndarray
    edges: Mapping[int, np.ndarray]
    reasons: Mapping[int, str]

    @property
    def hops(self) -> list[int]:
        """The numbers of hops, one per row of the matrix."""
        return [int(hop) for hop in np.unique(self.hops_Q)]

    def cell(self, hop: int, column: int | None = None) -> np.ndarray:
        """Returns the indices of the questions in a cell, or in a row if ``column`` is None."""
        inside = self.hops_Q == hop
        return np.flatnonzero(inside if column is None else inside & (self.bin_Q == column))


def bin_questions(hops: Sequence[int], difficulties: Sequence[float]) -> DifficultyBins:
    """Bins the questions with the same number of hops by the quartiles of their D_r.

    Quartiles are interpolated linearly, and a value equal to a quartile belongs to the lower bin. A
    row has no quartiles if it has fewer than four questions or if all its D_r are equal.
    """
    hops_Q, difficulty_Q = np.asarray(hops, np.int64), np.asarray(difficulties, np.float64)
    bin_Q = np.full(len(hops_Q), -1)
    edges, reasons = {}, {}
    for hop in map(int, np.unique(hops_Q)):
        rows = np.flatnonzero(hops_Q == hop)
        difficulty_R = difficulty_Q[rows]
        if len(rows) < NUM_BINS:
            reasons[hop] = f"fewer than {NUM_BINS} questions ({len(rows)})"
        elif np.ptp(difficulty_R) <= _EQUAL:
            reasons[hop] = f"all {len(rows)} questions have the same D_r"
        else:
            edges[hop] = np.quantile(difficulty_R, [0.25, 0.5, 0.75])
            bin_Q[rows] = np.searchsorted(edges[hop], difficulty_R, side="left")
    return DifficultyBins(hops_Q, difficulty_Q, bin_Q, edges, reasons)


def matrix(
    bins: DifficultyBins, measure: Callable[[np.ndarray], Values], least: int = 1
) -> dict[int, list[Values]]:
    """Returns, by number of hops, four cells from low to high D_r.

    Args:
      bins: the questions.
      measure: computes a cell from the indices of its questions.
      least: cells with fewer questions have a reason instead of a value.
    """

    def cell(hop: int, column: int) -> Values:
        if hop in bins.reasons:
            return undefined(bins.reasons[hop])
        values = measure(bins.cell(hop, column))
        count = values["num_questions"]
        if not 0 < count < least:
            return values
        others = {k: value for k, value in values.items() if k not in ("value", "low", "high")}
        return undefined(f"fewer than {least} questions ({count})", **others)

    return {hop: [cell(hop, column) for column in range(NUM_BINS)] for hop in bins.hops}


def undefined(reason: str, **values: Any) -> Values:
    """Returns a null value and the reason why it is undefined."""
    return {"value": None, "reason": reason, **values}


def error_rate(errors: Ratio, rows: np.ndarray, samples: int, seed: int) -> Values:
    """Returns the mean error of some questions with its 95 % bootstrap interval.

    Args:
      errors: error of each question, in [0, 1]; questions with a denominator of 0 are ignored.
      rows: indices of the questions.
      samples: bootstrap resamples over these questions.
      seed: seed of the bootstrap.

    Returns:
      ``value``, ``low``, ``high`` and ``num_questions``.
    """
    count = int(errors.bottom_Q[rows].sum())
    if not count:
        return undefined("no question", num_questions=0)
    subset = Ratio(errors.top_Q[rows], errors.bottom_Q[rows])
    return {**interval(subset, samples, seed), "num_questions": count}


def error_difference(a: Ratio, b: Ratio, rows: np.ndarray, samples: int, seed: int) -> Values:
    """Returns the mean of a - b over questions with both errors; keys as in `error_rate`."""
    rows = rows[(a.bottom_Q[rows] * b.bottom_Q[rows]) > 0]
    if not len(rows):
        return undefined("no question", num_questions=0)
    first, second = (Ratio(c.top_Q[rows], c.bottom_Q[rows]) for c in (a, b))
    value, low, high = paired_interval(first, second, samples, seed).values()
    return {"value": value, "low": low, "high": high, "num_questions": len(rows)}


# ----------------------------------------------------------------------------------- correlations


def correlation(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Values:
    """Returns Pearson's r of D_r (or hops) with the error.

    Returns:
      ``value``, the two-sided ``p``, ``low`` and ``high`` (95 %, by Fisher's transformation; None
      for three points) and ``num_points``.
    """
    x_N, y_N = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x_N) < _MIN_POINTS:
        return undefined(f"fewer than {_MIN_POINTS} points ({len(x_N)})", num_points=len(x_N))
    for values_N, name in ((x_N, "difficulty"), (y_N, "error")):
        if np.ptp(values_N) <= _EQUAL:
            return undefined(f"the {name} is constant", num_points=len(x_N))
    pearson: Any = stats.pearsonr(x_N, y_N)
    bounds = pearson.confidence_interval() if len(x_N) > _MIN_POINTS else (None, None)
    return {
        "value": float(pearson.statistic),
        "p": float(pearson.pvalue),
        "low": None if bounds[0] is None else float(bounds[0]),
        "high": None if bounds[1] is None else float(bounds[1]),
        "num_points": len(x_N),
    }


def correlations(bins: DifficultyBins, errors: Ratio, least: int = 1) -> Values:
    """Returns correlations of the error with the difficulty.

    Args:
      bins: the questions.
      errors: errors as in `error_rate`.
      least: cells with fewer questions are ignored.

    Returns:
      ``bins``: by number of hops, r of the mean D_r with the error rate over quartiles (Table 1).
      ``mean``: the mean of ``bins`` (Table 3).
      ``questions``: by number of hops and for ``all``, r of D_r with the error over questions.
      ``hops``: r of the number of hops with the error over questions.
      ``diagonal``: r of the position on the matrix's diagonal with the error rate, for the four
      smallest numbers of hops.
    """
    over_quartiles = {hop: _over_quartiles(bins, errors, hop, least) for hop in bins.hops}
    every_row = _counted(errors, np.arange(len(bins.hops_Q)))
    rows = {str(hop): _counted(errors, bins.cell(hop)) for hop in bins.hops} | {"all": every_row}
    return {
        "bins": over_quartiles,
        "mean": mean_correlation(list(over_quartiles.values())),
        "questions": {
            name: correlation(bins.difficulty_Q[row_R], errors.top_Q[row_R])
            for name, row_R in rows.items()
        },
        "hops": correlation(bins.hops_Q[every_row], errors.top_Q[every_row]),
        "diagonal": _diagonal(bins, errors, least),
    }


def mean_correlation(results: Sequence[Values]) -> Values:
    """Returns the mean of the defined correlations, and their number as ``num_points``."""
    values = [result["value"] for result in results if result["value"] is not None]
    if not values:
        return undefined("no hop has a correlation", num_points=0)
    return {"value": float(np.mean(values)), "num_points": len(values)}


def strongest(means: Mapping[str, float | None]) -> list[str]:
    """Returns the aggregates with the highest defined correlation, including ties."""
    defined = {how: value for how, value in means.items() if value is not None}
    return [how for how, value in defined.items() if value >= max(defined.values()) - _EQUAL]


def _counted(errors: Ratio, rows: np.ndarray) -> np.ndarray:
    return rows[errors.bottom_Q[rows] > 0]


def _rate(errors: Ratio, rows: np.ndarray) -> float:
    return float(errors.top_Q[rows].mean())


def _over_quartiles(bins: DifficultyBins, errors: Ratio, hop: int, least: int) -> Values:
    if hop in bins.reasons:
        return undefined(bins.reasons[hop], num_points=0)
    cells = [_counted(errors, bins.cell(hop, column)) for column in range(NUM_BINS)]
    cells = [rows for rows in cells if len(rows) >= least]
    means = [bins.difficulty_Q[rows].mean() for rows in cells]
    return correlation(means, [_rate(errors, rows) for rows in cells])


def _diagonal(bins: DifficultyBins, errors: Ratio, least: int) -> Values:
    cells = [
        _counted(errors, bins.cell(hop, column)) for column, hop in enumerate(bins.hops[:NUM_BINS])
    ]
    columns = [column for column, rows in enumerate(cells) if len(rows) >= least]
    return correlation(columns, [_rate(errors, cells[column]) for column in columns])


# --------------------------------------------------------------------------------- causes of errors


def errors_by_cause(errors: Ratio, causes: Sequence[str], rows: np.ndarray) -> dict[str, float]:
    """Returns the sum of the errors of some questions, by cause.

    Args:
      errors: errors as in `error_rate`.
      causes: the cause of each question's error, one of `CAUSES`: ``retriever`` if evidence is
        missing, ``reader`` if the evidence is complete, ``unanswered`` if the method failed.
      rows: indices of the questions.
    """
    rows = _counted(errors, rows)
    return {
        cause: float(sum(errors.top_Q[row] for row in rows if causes[row] == cause))
        for cause in CAUSES
    }


def error_rates_by_cause(
    errors: Ratio, causes: Sequence[str], samples: int, seed: int
) -> dict[str, Values]:
    """Returns, for each cause, its questions' `error_rate` and the sum of their ``errors``."""
    sums = errors_by_cause(errors, causes, np.arange(len(errors.top_Q)))
    return {
        cause: {
            **error_rate(errors, np.flatnonzero(np.array(causes) == cause), samples, seed),
            "errors": total,
        }
        for cause, total in sums.items()
    }
