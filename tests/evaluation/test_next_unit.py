import numpy as np
import pytest

from cirag_jax.datasets.chains import Chain, Unit
from cirag_jax.evaluation.next_unit import evaluate_next_unit, next_units

CHAIN = Chain("q", "q", (Unit("a", "p"), Unit("b", "p")), ((), (0,)), False)
POOL = [Unit(text, "p") for text in "abcd"]
SCORES = {"a": 0.5, "b": 0.1, "c": 0.9, "d": 0.3}


def _embed(texts, role):
    if role == "query":
        return np.ones((len(texts), 1), np.float32)
    return np.array([[SCORES[text]] for text in texts], np.float32)


def test_next_units_excludes_earlier_steps():
    first, second = next_units([CHAIN], [POOL], "triple")
    assert first.candidates == ("a", "b", "c", "d") and first.relevant == {"a"}
    assert second.candidates == ("b", "c", "d") and second.relevant == {"b"}
    assert second.query == "q\nknowledge triples: a."


def test_evaluate_next_unit_matches_hand_computed_values():
    metrics = evaluate_next_unit(next_units([CHAIN], [POOL], "triple"), _embed, ks=(1, 2))
    # In step 1, a is second of four; in step 2, b is last of three.
    assert metrics["step1/mrr"] == 0.5 and metrics["step2/mrr"] == pytest.approx(1 / 3)
    assert metrics["mrr"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert metrics["recall@1"] == 0.0 and metrics["recall@2"] == 0.5


def test_evaluate_next_unit_constant_scores_have_worst_rank():
    problems = next_units([CHAIN], [POOL], "triple")
    metrics = evaluate_next_unit(
        problems, lambda texts, role: np.ones((len(texts), 1), np.float32), ks=(1,)
    )
    assert metrics["step1/mrr"] == 0.25 and metrics["step2/mrr"] == pytest.approx(1 / 3)


def test_evaluate_next_unit_uses_best_relevant_unit():
    comparison = Chain("q", "q", CHAIN.steps, ((), ()), True)
    metrics = evaluate_next_unit(next_units([comparison], [POOL], "triple")[:1], _embed)
    assert metrics["mrr"] == 0.5


def test_next_units_repeated_text_is_asked_once():
    chain = Chain("q", "q", (Unit("a", "p"), Unit("a", "other"), Unit("b", "p")), ((),) * 3, False)
    problems = next_units([chain], [POOL], "passage")
    assert [problem.relevant for problem in problems] == [{"a", "b"}, {"b"}, {"b"}]
    ordered = Chain("q", "q", chain.steps[:2], ((), (0,)), False)
    (problem,) = next_units([ordered], [POOL], "passage")
    assert problem.relevant == {"a"}
    assert evaluate_next_unit([problem], _embed)["mrr"] == 0.5
