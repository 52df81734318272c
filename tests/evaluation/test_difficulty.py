"""The difficulty matrix: D_r, quartiles and correlations by hand, and the paper's tables."""

import math

import numpy as np
import pytest

from cirag_jax.evaluation import difficulty
from cirag_jax.evaluation.difficulty import (
    AGGREGATES,
    bin_questions,
    correlation,
    retrieval_difficulty,
)
from cirag_jax.evaluation.overlap import mean_of

BOOTSTRAP = (200, 0)  # samples, seed


def cells(graded, errors):
    return difficulty.matrix(graded, lambda rows: difficulty.error_rate(errors, rows, *BOOTSTRAP))


# ------------------------------------------------------------------------------ difficulty, D_r


@pytest.mark.parametrize(
    ("similarities", "how", "power", "wanted"),
    [
        ([0.8, 0.4], "min", -2.0, 0.6),
        ([0.8, 0.4], "mean", -2.0, 0.4),
        # (1 / 0.64 + 1 / 0.16) / 2 = 3.90625, and 1 / sqrt of it is 0.5060.
        ([0.8, 0.4], "power_mean", -2.0, 1 - 3.90625**-0.5),
        ([0.8, 0.4], "power_mean", -3.0, 1 - ((0.8**-3 + 0.4**-3) / 2) ** (-1 / 3)),
        ([0.8, 0.0], "power_mean", 2.0, 1 - math.sqrt(0.32)),
        ([0.8, 0.0], "power_mean", -2.0, 1.0),
        ([0.8, -0.2], "power_mean", -3.0, 1.0),
        ([0.8, -0.2], "min", -2.0, 1.2),
        ([0.5], "power_mean", -2.0, 0.5),
    ],
)
def test_retrieval_difficulty_by_aggregate(similarities, how, power, wanted):
    result = retrieval_difficulty(np.array(similarities), how, power)
    assert result == pytest.approx(wanted, abs=1e-12)


def test_retrieval_difficulty_rejects_bad_aggregates():
    for how, power in (("power_mean", 0.0), ("median", -2.0)):
        with pytest.raises(ValueError, match=how):
            retrieval_difficulty(np.array([0.5]), how, power)


def test_similarities_use_most_similar_text_of_item():
    vectors = {"q": [1.0, 0.0], "near": [0.8, 0.6], "far": [0.6, 0.8], "off": [0.0, 1.0]}

    def embed(texts, kind):
        assert kind == ("query" if list(texts) == ["q"] else "passage")
        return np.array([vectors[text] for text in texts], np.float32)

    (result,) = difficulty.similarities(["q"], [[("far", "near"), ("off",)]], embed)
    assert result == pytest.approx([0.8, 0.0])


# ------------------------------------------------------------------------------------- quartiles


def test_bin_questions_edges_match_hand_computed_values():
    # With eight questions, quartiles are at positions 1.75, 3.5 and 5.25, counted from 0. The order
    # of questions is irrelevant.
    graded = bin_questions([2] * 8, [0.8, 0.1, 0.7, 0.2, 0.6, 0.3, 0.5, 0.4])
    assert graded.edges[2] == pytest.approx([0.275, 0.45, 0.625])
    assert list(graded.bin_Q) == [3, 0, 3, 0, 2, 1, 2, 1]
    # A question equal to a quartile belongs to the bin below.
    graded = bin_questions([3] * 5, [0.125, 0.25, 0.375, 0.5, 0.625])
    assert list(graded.edges[3]) == [0.25, 0.375, 0.5]
    assert list(graded.bin_Q) == [0, 0, 1, 2, 3]


def test_bin_questions_separately_for_each_hop():
    graded = bin_questions([2, 2, 2, 2, 4, 4, 4, 4], [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9])
    assert graded.hops == [2, 4] and list(graded.bin_Q) == [0, 1, 2, 3] * 2


