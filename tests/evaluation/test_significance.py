"""Intervals and tests, compared with SciPy, exact permutations and hand-computed values."""

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.stats

from cirag_jax.evaluation import significance
from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.significance import (
    holm,
    interval,
    paired_interval,
    pairwise,
    permutation_test,
)


def sampled_p(a, b, samples):
    return permutation_test([a, b], [(0, 1)], samples, seed=0)[0]


def exact_p(a, b):
    """Returns p over all 2^Q permutations."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(a))))
    result = np.abs(signs @ (a - b))
    return np.mean(result >= result[0] - 1e-12)


def test_permutation_test_approaches_exact_p():
    rng = np.random.default_rng(0)
    a, b = rng.random(9), rng.random(9) - 0.15
    result = sampled_p(mean_of(a), mean_of(b), samples=40_000)
    assert result == pytest.approx(exact_p(a, b), abs=0.01)
    theirs = scipy.stats.permutation_test(
        (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert result == pytest.approx(theirs.pvalue, abs=0.01)


def test_permutation_test_counts_ties():
    a, b = np.array([1, 1, 1, 0, 1.0]), np.array([0, 0, 1, 1, 1.0])
    # Two of three different questions favor the first system, so every permutation is as extreme.
    assert exact_p(a, b) == 1
    assert sampled_p(mean_of(a), mean_of(b), samples=500) == 1
    same = sampled_p(mean_of(a), mean_of(a), samples=500)
    assert same == 1  # no questions differ
    far = sampled_p(mean_of(np.ones(40)), mean_of(np.zeros(40)), samples=999)
    assert far == 1 / 1000  # the observed permutation counts as one


def test_resampling_by_kind_equals_by_question():
    """Grouping equal questions changes no result; tiny differences prevent the grouping."""
    rng = np.random.default_rng(3)
    a, b = (rng.random((2, 300)) < [[0.6], [0.5]]).astype(float)
    hair = 1e-12 * rng.random(300)  # too small to break ties
    together = paired_interval(mean_of(a), mean_of(b), samples=20_000)
    apart = paired_interval(mean_of(a + hair), mean_of(b), samples=20_000)
    for bound in ("difference", "low", "high"):
        assert together[bound] == pytest.approx(apart[bound], abs=0.005)
    p = [sampled_p(mean_of(x), mean_of(b), samples=20_000) for x in (a, a + hair)]
    assert p[0] == pytest.approx(p[1], abs=0.015) and 0.05 < p[0] < 0.5


@pytest.fixture(params=["by kind", "by question"])
def resampling(request, monkeypatch):
    """Forces resampling by groups of equal questions ("kinds") or by single questions."""
    monkeypatch.setattr(significance, "_KIND_COST", 0 if request.param == "by kind" else math.inf)
    monkeypatch.setattr(significance, "_BLOCK", 1000)  # several blocks, the last one smaller


def repeated_scores():
    """Returns two correlated scores of 45 questions; every third question occurs twice."""
    rng = np.random.default_rng(5)
    top_Q = rng.random(45)
    rows = np.sort([*range(45), *range(0, 45, 3)])
    a = Ratio(top_Q[rows], rng.integers(1, 4, 45).astype(float)[rows])
    b = Ratio((top_Q + rng.random(45) - 0.7)[rows], rng.integers(1, 4, 45).astype(float)[rows])
    return a, b


def assert_one_distribution(drawn, loop):
    """Checks that both samples have the same distribution (Kolmogorov-Smirnov, level 0.001)."""
    for ours, theirs in zip(drawn, loop, strict=True):
        result: Any = scipy.stats.ks_2samp(ours, theirs)  # SciPy's stubs lack pvalue
        assert result.pvalue > 0.001


def test_bootstrap_has_distribution_of_a_loop(resampling):
    a, b = repeated_scores()
    found_RM = significance._resampled([a, b], 20_000, seed=1)
    assert found_RM.shape == (20_000, 2)
    rng, loop = np.random.default_rng(2), []
    for _ in range(20_000):
        rows = rng.integers(0, 60, 60)
        loop.append([score.top_Q[rows].sum() / score.bottom_Q[rows].sum() for score in (a, b)])
    result, loop = found_RM.T, np.transpose(loop)
    assert_one_distribution([*result, result[0] - result[1]], [*loop, loop[0] - loop[1]])
    again = significance._resampled([a, b], 20_000, seed=1)
    other = significance._resampled([a, b], 20_000, seed=3)
    assert (found_RM == again).all() and (found_RM != other).any()


def test_bootstrap_sums_have_expected_moments(resampling):
    """Mean and variance are within five standard errors of their expected values."""
    a, b = repeated_scores()
    values_QC = np.stack([a.top_Q, b.top_Q, a.bottom_Q, b.bottom_Q], axis=1)
    for draw, mean_C, variance_C in (
        (significance._with_replacement, values_QC.sum(axis=0), 60 * values_QC.var(axis=0)),
        (significance._halves, values_QC.sum(axis=0) / 2, (values_QC**2).sum(axis=0) / 4),
    ):
        parts = significance._drawn([a, b], draw, 50_000, np.random.default_rng(7))
        sum_RC = np.concatenate(parts, axis=1)
        error_C = 5 * np.sqrt(variance_C / 50_000)
        assert (abs(sum_RC.mean(axis=0) - mean_C) < error_C).all()
        assert (abs(sum_RC.var(axis=0) / variance_C - 1) < 5 * np.sqrt(2 / 50_000)).all()


def test_permutations_have_distribution_of_a_loop(resampling):
    a, b = repeated_scores()
    rng, loop = np.random.default_rng(2), []
    for _ in range(20_000):
        swapped = rng.random(60) < 0.5
        first, second = (
            [np.where(swapped, y, x).sum() for x, y in zip(*pair, strict=True)]
            for pair in ((a, b), (b, a))
        )
        loop.append(abs(first[0] / first[1] - second[0] / second[1]))
    p = np.mean(np.array(loop) >= abs(a.value - b.value) - 1e-9)
    error = 4 * np.sqrt(2 * p * (1 - p) / 20_000)
    assert 0.01 < p < 0.3 and sampled_p(a, b, samples=20_000) == pytest.approx(p, abs=error)


def test_bootstrap_many_kinds_uses_little_memory():
    rng = np.random.default_rng(0)
    match = [mean_of((rng.random(400) < 0.5).astype(float)) for _ in range(2)]
    assert significance._rows(match)[1].shape == (4,)
    rouge = {name: mean_of(rng.random(100_000)) for name in "ab"}
    long = [mean_of(rng.integers(0, 40, 2000) / 40) for _ in range(2)]
    row_KC, size_K = significance._rows(long)
    assert size_K.tolist() == [1] * 2000 > [1] * len(np.unique(row_KC, axis=0))
    tracemalloc.start()
    pairwise(rouge, samples=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6  # all counts at once would take 80 million bytes


def test_permutation_swaps_denominators_too():
    """A swap exchanges both the numerators and the denominators of two systems."""
    a = Ratio(np.array([1.0, 2.0, 0.0, 3.0, 2.0]), np.array([1.0, 9.0, 1.0, 4.0, 8.0]))
    b = Ratio(np.array([0.0, 1.0, 1.0, 1.0, 1.0]), np.array([2.0, 2.0, 1.0, 4.0, 1.0]))
    result = sampled_p(a, b, samples=30_000)
    values = []
    for swapped in itertools.product((False, True), repeat=5):
        one, two = (
            [np.where(swapped, y, x) for x, y in zip(*pair, strict=True)]
            for pair in ((a, b), (b, a))
        )
        values.append(abs(one[0].sum() / one[1].sum() - two[0].sum() / two[1].sum()))
    assert result == pytest.approx(np.mean(np.array(values) >= values[0] - 1e-12), abs=0.01)


def test_holm_matches_hand_computed_values():
    # 3 * .01, then max(previous, 2 * .04), then max(previous, .05).
    np.testing.assert_allclose(holm([0.04, 0.01, 0.05]), [0.08, 0.03, 0.08])
    np.testing.assert_allclose(holm([0.9, np.nan, 0.6]), [1.0, np.nan, 1.0])
    assert holm([]).shape == (0,)


def test_pairwise_compares_every_pair():
    rng = np.random.default_rng(1)
    systems = {name: mean_of((rng.random(80) < p).astype(float)) for name, p in
               (("x", 0.8), ("y", 0.5), ("z", 0.45))}  # fmt: skip
    result = pairwise(systems, samples=3000)
    assert list(result) == [("x", "y"), ("x", "z"), ("y", "z")]
    raw = [pair["p"] for pair in result.values()]
    np.testing.assert_allclose([pair["p_holm"] for pair in result.values()], holm(raw))
    for (a, b), pair in result.items():
        alone = paired_interval(systems[a], systems[b], samples=3000)
        assert pair["difference"] == alone["difference"]
        assert pair["low"] == pytest.approx(alone["low"], abs=0.03)
        assert pair["p"] == pytest.approx(sampled_p(systems[a], systems[b], samples=3000), abs=0.03)
    assert result["x", "z"]["p_holm"] < 0.01 < 0.1 < result["y", "z"]["p"]
    assert pairwise({"x": systems["x"]}) == {}
    against = pairwise(systems, samples=3000, baseline="y")
    assert list(against) == [("x", "y"), ("z", "y")]
    raw = [pair["p"] for pair in against.values()]
    np.testing.assert_allclose([pair["p_holm"] for pair in against.values()], holm(raw))
    assert against["z", "y"]["difference"] == -result["y", "z"]["difference"]
    assert pairwise(systems, samples=9, baseline="other") == {}


def test_pairwise_without_data_is_nan():
    none, one = Ratio(np.zeros(3), np.zeros(3)), mean_of([1.0, 0.0, 1.0])
    result = pairwise({"a": none, "b": one, "c": one}, samples=50)
    assert np.isnan(result["a", "b"]["p"]) and np.isnan(result["a", "b"]["p_holm"])
    assert result["b", "c"]["p_holm"] == 1  # corrected for the only tested pair
    with pytest.raises(ValueError, match="same shape"):
        sampled_p(one, mean_of([1.0, 0.0]), samples=9)
    nobody = Ratio(np.zeros(0), np.zeros(0))
    assert np.isnan(interval(nobody)["low"])
    assert np.isnan(pairwise({"a": nobody, "b": nobody}, samples=5)["a", "b"]["p"])
