"""Intervals and tests over questions: the paired bootstrap, the permutation test, Holm's rule.

Questions in which all systems score alike are exchangeable, so they are drawn together: how many
questions of each kind a resample holds is multinomial, how many of a kind are swapped is binomial.
That is the distribution of drawing question by question, at a cost that grows with the number of
kinds (exact match of two systems has four) and not with the number of questions. Where there are
almost as many kinds as questions, as of ROUGE, questions are drawn one by one, which then is faster
and needs memory for a block of resamples alone.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cirag_jax.evaluation.overlap import Ratio

SAMPLES = 10_000
_BLOCK = 1 << 17  # Counts that are held at once; they stay in a core's cache.
_A_KIND = 30  # To draw the count of one kind takes as long as to draw so many questions.
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


# Counts of every group of rows in so many resamples, from the rows' sizes: [R, K].
_Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]


def _rows(scores: Sequence[Ratio]) -> tuple[np.ndarray, np.ndarray]:
    """What is drawn: distinct rows of all scores with their number, or one row a question.

    Returns:
      ``row_KC`` float64, the M columns of the tops and then those of the bottoms, and ``size_K``
      int64, how many questions are of each row.

    Raises:
      ValueError: the groups differ in number.
    """
    sizes = {len(a.top_Q) for a in scores}
    if len(sizes) > 1:
        low, high = min(sizes), max(sizes)
        raise ValueError(f"{high} and {low} groups cannot be paired")
    row_QC = np.stack([*(a.top_Q for a in scores), *(a.bottom_Q for a in scores)]).T
    row_KC, size_K = np.unique(row_QC, axis=0, return_counts=True)
    if len(size_K) * _A_KIND > len(row_QC):
        return row_QC, np.ones(len(row_QC), np.int64)
    return row_KC, size_K


def _drawn(
    scores: Sequence[Ratio], draw: _Draw, samples: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of every score over what each resample draws: ``top_RM`` and ``bottom_RM``."""
    row_KC, size_K = _rows(scores)
    block = max(_BLOCK // max(len(size_K), 1), 1)
    counts = (min(block, samples - start) for start in range(0, samples, block))
    sum_RC = np.concatenate([draw(rng, size_K, n).astype(np.float64) @ row_KC for n in counts])
    return sum_RC[:, : len(scores)], sum_RC[:, len(scores) :]


def _with_replacement(rng: np.random.Generator, size_K: np.ndarray, samples: int) -> np.ndarray:
    """As many questions as there are, each time any of them."""
    total, shape = int(size_K.sum()), (samples, len(size_K))
    if total > len(size_K):
        return rng.multinomial(total, size_K / total, samples)
    if not total:
        return np.zeros(shape)
    cell_RQ = rng.integers(0, total, shape) + total * np.arange(samples)[:, None]
    return np.bincount(cell_RQ.ravel(), minlength=cell_RQ.size).reshape(shape)


def _halves(rng: np.random.Generator, size_K: np.ndarray, samples: int) -> np.ndarray:
    """Each question with probability 1/2."""
    shape = (samples, len(size_K))
    if size_K.sum() > len(size_K):
        return rng.binomial(size_K, 0.5, shape)
    byte_RB = rng.integers(0, 256, (samples, -(-len(size_K) // 8)), np.uint8)
    return np.unpackbits(byte_RB, axis=1, count=len(size_K))


def _resampled(scores: Sequence[Ratio], samples: int, seed: int) -> np.ndarray:
    """Every score in each bootstrap resample: float64 [R, M], NaN where nothing counts."""
    return _divided(*_drawn(scores, _with_replacement, samples, np.random.default_rng(seed)))


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
    rng = np.random.default_rng((seed, 1))  # not the bootstrap's stream
    moved = _drawn(scores, _halves, samples, rng)
    whole = [
        np.array([column.sum() for column in columns]) for columns in zip(*scores, strict=True)
    ]
    p = []
    for i, j in pairs:
        # What a system keeps of its own, and what it gets of the other's.
        first_R, second_R = (
            _divided(
                *(w[a] - m_RM[:, a] + m_RM[:, b] for w, m_RM in zip(whole, moved, strict=True))
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