def test_bin_questions_without_quartiles_has_reason():
    graded = bin_questions([2, 2, 2, 3, 3, 3, 3], [0.1, 0.2, 0.3, 0.5, 0.5, 0.5, 0.5])
    assert graded.reasons == {
        2: "fewer than 4 questions (3)",
        3: "all 4 questions have the same D_r",
    }
    assert set(graded.bin_Q) == {-1} and not graded.edges
    result = cells(graded, mean_of([1.0] * 7))
    assert result[2] == [{"value": None, "reason": "fewer than 4 questions (3)"}] * 4
    assert [cell["reason"] for cell in result[3]] == ["all 4 questions have the same D_r"] * 4


def test_matrix_empty_cell_is_undefined():
    """Two cells are empty if four of five questions are equal to all three quartiles."""
    graded = bin_questions([2] * 5, [0.1, 0.1, 0.1, 0.1, 0.9])
    first, *empty, last = cells(graded, mean_of([1.0, 0.0, 0.0, 0.0, 1.0]))[2]
    assert (first["value"], first["num_questions"]) == (0.25, 4)
    assert empty == [{"value": None, "reason": "no question", "num_questions": 0}] * 2
    assert (last["value"], last["low"], last["high"], last["num_questions"]) == (1.0, 1.0, 1.0, 1)


def test_error_rate_ignores_questions_without_error():
    graded = bin_questions([2] * 4, [0.1, 0.2, 0.3, 0.4])
    errors = mean_of([1.0, None, 0.0, None])
    values = [(c["value"], c["num_questions"]) for c in cells(graded, errors)[2]]
    assert values == [(1.0, 1), (None, 0), (0.0, 1), (None, 0)]
    result = difficulty.correlations(graded, errors)
    assert result["bins"][2]["reason"] == "fewer than 3 points (2)"
    assert result["questions"]["all"]["num_points"] == 2


# ------------------------------------------------------------------------------------ the matrix


def synthetic(wrong, hops=(2, 3, 4, 5), per_cell=20):
    """Returns graded questions in random order; ``wrong(hop, column)`` answers per cell are wrong.

    Each number of hops has its own range of D_r, so quartiles over all questions would be
    different.
    """
    rows = [
        (hop, hop / 10 + (column * per_cell + i) / 1000, float(i < wrong(hop, column)))
        for hop in hops
        for column in range(4)
        for i in range(per_cell)
    ]
    order = np.random.default_rng(7).permutation(len(rows))
    found_hops, difficulties, errors = zip(*(rows[i] for i in order), strict=True)
    return bin_questions(found_hops, difficulties), mean_of(errors)


def test_matrix_recovers_known_error_rates():
    graded, errors = synthetic(lambda hop, column: 3 * (hop - 2) + 2 * column)
    result = cells(graded, errors)
    for hop in (2, 3, 4, 5):
        for column, cell in enumerate(result[hop]):
            rate = (3 * (hop - 2) + 2 * column) / 20
            assert (cell["value"], cell["num_questions"]) == (pytest.approx(rate), 20)
            assert cell["low"] <= rate <= cell["high"]
            if 0 < rate < 1:
                assert cell["low"] < rate < cell["high"]


def test_correlations_of_known_error_rates():
    """All correlations, also on the diagonal, are 1 if the error is linear in the column."""
    graded, errors = synthetic(lambda hop, column: 3 * (hop - 2) + 2 * column)
    result = difficulty.correlations(graded, errors)
    assert [result["bins"][hop]["value"] for hop in (2, 3, 4, 5)] == pytest.approx([1.0] * 4)
    assert result["mean"] == {"value": pytest.approx(1.0), "num_points": 4}
    assert result["diagonal"]["value"] == pytest.approx(1.0)
    assert result["diagonal"]["num_points"] == 4
    for name, own in (("3", graded.hops_Q == 3), ("all", graded.hops_Q > 0)):
        r = np.corrcoef(graded.difficulty_Q[own], errors.top_Q[own])[0, 1]
        assert result["questions"][name]["value"] == pytest.approx(r)
        assert result["questions"][name]["num_points"] == own.sum()
    assert result["hops"]["value"] == pytest.approx(np.corrcoef(graded.hops_Q, errors.top_Q)[0, 1])
    assert list(result["questions"]) == ["2", "3", "4", "5", "all"]


