"""GRADE's difficulty matrix (Lee, Kwon and Jin): errors by hops and by retrieval difficulty D_r.

D_r says how far a question is from what must be found for it, 1 - min_i cos(q, c_i) (equation 1).
Rows of the matrix are hops, columns the quartiles of D_r among the questions of that hop. What
cannot be said is ``None`` with its ``reason``, never 0 and never NaN.
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
WHOSE = ("retriever", "reader", "unanswered")  # Whose failure a wrong answer is.

_FEWEST = 3  # Points of a correlation; two lie on a line whatever they are.
_EQUAL = 1e-9  # Figures that differ by less are the same.

Embed = Callable[[Sequence[str], Any], np.ndarray]
Values = dict[str, Any]


# ---------------------------------------------------------------------------- retrieval difficulty


def similarities(
    questions: Sequence[str], gold: Sequence[Sequence[Sequence[str]]], embed: Embed
) -> list[np.ndarray]:
    """Cosine of each question with each thing to be found: float64 [C_q] each.

    Args:
      questions: their texts.
      gold: of each what must be found, as texts of which the most similar counts.
      embed: as `retrieval.encoders.Encoder.encode`: unit-length vectors of texts and their kind.
    """
    texts = list(dict.fromkeys(text for things in gold for thing in things for text in thing))
    row = {text: index for index, text in enumerate(texts)}
    query_QD, passage_ND = embed(questions, "query"), embed(texts, "passage")
    return [
        np.array(
            [(passage_ND[[row[t] for t in thing]] @ query_D).max() for thing in things], np.float64
        )
        for query_D, things in zip(query_QD, gold, strict=True)
    ]


def retrieval_difficulty(similarity_C: np.ndarray, how: str = "min", power: float = -2.0) -> float:
    """D_r = 1 - the minimum, the mean or the power mean of the similarities (section 4.4).

    The power mean is (sum_i s_i^p / n)^(1/p). Of similarities that are not positive it is not
    defined; they count as 0, and with a negative p, as in the limit, it is then 0.

    Raises:
      ValueError: no similarity, no such aggregate, or a power of 0.
    """
    if how == "min":
        return float(1 - similarity_C.min())
    if how == "mean":
        return float(1 - similarity_C.mean())
    if how != "power_mean" or power == 0:
        raise ValueError(f"no aggregate {how!r} with the power {power}")
    positive_C = np.maximum(similarity_C, 0.0)
    if power < 0 and not positive_C.all():
        return 1.0
    return float(1 - (positive_C**power).mean() ** (1 / power))


# -------------------------------------------------------------------------------------- the matrix


@dataclasses.dataclass(frozen=True)
class Graded:
    """Questions on the two axes.

    Attributes:
      hops_Q: int64.
      difficulty_Q: D_r, float64.
      bin_Q: quartile among the questions of the same hop, from 0; -1 where there are none. int64.
      edges: the three quartiles of every hop that has them.
      reasons: why each other hop has none.
    """

    hops_Q: np.ndarray
    difficulty_Q: np.ndarray
    bin_Q: np.ndarray
    edges: Mapping[int, np.ndarray]
    reasons: Mapping[int, str]

    @property
    def hops(self) -> list[int]:
        """Rows of the matrix."""
        return [int(hop) for hop in np.unique(self.hops_Q)]

    def cell(self, hop: int, column: int | None = None) -> np.ndarray:
        """Places of the questions of a cell, or of a row."""
        inside = self.hops_Q == hop
        return np.flatnonzero(inside if column is None else inside & (self.bin_Q == column))


def grade(hops: Sequence[int], difficulties: Sequence[float]) -> Graded:
    """Splits the questions of each hop at the quartiles of their D_r.

    Quartiles are interpolated linearly; a question that lies on one belongs below it. A hop of
    fewer than four questions, or whose questions are all as difficult, has none.
    """
    hops_Q, difficulty_Q = np.asarray(hops, np.int64), np.asarray(difficulties, np.float64)
    bin_Q = np.full(len(hops_Q), -1)
    edges, reasons = {}, {}
    for hop in map(int, np.unique(hops_Q)):
        rows = np.flatnonzero(hops_Q == hop)
        own = difficulty_Q[rows]
        if len(rows) < NUM_BINS:
            reasons[hop] = f"fewer than {NUM_BINS} questions ({len(rows)})"
        elif np.ptp(own) <= _EQUAL:
            reasons[hop] = f"all {len(rows)} questions have the same D_r"
        else:
            edges[hop] = np.quantile(own, [0.25, 0.5, 0.75])
            bin_Q[rows] = np.searchsorted(edges[hop], own, side="left")
    return Graded(hops_Q, difficulty_Q, bin_Q, edges, reasons)


def matrix(
    graded: Graded, measure: Callable[[np.ndarray], Values], least: int = 1
) -> dict[int, list[Values]]:
    """Hop -> its four cells, from low to high D_r.

    Args:
      graded: the questions.
      measure: gets the places of a cell's questions; without quartiles a cell has a reason alone.
      least: questions that must count in a cell, else it has a reason in place of its value.
    """
    return {
        hop: [
            missing(graded.reasons[hop])
            if hop in graded.reasons
            else _of_enough(measure(graded.cell(hop, column)), least)
            for column in range(NUM_BINS)
        ]
        for hop in graded.hops
    }


def _of_enough(found: Values, least: int) -> Values:
    count = found["num_questions"]
    if not 0 < count < least:
        return found
    rest = {name: value for name, value in found.items() if name not in ("value", "low", "high")}
    return missing(f"fewer than {least} questions ({count})", **rest)


def missing(reason: str, **values: Any) -> Values:
    """A figure that there is not."""
    return {"value": None, "reason": reason, **values}


def error_rate(errors: Ratio, rows: np.ndarray, samples: int, seed: int) -> Values:
    """The mean error of some questions.

    Args:
      errors: of each question, in [0, 1], over 1; over 0 where it does not count.
      rows: their places.
      samples: resamples of the bootstrap over these questions, for the 95 % interval.
      seed: of the bootstrap.

    Returns:
      ``value``, ``low``, ``high`` and ``num_questions``, those that count.
    """
    count = int(errors.bottom_Q[rows].sum())
    if not count:
        return missing("no question", num_questions=0)
    own = Ratio(errors.top_Q[rows], errors.bottom_Q[rows])
    return {**interval(own, samples, seed), "num_questions": count}


def error_difference(a: Ratio, b: Ratio, rows: np.ndarray, samples: int, seed: int) -> Values:
    """``a - b`` over the questions that count in both, resampled in pairs; as `error_rate`."""
    rows = rows[(a.bottom_Q[rows] * b.bottom_Q[rows]) > 0]
    if not len(rows):
        return missing("no question", num_questions=0)
    first, second = (Ratio(c.top_Q[rows], c.bottom_Q[rows]) for c in (a, b))
    found = paired_interval(first, second, samples, seed)
    return {
        "value": found["difference"],
        "low": found["low"],
        "high": found["high"],
        "num_questions": len(rows),
    }


# ----------------------------------------------------------------------------------- correlations


def correlation(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Values:
    """Pearson's r of D_r (or hops) with the error.

    Returns:
      ``value``, ``p`` (two-sided, SciPy's), ``low`` and ``high`` (95 %, by Fisher's transformation;
      None of three points) and ``num_points``.
    """
    x_N, y_N = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x_N) < _FEWEST:
        return missing(f"fewer than {_FEWEST} points ({len(x_N)})", num_points=len(x_N))
    for values_N, name in ((x_N, "difficulty"), (y_N, "error")):
        if np.ptp(values_N) <= _EQUAL:
            return missing(f"the {name} is the same throughout", num_points=len(x_N))
    found: Any = stats.pearsonr(x_N, y_N)
    bounds = found.confidence_interval() if len(x_N) > _FEWEST else (None, None)
    return {
        "value": float(found.statistic),
        "p": float(found.pvalue),
        "low": None if bounds[0] is None else float(bounds[0]),
        "high": None if bounds[1] is None else float(bounds[1]),
        "num_points": len(x_N),
    }


def correlations(graded: Graded, errors: Ratio, least: int = 1) -> Values:
    """How the error grows with the difficulty.

    Args:
      graded: the questions.
      errors: as of `error_rate`.
      least: as of `matrix`; smaller cells are no points.

    Returns:
      ``bins``: hop -> r of the mean D_r of a quartile with its error rate, over the quartiles that
      hold questions (Table 1); ``mean``: the mean of these (Table 3). ``questions``: hop -> r of
      D_r with the error over single questions, and ``all`` of them. ``hops``: r of the number of
      hops with the error, over questions. ``diagonal``: r of the place on the matrix's diagonal
      with the error rate there, of the four lowest numbers of hops that there are.
    """
    bins = {hop: _over_bins(graded, errors, hop, least) for hop in graded.hops}
    rows = {str(hop): _counted(errors, graded.cell(hop)) for hop in graded.hops}
    rows["all"] = _counted(errors, np.arange(len(graded.hops_Q)))
    everyone = rows["all"]
    return {
        "bins": bins,
        "mean": mean_correlation(list(bins.values())),
        "questions": {
            name: correlation(graded.difficulty_Q[own], errors.top_Q[own])
            for name, own in rows.items()
        },
        "hops": correlation(graded.hops_Q[everyone], errors.top_Q[everyone]),
        "diagonal": _diagonal(graded, errors, least),
    }


def mean_correlation(found: Sequence[Values]) -> Values:
    """The mean of the correlations that there are; ``num_points`` says of how many."""
    values = [one["value"] for one in found if one["value"] is not None]
    if not values:
        return missing("no hop has a correlation", num_points=0)
    return {"value": float(np.mean(values)), "num_points": len(values)}


def strongest(means: Mapping[str, float | None]) -> list[str]:
    """The aggregates of the highest correlation, several where they are equal; [] without any."""
    known = {how: value for how, value in means.items() if value is not None}
    return [how for how, value in known.items() if value >= max(known.values()) - _EQUAL]


def _counted(errors: Ratio, rows: np.ndarray) -> np.ndarray:
    return rows[errors.bottom_Q[rows] > 0]


def _rate(errors: Ratio, rows: np.ndarray) -> float:
    return float(errors.top_Q[rows].mean())


def _over_bins(graded: Graded, errors: Ratio, hop: int, least: int) -> Values:
    if hop in graded.reasons:
        return missing(graded.reasons[hop], num_points=0)
    cells = [_counted(errors, graded.cell(hop, column)) for column in range(NUM_BINS)]
    cells = [rows for rows in cells if len(rows) >= least]
    means = [graded.difficulty_Q[rows].mean() for rows in cells]
    return correlation(means, [_rate(errors, rows) for rows in cells])


def _diagonal(graded: Graded, errors: Ratio, least: int) -> Values:
    rows = [
        _counted(errors, graded.cell(hop, column))
        for column, hop in enumerate(graded.hops[:NUM_BINS])
    ]
    filled = [place for place, own in enumerate(rows) if len(own) >= least]
    return correlation(filled, [_rate(errors, rows[place]) for place in filled])


# --------------------------------------------------------------------------------- whose failure


def blame(errors: Ratio, whose: Sequence[str], rows: np.ndarray) -> dict[str, float]:
    """The sum of the errors of some questions, by whose they are.

    Args:
      errors: as of `error_rate`.
      whose: of each question, one of `WHOSE`, should it be answered wrongly: the retriever's where
        evidence is missing, the reader's where all was there; ``unanswered`` where the
        method broke down.
      rows: places of the questions.
    """
    rows = _counted(errors, rows)
    return {
        name: float(sum(errors.top_Q[row] for row in rows if whose[row] == name)) for name in WHOSE
    }


def failures(errors: Ratio, whose: Sequence[str], samples: int, seed: int) -> dict[str, Values]:
    """Of each of `WHOSE` the `error_rate` of its questions, and ``errors``: their sum (`blame`)."""
    everyone = np.arange(len(errors.top_Q))
    sums = blame(errors, whose, everyone)
    return {
        name: {
            **error_rate(errors, np.flatnonzero(np.array(whose) == name), samples, seed),
            "errors": sums[name],
        }
        for name in WHOSE
    }
