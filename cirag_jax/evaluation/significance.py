"""Intervals and tests over questions: the paired bootstrap, the permutation test, Holm's rule.

Questions in which all systems score alike are exchangeable, so they are drawn together: how many
questions of each kind a resample holds is multinomial, how many of a kind are swapped is binomial.
That is the distribution of drawing question by question, at a cost that grows with the number of
kinds (exact match of two systems has four) and not with the number of questions.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cirag_jax.evaluation.overlap import Ratio

SAMPLES = 10_000
_BLOCK = 1 << 22  # Counts that are held at once.
_TIES = 1e-9  # Sums that differ by less are equal.


def interval(a: Ratio, samples: int = SAMPLES, seed: int = 0) -> dict[str, float]:
    """The score with its 95 % percentile interval; groups are resampled with replacement.

    Returns:
      ``value``, ``low`` and ``high``; NaN where nothing counts.
    """
    nothing = Ratio(np.zeros_like(a.top_Q), np.ones_like(a.bottom_Q))
    found = paired_interval(a, nothing, samples, seed)
    return {"value": found["difference"], "low": found["low"], "high": found["high"]}


def paired_interval(a: Ratio, b: Ratio, samples: int = SAMPLES, seed: int = 0) -> dict[str, float]:
    """``a - b`` with its 95 % percentile interval, both on the same resampled groups.

    The paired bootstrap of Efron and Tibshirani (1993), for ratios of sums. A resample in which
    nothing counts is left out.

    Returns:
      ``difference``, ``low`` and ``high``; NaN where nothing counts.

    Raises:
      ValueError: the groups differ in number.
    """
    drawn_RM = _resampled([a, b], samples, seed)
    return _percentiles(a.value - b.value, drawn_RM[:, 0] - drawn_RM[:, 1])


def intervals(
    ratios: Mapping[str, Ratio], samples: int = SAMPLES, seed: int = 0
) -> dict[str, dict[str, float]]:
    """`interval` of every score."""
    return {name: interval(a, samples, seed) for name, a in ratios.items()}


def differences(
    a: Mapping[str, Ratio], b: Mapping[str, Ratio], samples: int = SAMPLES, seed: int = 0
) -> dict[str, dict[str, float]]:
    """`paired_interval` of every score that both have."""
    return {name: paired_interval(a[name], b[name], samples, seed) for name in a if name in b}


def pairwise(
    systems: Mapping[str, Ratio], samples: int = SAMPLES, seed: int = 0
) -> dict[tuple[str, str], dict[str, float]]:
    """One score of several systems on the same questions: every pair's difference, and its test.

    Args:
      systems: the score of each, over the same groups.
      samples: resamples of the bootstrap, and permutations.
      seed: of both.

    Returns:
      For every pair, in the order of ``systems``: ``difference`` (first less second), ``low`` and
      ``high`` as `paired_interval`; ``p`` of the two-sided permutation test, and ``p_holm``,
      corrected for all pairs that have one. NaN where nothing counts.

    Raises:
      ValueError: the groups differ in number.
    """
    names, scores = list(systems), list(systems.values())
    pairs = list(itertools.combinations(range(len(names)), 2))
    if not pairs:
        return {}
    drawn_RM = _resampled(scores, samples, seed)
    p_P = permutation_test(scores, pairs, samples, seed)
    found = {}
    for (i, j), p, p_holm in zip(pairs, p_P, holm(p_P), strict=True):
        bounds = _percentiles(scores[i].value - scores[j].value, drawn_RM[:, i] - drawn_RM[:, j])
        found[names[i], names[j]] = {**bounds, "p": float(p), "p_holm": float(p_holm)}
    return found


def pairwise_scores(
    scores: Mapping[str, Mapping[str, Ratio]], samples: int = SAMPLES, seed: int = 0
) -> dict[str, dict[str, dict[str, float]]]:
    """``FIRST-SECOND`` -> score -> as `pairwise`; of scores that both systems have."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in dict.fromkeys(name for own in scores.values() for name in own):
        have = {system: own[name] for system, own in scores.items() if name in own}
        for (first, second), difference in pairwise(have, samples, seed).items():
            found.setdefault(f"{first}-{second}", {})[name] = difference
    return found


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """P values corrected for their number by Holm's step-down rule (1979); NaN is no test.

    The k-th smallest of m becomes the largest of (m - i + 1) p_(i) over i <= k, at most 1.
    """
    p_P = np.asarray(p, np.float64)
    corrected_P = np.full_like(p_P, np.nan)
    order = np.argsort(p_P, kind="stable")
    order = order[~np.isnan(p_P[order])]
    factors = np.arange(len(order), 0, -1)
    corrected_P[order] = np.minimum(np.maximum.accumulate(p_P[order] * factors), 1.0)
    return corrected_P