def test_correlations_diagonal_differs_from_rows_and_columns():
    graded, errors = synthetic(lambda hop, column: 10 if hop - 2 == column else 3 * column)
    result = difficulty.correlations(graded, errors)
    assert result["diagonal"]["reason"] == "the error is constant"
    assert result["bins"][2]["value"] != pytest.approx(1.0)


def test_error_difference_uses_shared_questions():
    graded = bin_questions([2] * 4, [0.1, 0.2, 0.3, 0.4])
    a, b = mean_of([1.0, 1.0, None, 1.0]), mean_of([0.0, 1.0, 0.0, None])
    everyone = np.arange(4)
    result = difficulty.error_difference(a, b, everyone, *BOOTSTRAP)
    assert (result["value"], result["num_questions"]) == (0.5, 2)
    assert result["low"] == 0.0 and result["high"] == 1.0
    none = difficulty.error_difference(a, b, graded.cell(2, 3), *BOOTSTRAP)
    assert none == {"value": None, "reason": "no question", "num_questions": 0}


def test_errors_by_cause_and_their_rates():
    errors = mean_of([1.0, 0.0, 1.0, 1.0, None, 1.0])
    whose = ["retriever", "retriever", "reader", "unanswered", "reader", "retriever"]
    result = difficulty.error_rates_by_cause(errors, whose, *BOOTSTRAP)
    counts = {name: (v["errors"], v["num_questions"], v["value"]) for name, v in result.items()}
    assert counts == {
        "retriever": (2.0, 3, pytest.approx(2 / 3)),
        "reader": (1.0, 1, 1.0),
        "unanswered": (1.0, 1, 1.0),
    }
    some = difficulty.errors_by_cause(errors, whose, np.array([0, 2, 4]))
    assert some == {"retriever": 1.0, "reader": 1.0, "unanswered": 0.0}


# ---------------------------------------------------------------------------------- correlations


def test_correlation_matches_hand_computed_values():
    """For four points, r is uniform on [-1, 1] under the null hypothesis, so p = 1 - abs(r)."""
    result = correlation([1, 2, 3, 4], [1, 3, 2, 4])
    width = 1.959964 / math.sqrt(4 - 3)
    assert result["value"] == pytest.approx(0.8) and result["p"] == pytest.approx(0.2)
    assert result["low"] == pytest.approx(math.tanh(math.atanh(0.8) - width))
    assert result["high"] == pytest.approx(math.tanh(math.atanh(0.8) + width))
    assert result["num_points"] == 4


def test_correlation_three_points_have_no_interval():
    result = correlation([1, 2, 3], [1, 3, 2])
    assert result["value"] == pytest.approx(0.5) and result["low"] is result["high"] is None


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        ([1, 2], [0, 1], "fewer than 3 points (2)"),
        ([1, 1, 1], [0, 1, 1], "the difficulty is constant"),
        ([1, 2, 3], [1, 1, 1], "the error is constant"),
    ],
)
def test_correlation_undefined_has_reason(x, y, reason):
    result = correlation(x, y)
    assert result == {"value": None, "reason": reason, "num_points": len(x)}


def test_mean_correlation_and_strongest_without_values():
    assert difficulty.mean_correlation([difficulty.undefined("x")])["value"] is None
    assert difficulty.strongest({"min": None, "mean": None}) == []
    assert difficulty.strongest({"min": 0.5, "mean": None, "power_mean": 0.5}) == [
        "min",
        "power_mean",
    ]


# ------------------------------------------------------------------------- the published figures

