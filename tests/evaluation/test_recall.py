import numpy as np
import pytest
import scipy.stats

from cirag_jax.evaluation.recall import paired_bootstrap, recall_at


def test_recall_is_the_share_of_gold_in_the_first_k():
    ranked = ["a", "x", "b", "y"]
    assert [recall_at(ranked, {"a", "b"}, k) for k in (1, 2, 3, 9)] == [0.5, 0.5, 1.0, 1.0]
    assert recall_at([], {"a"}, 5) == 0.0
    assert recall_at(ranked, ["a", "a"], 1) == 1.0
    with pytest.raises(ValueError, match="at least one gold"):
        recall_at(ranked, [], 1)


def test_bootstrap_agrees_with_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.random(200), rng.random(200) - 0.1
    ours = paired_bootstrap(a, b, samples=20_000)
    theirs = scipy.stats.bootstrap(
        ((a - b),), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert ours["difference"] == pytest.approx((a - b).mean())
    assert ours["low"] == pytest.approx(theirs.low, abs=0.004)
    assert ours["high"] == pytest.approx(theirs.high, abs=0.004)


def test_bootstrap_pairs_the_questions():
    """Two systems that differ by a constant have no spread, however much questions differ."""
    a = np.random.default_rng(0).random(50)
    interval = paired_bootstrap(a, a - 0.25)
    assert interval["low"] == pytest.approx(0.25) and interval["high"] == pytest.approx(0.25)


def test_bootstrap_repeats_for_a_seed():
    a, b = np.random.default_rng(0).random((2, 30))
    assert paired_bootstrap(a, b, seed=3) == paired_bootstrap(a, b, seed=3)
    assert paired_bootstrap(a, b, seed=3) != paired_bootstrap(a, b, seed=4)
