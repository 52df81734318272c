import pytest

from cirag_jax.evaluation.recall import (
    SetScores,
    mean_scores,
    recall_at,
    recall_by_step,
    set_scores,
)


def test_recall_at_is_share_of_gold_in_first_k():
    ranked = ["a", "x", "b", "y"]
    assert [recall_at(ranked, {"a", "b"}, k) for k in (1, 2, 3, 9)] == [0.5, 0.5, 1.0, 1.0]
    assert recall_at([], {"a"}, 5) == 0.0
    assert recall_at(ranked, ["a", "a"], 1) == 1.0
    with pytest.raises(ValueError, match="at least one gold"):
        recall_at(ranked, [], 1)


def test_recall_at_accepts_substitutes():
    elsewhere = {"a": [{"a", "x"}, {"a", "y"}], "b": [{"b"}]}
    ranked = ["x", "b", "y"]
    assert [recall_at(ranked, {"a", "b"}, k, elsewhere) for k in (1, 2, 3)] == [0.0, 0.5, 1.0]
    assert recall_at(["a", "x", "y"], {"a", "b"}, 3, elsewhere) == 0.5
    assert recall_by_step([("x",), ("y",)], {"a"}, 2, elsewhere) == [0.0, 1.0]


def test_set_scores_match_hand_computed_values():
    exact, half = set_scores(["b", "a"], ["a", "b"]), set_scores(["a", "x", "y"], ["a", "b"])
    assert exact == SetScores(2, 1.0, 1.0, 1.0, 1.0)
    assert half == SetScores(3, 0.5, 0.0, pytest.approx(0.4), pytest.approx(1 / 3))
    more = SetScores(3, 1.0, 0.0, pytest.approx(0.8), pytest.approx(2 / 3))
    assert set_scores(["a", "b", "x"], ["a", "b"]) == more
    assert set_scores(["x"], ["a"]) == SetScores(1, 0.0, 0.0, 0.0, 0.0)
    assert set_scores([], ["a"]) == SetScores(0, 0.0, 0.0, 0.0, 0.0)
    mean = SetScores(2.5, 0.75, 0.5, pytest.approx(0.7), pytest.approx(2 / 3))
    assert mean_scores([exact, half]) == mean
    # A retrieved passage replaces one gold passage, or two.
    elsewhere = {"a": [{"a", "x"}], "b": [{"b", "x"}]}
    assert set_scores(["x"], ["a"], elsewhere) == exact._replace(read=1)
    assert set_scores(["x"], ["a", "b"], elsewhere) == exact._replace(read=1)


def test_recall_by_step_is_cumulative():
    steps = [("x", "a"), ("a", "y"), ("b", "x")]
    assert recall_by_step(steps, {"a", "b"}, 5) == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert recall_by_step(steps, {"a", "b"}, 2) == [0.5, 0.5]
    assert recall_by_step([], {"a"}, 2) == [0.0, 0.0]
