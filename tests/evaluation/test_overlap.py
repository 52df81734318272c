"""Precision, recall, F1 and bootstrap, compared with hand-computed values, sklearn and SciPy."""

import numpy as np
import pytest
import scipy.stats

from cirag_jax.evaluation.overlap import Overlap, Ratio, mean_of, overlap_ratios, ratio
from cirag_jax.evaluation.significance import differences, interval, intervals, paired_interval


def test_overlap_scores_match_hand_computed_values():
    result = Overlap(matched=2, predicted=3, gold=4)
    assert (result.precision, result.recall) == (2 / 3, 0.5)
    assert result.f1 == pytest.approx(4 / 7)
    for one in (Overlap(0, 0, 3), Overlap(0, 3, 0)):
        assert (one.precision, one.recall, one.f1) == (0, 0, 0)
    both = Overlap(0, 0, 0)
    assert (both.precision, both.recall, both.f1) == (1, 1, 1)


def test_overlap_ratios_match_hand_computed_values():
    # Question 0 has two steps. Question 1 has one step, and one that is not counted.
    overlaps = [Overlap(1, 2, 1), Overlap(0, 0, 0), Overlap(1, 1, 4), None]
    result = overlap_ratios(overlaps, [0, 0, 1, 1], 2)
    assert result["precision"].value == pytest.approx((0.5 + 1 + 1) / 3)
    assert result["recall"].value == pytest.approx((1 + 1 + 0.25) / 3)
    assert result["f1"].value == pytest.approx((2 / 3 + 1 + 2 / 5) / 3)
    assert result["nonempty_f1"].value == pytest.approx((2 / 3 + 2 / 5) / 2)
    assert result["micro_precision"].value == pytest.approx(2 / 3)
    assert result["micro_recall"].value == pytest.approx(2 / 5)
    assert result["micro_f1"].value == pytest.approx(4 / 8)
    np.testing.assert_array_equal(result["f1"].bottom_Q, [2, 1])
    empty = overlap_ratios([None], [0], 1)["f1"]
    assert np.isnan(empty.value) and np.isnan(interval(empty)["low"])


def test_overlap_ratios_match_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    gold_NC, mine_NC = rng.random((2, 20, 7)) < 0.4
    gold_NC[:3] = mine_NC[2:4] = False
    overlaps = [
        Overlap(int((g & m).sum()), int(m.sum()), int(g.sum()))
        for g, m in zip(gold_NC, mine_NC, strict=True)
    ]
    result = overlap_ratios(overlaps, range(20), 20)
    # In sklearn, the value of 0/0 is an argument. We return 0 if only one side is empty.
    filled = [o.predicted + o.gold > 0 for o in overlaps]
    macro = metrics.precision_recall_fscore_support(
        gold_NC[filled], mine_NC[filled], average="samples", zero_division=0
    )
    agreed = filled.count(False)
    for name, theirs in zip(("precision", "recall", "f1"), macro, strict=False):
        assert result[name].value == pytest.approx((theirs * sum(filled) + agreed) / 20)
    micro = metrics.precision_recall_fscore_support(gold_NC, mine_NC, average="micro")
    for name, theirs in zip(("precision", "recall", "f1"), micro, strict=False):
        assert result[f"micro_{name}"].value == pytest.approx(theirs)


def test_paired_interval_matches_scipy_bootstrap():
    rng = np.random.default_rng(0)
    a, b = rng.random(200), rng.random(200) - 0.1
    ours = paired_interval(mean_of(a), mean_of(b), samples=20_000)
    theirs = scipy.stats.bootstrap(
        ((a - b),), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert ours["difference"] == pytest.approx((a - b).mean())
    assert ours["low"] == pytest.approx(theirs.low, abs=0.004)
    assert ours["high"] == pytest.approx(theirs.high, abs=0.004)


def test_paired_interval_constant_difference_has_no_width():
    a = np.random.default_rng(0).random(50)
    interval = paired_interval(mean_of(a), mean_of(a - 0.25))
    assert interval["low"] == pytest.approx(0.25) and interval["high"] == pytest.approx(0.25)


def test_interval_same_seed_gives_same_result():
    a, b = np.random.default_rng(0).random((2, 30))
    first, again, other = (paired_interval(mean_of(a), mean_of(b), seed=s) for s in (3, 3, 4))
    assert first == again != other


def test_interval_equals_paired_interval_with_zeros():
    a, b = map(mean_of, np.random.default_rng(1).random((2, 40)))
    alone = paired_interval(a, mean_of(np.zeros(40)), samples=1500, seed=3)
    assert interval(a, 1500, 3) == pytest.approx(
        {"value": alone["difference"], "low": alone["low"], "high": alone["high"]}
    )
    both = differences({"x": a, "y": a}, {"x": b}, 1500, 3)
    assert both == {"x": paired_interval(a, b, 1500, 3)}
    assert intervals({"x": a}, 1500, 3)["x"] == interval(a, 1500, 3)


def test_interval_resamples_questions_not_steps():
    """Ten equal steps of one question count as one observation."""
    values, groups = [1.0] * 10 + [0.0] * 10, [0] * 10 + [1] * 10
    together = interval(ratio(values, [1.0] * 20, groups, 2), samples=2000)
    assert (together["value"], together["low"], together["high"]) == (0.5, 0.0, 1.0)
    apart = interval(ratio(values, [1.0] * 20, range(20), 20), samples=2000)
    assert 0.2 < apart["low"] < 0.35 and 0.65 < apart["high"] < 0.8


def test_interval_ignores_resamples_without_denominator():
    rare = Ratio(np.array([1.0, 0.0, 0.0]), np.array([2.0, 0.0, 0.0]))
    assert interval(rare, samples=200) == {"value": 0.5, "low": 0.5, "high": 0.5}
    with pytest.raises(ValueError, match="same shape"):
        paired_interval(rare, Ratio(np.zeros(2), np.ones(2)))