# Tables 1 and 3: o1-mini, 4o, 4o-mini.
TABLE_1 = {
    "Sports": ((0.504, 0.595, 0.976, 0.867), (0.463, 0.483, 0.963, 0.798),
               (0.646, 0.433, 0.769, 0.664)),
    "Health": ((0.967, 0.699, 0.950, 0.704), (0.671, 0.885, 0.874, 0.838),
               (0.806, 0.956, 0.802, 0.968)),
}  # fmt: skip
TABLE_3 = {
    "Sports": {"mean": (0.445, 0.394, 0.461), "power_mean": (0.534, 0.398, 0.498),
               "min": (0.736, 0.677, 0.628)},
    "Health": {"mean": (0.314, 0.412, 0.416), "power_mean": (0.903, 0.795, 0.808),
               "min": (0.830, 0.817, 0.883)},
}  # fmt: skip
# Error rates of Claude 4 Sonnet, Table 5: rows 2 to 5 hops, columns Q1 to Q4.
TABLE_5 = {
    "Sports": ((0.222, 0.333, 0.241, 0.407), (0.160, 0.388, 0.592, 0.460),
               (0.262, 0.310, 0.429, 0.535), (0.400, 0.529, 0.600, 0.457)),
    "Health": ((0.343, 0.299, 0.522, 0.716), (0.414, 0.491, 0.534, 0.724),
               (0.408, 0.531, 0.633, 0.680), (0.477, 0.591, 0.659, 0.795)),
    "Science": ((0.262, 0.350, 0.525, 0.689), (0.300, 0.450, 0.517, 0.656),
                (0.246, 0.526, 0.456, 0.509), (0.352, 0.453, 0.648, 0.537)),
}  # fmt: skip


def test_paper_table_3_is_mean_of_table_1():
    for domain, models in TABLE_1.items():
        for model, of_hops in enumerate(models):
            mean = difficulty.mean_correlation([{"value": r} for r in of_hops])["value"]
            assert mean == pytest.approx(TABLE_3[domain]["min"][model], abs=5.1e-4)


def test_paper_minimum_is_strongest_in_five_of_six_domains():
    """The paper states four of six, and that the power mean always beats the mean."""
    best = [
        difficulty.strongest({how: TABLE_3[domain][how][model] for how in AGGREGATES})
        for domain in TABLE_3
        for model in range(3)
    ]
    assert best == [["min"], ["min"], ["min"], ["power_mean"], ["min"], ["min"]]
    for domain in TABLE_3.values():
        assert all(p > m for p, m in zip(domain["power_mean"], domain["mean"], strict=True))


def test_paper_stated_leads_differ_from_its_table():
    """For Sports, the text says min leads mean by 29 % and power mean by 16 %."""
    mean = {how: np.mean(values) for how, values in TABLE_3["Sports"].items()}
    assert mean["min"] / mean["mean"] - 1 == pytest.approx(0.570, abs=5e-4)
    assert mean["min"] / mean["power_mean"] - 1 == pytest.approx(0.427, abs=5e-4)
    assert mean["min"] - mean["mean"] == pytest.approx(0.247, abs=5e-4)
    assert mean["min"] - mean["power_mean"] == pytest.approx(0.204, abs=5e-4)


@pytest.mark.parametrize(
    ("diagonal", "wanted"),
    [
        (tuple(TABLE_5["Sports"][i][i] for i in range(4)), 0.915),
        (tuple(TABLE_5["Health"][i][i] for i in range(4)), 1.000),
        (tuple(TABLE_5["Science"][i][i] for i in range(4)), 0.921),
        ((0.375, 0.440, 0.689, 0.542), 0.708),  # Table 9, entertainment
        ((0.431, 0.375, 0.488, 0.550), 0.807),  # Table 10, technology
    ],
)
def test_paper_diagonal_correlations(diagonal, wanted):
    """r is above 0.9 in the domains of the main text, but not in the domains of appendix A.5."""
    graded, errors = synthetic(lambda hop, column: 0, per_cell=4)
    errors = mean_of([diagonal[h - 2] for h in graded.hops_Q])
    result = difficulty.correlations(graded, errors)["diagonal"]
    assert result["value"] == pytest.approx(wanted, abs=5e-4)
