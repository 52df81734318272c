"""Agreement of two judges, compared with scikit-learn and hand-computed values."""

import numpy as np
import pytest

from cirag_jax.evaluation.agreement import agreement


def test_kappa_matches_sklearn():
    from sklearn.metrics import cohen_kappa_score

    rng = np.random.default_rng(0)
    for share in (0.1, 0.5, 0.9):
        first = rng.random(60) < share
        second = np.where(rng.random(60) < 0.7, first, rng.random(60) < 0.5)
        result = agreement(first.tolist(), second.tolist())
        assert result["kappa"] == pytest.approx(cohen_kappa_score(first, second))
        assert result["agree"] == pytest.approx(float((first == second).mean()))


def test_agreement_matches_hand_computed_values():
    """Seven of ten verdicts agree, and five would agree by chance: kappa is (0.7 - 0.5) / 0.5."""
    first = [True] * 6 + [False] * 4
    second = [True] * 4 + [False] * 2 + [True] + [False] * 3
    assert agreement(first, second) == {
        "num_answers": 10, "both_right": 4, "first_alone": 2, "second_alone": 1, "both_wrong": 3,
        "agree": pytest.approx(0.7), "kappa": pytest.approx(0.4),
    }  # fmt: skip


def test_agreement_undefined_kappa_has_reason():
    same = agreement([True, True], [True, True])
    assert (same["agree"], same["kappa"]) == (1.0, None) and "always" in same["reason"]
    assert agreement([], [])["reason"] == "no answer has both verdicts"
    with pytest.raises(ValueError, match="shorter"):
        agreement([True], [])
