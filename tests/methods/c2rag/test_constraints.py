"""C2RAG's sufficiency check: lemmas on N_eff, the boundary, and the released code's rule."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cirag_jax.methods.c2rag.constraints import effective_number, judge, shares
from cirag_jax.methods.c2rag.settings import RULES, C2ragConfig

SCORES = st.lists(st.floats(-50, 50), min_size=1, max_size=9)


@given(SCORES, st.sampled_from(RULES))
def test_effective_number_is_between_one_and_n(scores, rule):
    """Lemmas A.1 and A.2 of the paper."""
    p_N = shares(scores, rule)
    assert p_N.shape == (len(scores),) and np.all(p_N >= 0) and p_N.sum() == pytest.approx(1)
    n_eff = effective_number(p_N)
    assert 1 - 1e-9 <= n_eff <= len(scores) + 1e-9
    assert p_N.max() >= 1 / n_eff - 1e-9


@given(SCORES, st.sampled_from(RULES), st.floats(1, 9))
def test_effective_number_accepted_implies_dominant_candidate(scores, rule, gamma):
    """Proposition A.3 of the paper."""
    config = C2ragConfig(neff_rule=rule, gamma=gamma, num_structural=99)
    if judge(scores, config).suffices:
        assert shares(scores, rule).max() >= 1 / gamma - 1e-9


@given(st.integers(1, 9), st.floats(-9, 9), st.sampled_from(RULES))
def test_effective_number_equal_scores_give_n(n, score, rule):
    assert effective_number(shares([score] * n, rule)) == pytest.approx(n)


def test_effective_number_point_mass_and_empty_pool():
    assert effective_number([0.0, 1.0, 0.0]) == 1.0 and effective_number([]) == math.inf
    assert judge([], C2ragConfig()) == (False, None)
    assert not judge([], C2ragConfig(sufficiency="off")).suffices
    assert judge([-3.0], C2ragConfig()) == (True, 1.0)


def test_effective_number_case_study_weights():
    """Figure 5 has 0.65 for the first weights: the sum of squares, not its inverse N_eff."""
    assert effective_number([0.79, 0.12, 0.09]) == pytest.approx(1.547, abs=1e-3)
    assert effective_number([0.35, 0.33, 0.32]) == pytest.approx(2.996, abs=1e-3)


@given(st.floats(-9, 9), st.floats(0.01, 20), st.floats(0.0, 1.0))
def test_check_three_candidates_suffice_below_0_268(low, spread, place):
    """Three candidates suffice if (z2 - z3) / (z1 - z3) < 2 - sqrt 3, with gamma = 1.5."""
    boundary = 2 - math.sqrt(3)
    assume(abs(place - boundary) > 1e-4)
    scores = [low + spread, low + place * spread, low]
    assert judge(scores, C2ragConfig()).suffices == (place < boundary)


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=2, unique=True))
def test_check_two_candidates_always_suffice(scores):
    assert judge(scores, C2ragConfig(num_structural=2)).suffices
    assume(0 not in scores)  # A score of 0 gets no weight next to a positive score.
    released = C2ragConfig(neff_rule="shift_if_nonpositive", gamma=1.0)
    assert not judge(scores, released).suffices  # This gamma accepts only one candidate.
    assert judge(scores[:1], released).suffices


@pytest.mark.parametrize(
    ("scores", "released", "paper"),
    [
        ([5, 4], 1.97561, 1.000002),
        ([5, 1.34], 1.50008, 1.0),
        ([5, 1.33], 1.49685, 1.0),
        ([8, 6, 5], 2.888, 1.60001),
        ([8, 1, 0.5], 1.38314, 1.13274),
        ([3, -2, -4], 1.52830, 1.52830),
        ([0, 0, 0], 3, 3),
        ([0.79, 0.12, 0.09], 1.54655, 1.08556),
    ],
)
def test_shares_released_rule_shifts_nonpositive_scores(scores, released, paper):
    n_eff = effective_number(shares(scores, "shift_if_nonpositive"))
    assert n_eff == pytest.approx(released, abs=2e-5)
    assert effective_number(shares(scores, "always_shift")) == pytest.approx(paper, abs=2e-5)


def test_check_floor_at_zero_ignores_negative_scores():
    settings = {"neff_rule": "shift_if_nonpositive", "gamma": 1.5}
    n_eff = judge([4.0, -9.0, -9.0], C2ragConfig(**settings, floor_at_zero=True)).n_eff
    assert n_eff == pytest.approx(1.0, abs=1e-3)
    assert judge([-4.0, -9.0], C2ragConfig(**settings, floor_at_zero=True)).n_eff == 2.0
    n_eff = judge([-4.0, -9.0], C2ragConfig(**settings)).n_eff
    assert n_eff == pytest.approx(1.0, abs=1e-3)
