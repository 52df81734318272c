import pytest

from cirag_jax.evaluation.recall import recall_at, recall_by_step


def test_recall_is_the_share_of_gold_in_the_first_k():
    ranked = ["a", "x", "b", "y"]
    assert [recall_at(ranked, {"a", "b"}, k) for k in (1, 2, 3, 9)] == [0.5, 0.5, 1.0, 1.0]
    assert recall_at([], {"a"}, 5) == 0.0
    assert recall_at(ranked, ["a", "a"], 1) == 1.0
    with pytest.raises(ValueError, match="at least one gold"):
        recall_at(ranked, [], 1)


def test_a_gold_item_may_be_found_elsewhere():
    elsewhere = {"a": [{"a", "x"}, {"a", "y"}], "b": [{"b"}]}
    ranked = ["x", "b", "y"]
    assert [recall_at(ranked, {"a", "b"}, k, elsewhere) for k in (1, 2, 3)] == [0.0, 0.5, 1.0]
    assert recall_at(["a", "x", "y"], {"a", "b"}, 3, elsewhere) == 0.5
    assert recall_by_step([("x",), ("y",)], {"a"}, 2, elsewhere) == [0.0, 1.0]


def test_recall_by_step_counts_all_that_was_found_so_far():
    steps = [("x", "a"), ("a", "y"), ("b", "x")]
    assert recall_by_step(steps, {"a", "b"}, 5) == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert recall_by_step(steps, {"a", "b"}, 2) == [0.5, 0.5]
    assert recall_by_step([], {"a"}, 2) == [0.0, 0.0]
