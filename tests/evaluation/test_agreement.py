"""Two judges' agreement against scikit-learn and by hand."""

import numpy as np
import pytest

from cirag_jax.evaluation.agreement import agreement


def test_kappa_is_scikit_learns():
    from sklearn.metrics import cohen_kappa_score

    rng = np.random.default_rng(0)
    for share in (0.1, 0.5, 0.9):
        first = rng.random(60) < share
        second = np.where(rng.random(60) < 0.7, first, rng.random(60) < 0.5)
        found = agreement(first.tolist(), second.tolist())
        assert found["kappa"] == pytest.approx(cohen_kappa_score(first, second))
        assert found["agree"] == pytest.approx(float((first == second).mean()))


def test_by_hand():
    """Equal in 7 of 10; by chance in 0.6 * 0.5 + 0.4 * 0.5: (0.7 - 0.5) / 0.5."""
    first = [True] * 6 + [False] * 4
    second = [True] * 4 + [False] * 2 + [True] + [False] * 3
    assert agreement(first, second) == {
        "num_answers": 10, "both_right": 4, "first_alone": 2, "second_alone": 1, "both_wrong": 3,
        "agree": pytest.approx(0.7), "kappa": pytest.approx(0.4),
    }  # fmt: skip


def test_what_cannot_be_said_has_its_reason():
    same = agreement([True, True], [True, True])
    assert (same["agree"], same["kappa"]) == (1.0, None) and "always" in same["reason"]
    assert agreement([], [])["reason"] == "no answer has both verdicts"
    with pytest.raises(ValueError, match="shorter"):
        agreement([True], [])
