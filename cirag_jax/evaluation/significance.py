"""Confidence intervals and tests over questions: paired bootstrap, permutation test, Holm's rule.

Two questions are of the same kind if each system scores the same on both. Instead of questions,
only the number of questions of each kind is drawn: multinomial in a bootstrap resample, binomial in
a permutation. This has the same distribution as drawing questions, but the cost depends on the
number of kinds, such as four for exact match of two systems. If there are almost as many kinds as
questions (ROUGE), drawing question by question is faster and is used instead.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cirag_jax.evaluation.overlap import Ratio

SAMPLES = 10_000
_BLOCK = 1 << 17  # counts per block of resamples, which fits a core's cache
_KIND_COST = 30  # cost of drawing one kind's count, relative to drawing one question
_TIES = 1e-9  # sums that differ by at most this are equal


def interval(a: Ratio, samples: int = SAMPLES, seed: int = 0) -> dict[str, float]:
    """Returns ``value`` and its 95 % bootstrap interval, ``low`` and ``high``.

    Groups are resampled with replacement. All are NaN if the denominator is 0.
    """
    zero = Ratio(np.zeros_like(a.top_Q), np.ones_like(a.bottom_Q))
    value, low, high = paired_interval(a, zero, samples, seed).values()
    return {"value": value, "low": low, "high": high}


def paired_interval(a: Ratio, b: Ratio, samples: int = SAMPLES, seed: int = 0) -> dict[str, float]:
    """Returns ``difference``, a - b, and its 95 % percentile interval, ``low`` and ``high``.

    This is the paired bootstrap of Efron and Tibshirani (1993) for ratios of sums. Resamples with a
    denominator of 0 are ignored. All are NaN if a denominator is 0.
    """
    drawn_RM = _resampled([a, b], samples, seed)
    return _percentiles(a.value - b.value, drawn_RM[:, 0] - drawn_RM[:, 1])


def intervals(
    ratios: Mapping[str, Ratio], samples: int = SAMPLES, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Returns the `interval` of every score."""
    return {name: interval(a, samples, seed) for name, a in ratios.items()}