# ------------------------------------------------------------------------------------ resampling


def _kinds(scores: Sequence[Ratio]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct rows of all scores, and how many groups are of each.

    Returns:
      ``top_KM`` and ``bottom_KM`` float64, ``size_K`` int64.
    """
    sizes = {len(a.top_Q) for a in scores}
    if len(sizes) > 1:
        low, high = min(sizes), max(sizes)
        raise ValueError(f"{high} and {low} groups cannot be paired")
    columns = [column for a in scores for column in a]
    row_KN, size_K = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    return row_KN[:, 0::2], row_KN[:, 1::2], size_K


def _blocks(samples: int, width: int) -> Iterator[int]:
    """Sizes of the blocks in which ``samples`` are drawn, in bounded memory."""
    size = max(_BLOCK // max(width, 1), 1)
    for start in range(0, samples, size):
        yield min(size, samples - start)


def _resampled(scores: Sequence[Ratio], samples: int, seed: int) -> np.ndarray:
    """Every score in each bootstrap resample: float64 [R, M], NaN where nothing counts."""
    top_KM, bottom_KM, size_K = _kinds(scores)
    total, rng = int(size_K.sum()), np.random.default_rng(seed)
    if not total:
        return np.full((samples, len(scores)), np.nan)
    drawn = []
    for count in _blocks(samples, len(size_K)):
        count_RK = rng.multinomial(total, size_K / total, count).astype(np.float64)
        drawn.append(_divided(count_RK @ top_KM, count_RK @ bottom_KM))
    return np.concatenate(drawn)


def permutation_test(
    scores: Sequence[Ratio], pairs: Sequence[tuple[int, int]], samples: int, seed: int
) -> np.ndarray:
    """Two-sided p of every pair's difference: how often swapping on random groups gives as much.

    Approximate randomisation (Noreen, 1989): each group's two scores change places with
    probability 1/2, for all pairs on the same groups. The observed arrangement counts as one
    (Phipson and Smyth, 2010), so that p is at least 1 / (samples + 1).

    Returns:
      float64, a number for each pair of ``scores``; NaN where nothing counts.

    Raises:
      ValueError: the groups differ in number.
    """
    top_KM, bottom_KM, size_K = _kinds(scores)
    first, second = map(list, zip(*pairs, strict=True))
    rng = np.random.default_rng((seed, 1))  # not the bootstrap's stream

    def halves(values_KM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a pair shares, summed over all groups, and what a swap turns round."""
        a_KP, b_KP = values_KM[:, first], values_KM[:, second]
        return size_K @ (a_KP + b_KP) / 2, (a_KP - b_KP) / 2

    def differences(signs_RK: np.ndarray) -> np.ndarray:
        """Of groups whose signs sum to these; a swap has the sign -1."""
        moved_RP, below_RP = signs_RK @ turned_KP, signs_RK @ turned_below_KP
        a_RP = _divided(shared_P + moved_RP, shared_below_P + below_RP)
        b_RP = _divided(shared_P - moved_RP, shared_below_P - below_RP)
        return a_RP - b_RP

    shared_P, turned_KP = halves(top_KM)
    shared_below_P, turned_below_KP = halves(bottom_KM)
    observed_P = differences(size_K[None].astype(np.float64))[0]
    as_large_P = np.ones(len(pairs))
    for count in _blocks(samples, len(size_K)):
        swapped_RK = rng.binomial(size_K, 0.5, (count, len(size_K)))
        found_RP = differences((size_K - 2 * swapped_RK).astype(np.float64))
        as_large_P += (np.abs(found_RP) >= np.abs(observed_P) - _TIES).sum(axis=0)
    return np.where(np.isnan(observed_P), np.nan, as_large_P / (samples + 1))


def _divided(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def _percentiles(difference: float, drawn_R: np.ndarray) -> dict[str, float]:
    if not np.isfinite(difference):
        return dict.fromkeys(("difference", "low", "high"), float("nan"))
    low, high = np.nanpercentile(drawn_R, [2.5, 97.5])
    return {"difference": difference, "low": float(low), "high": float(high)}