def differences(
    a: Mapping[str, Ratio], b: Mapping[str, Ratio], samples: int = SAMPLES, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Returns the `paired_interval` of every score that ``a`` and ``b`` share."""
    return {name: paired_interval(a[name], b[name], samples, seed) for name in a if name in b}


def pairwise(
    systems: Mapping[str, Ratio],
    samples: int = SAMPLES,
    seed: int = 0,
    baseline: str | None = None,
) -> dict[tuple[str, str], dict[str, float]]:
    """Compares every pair of systems by one score over the same groups.

    ``samples`` is the number of bootstrap resamples, and of permutations. With ``baseline``, every
    other system is compared only with the system of this name.

    Returns:
      For every pair, in the order of ``systems``: ``difference`` (first minus second), ``low`` and
      ``high`` as in `paired_interval`, ``p`` of the two-sided permutation test, and ``p_holm``,
      corrected for the number of pairs.
    """
    names, scores = list(systems), list(systems.values())
    pairs = list(itertools.combinations(range(len(names)), 2))
    if baseline is not None:
        second = names.index(baseline) if baseline in names else -1
        pairs = [(first, second) for first in range(len(names)) if -1 != second != first]
    if not pairs:
        return {}
    drawn_RM = _resampled(scores, samples, seed)
    p_P = permutation_test(scores, pairs, samples, seed)
    results = {}
    for (i, j), p, p_holm in zip(pairs, p_P, holm(p_P), strict=True):
        bounds = _percentiles(scores[i].value - scores[j].value, drawn_RM[:, i] - drawn_RM[:, j])
        results[names[i], names[j]] = {**bounds, "p": float(p), "p_holm": float(p_holm)}
    return results


def pairwise_scores(
    scores: Mapping[str, Mapping[str, Ratio]],
    samples: int = SAMPLES,
    seed: int = 0,
    baseline: str | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns ``FIRST-SECOND`` -> score -> results of `pairwise`, for shared scores."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(scores.values())):
        systems = {system: by_name[name] for system, by_name in scores.items() if name in by_name}
        for (first, second), difference in pairwise(systems, samples, seed, baseline).items():
            results.setdefault(f"{first}-{second}", {})[name] = difference
    return results


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """Corrects p values for multiple tests with Holm's step-down rule (1979); ignores NaN.

    The k-th smallest of m values becomes the largest of (m - i + 1) p_(i) over i <= k, at most 1.
    """
    p_P = np.asarray(p, np.float64)
    corrected_P = np.full_like(p_P, np.nan)
    order = np.argsort(p_P, kind="stable")
    order = order[~np.isnan(p_P[order])]
    factors = np.arange(len(order), 0, -1)
    corrected_P[order] = np.minimum(np.maximum.accumulate(p_P[order] * factors), 1.0)
    return corrected_P


# ------------------------------------------------------------------------------------ resampling


# (random generator, questions of each of K kinds, R resamples) -> drawn questions [R, K].
_Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]


def _rows(scores: Sequence[Ratio]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kinds of questions and their sizes, or each question as a kind of size 1.

    A kind is a row of ``row_KC``: the M numerators of the scores, then the M denominators.
    """
    row_QC = np.stack([*(a.top_Q for a in scores), *(a.bottom_Q for a in scores)]).T
    row_KC, size_K = np.unique(row_QC, axis=0, return_counts=True)
    if len(size_K) * _KIND_COST > len(row_QC):
        return row_QC, np.ones(len(row_QC), np.int64)
    return row_KC, size_K


def _drawn(
    scores: Sequence[Ratio], draw: _Draw, samples: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sums of every score in each resample: ``top_RM`` and ``bottom_RM``."""
    row_KC, size_K = _rows(scores)
    block = max(_BLOCK // max(len(size_K), 1), 1)
    counts = (min(block, samples - start) for start in range(0, samples, block))
    sum_RC = np.concatenate([draw(rng, size_K, n).astype(np.float64) @ row_KC for n in counts])
    return sum_RC[:, : len(scores)], sum_RC[:, len(scores) :]


def _with_replacement(rng: np.random.Generator, size_K: np.ndarray, samples: int) -> np.ndarray:
    """Draws ``sum(size_K)`` questions with replacement."""
    total, shape = int(size_K.sum()), (samples, len(size_K))
    if total > len(size_K):
        return rng.multinomial(total, size_K / total, samples)
    if not total:
        return np.zeros(shape)
    cell_RQ = rng.integers(0, total, shape) + total * np.arange(samples)[:, None]
    return np.bincount(cell_RQ.ravel(), minlength=cell_RQ.size).reshape(shape)


def _halves(rng: np.random.Generator, size_K: np.ndarray, samples: int) -> np.ndarray:
    """Draws each question with probability 1/2."""
    shape = (samples, len(size_K))
    if size_K.sum() > len(size_K):
        return rng.binomial(size_K, 0.5, shape)
    byte_RB = rng.integers(0, 256, (samples, -(-len(size_K) // 8)), np.uint8)
    return np.unpackbits(byte_RB, axis=1, count=len(size_K))


def _resampled(scores: Sequence[Ratio], samples: int, seed: int) -> np.ndarray:
    """Returns every score in each bootstrap resample, float64 [R, M]."""
    return _divided(*_drawn(scores, _with_replacement, samples, np.random.default_rng(seed)))


def permutation_test(
    scores: Sequence[Ratio], pairs: Sequence[tuple[int, int]], samples: int, seed: int
) -> np.ndarray:
    """Returns the two-sided p of each pair's difference, float64; NaN for undefined differences.

    This is approximate randomization (Noreen, 1989): each group's two scores are swapped with
    probability 1/2, for the same groups in all pairs. p is the share of permutations with at least
    the observed difference. The observed arrangement counts as a permutation (Phipson and Smyth,
    2010), so p is at least 1 / (samples + 1).
    """
    rng = np.random.default_rng((seed, 1))  # a stream independent of the bootstrap's
    swapped = _drawn(scores, _halves, samples, rng)
    totals = [
        np.array([column.sum() for column in columns]) for columns in zip(*scores, strict=True)
    ]
    p = []
    for i, j in pairs:
        # A system's sums after the swap: its total, minus its swapped terms, plus those received.
        first_R, second_R = (
            _divided(
                *(w[a] - m_RM[:, a] + m_RM[:, b] for w, m_RM in zip(totals, swapped, strict=True))
            )
            for a, b in ((i, j), (j, i))
        )
        observed = scores[i].value - scores[j].value
        as_large = (np.abs(first_R - second_R) >= np.abs(observed) - _TIES).sum() + 1
        p.append(np.nan if np.isnan(observed) else as_large / (samples + 1))
    return np.array(p)


def _divided(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def _percentiles(difference: float, drawn_R: np.ndarray) -> dict[str, float]:
    if not np.isfinite(difference):
        return dict.fromkeys(("difference", "low", "high"), float("nan"))
    low, high = np.nanpercentile(drawn_R, [2.5, 97.5])
    return {"difference": difference, "low": float(low), "high": float(high)}
