import math

import ir_measures
import pytest
from ir_measures import AP, RR, R, nDCG

import cirag_jax
from cirag_jax.errors import UserError

RUN = {
    "q1": {"a": 0.1, "b": 0.9, "c": 0.5},
    "q2": {"a": 1, "d": 1, "c": 2},  # a and d are tied
    "q4": {"a": 1.0},
}
QRELS = {"q1": {"a": 1, "b": 1, "c": 0}, "q2": {"d": 2}, "q3": {"a": 1}, "q4": {"a": 0}}


def test_run_scores_equal_ir_measures():
    scores = cirag_jax.evaluate_retrieval(RUN, QRELS, [1, 2])
    assert (scores.pop("queries"), scores.pop("without_gold")) == (3, 1)
    judged = {"q1": {"a": 1, "b": 1, "c": 0}, "q2": {"d": 1}, "q3": {"a": 1}}
    run = {"q3": {"z": 0.0}, **{q: RUN[q] for q in ("q1", "q2")}}  # q3: nothing is found
    theirs = ir_measures.calc_aggregate([R @ 1, R @ 2, nDCG @ 1, nDCG @ 2, AP, RR], judged, run)
    names = {R @ 1: "recall@1", R @ 2: "recall@2", nDCG @ 1: "ndcg@1", nDCG @ 2: "ndcg@2",
             AP: "map", RR: "mrr"}  # fmt: skip
    assert {name: scores.pop(name) for name in names.values()} == pytest.approx(
        {names[measure]: value for measure, value in theirs.items()}
    )
    assert scores == {"complete@1": 0, "complete@2": pytest.approx(1 / 3)}


@pytest.mark.parametrize(
    ("run", "qrels", "ks", "message"),
    [
        ([], QRELS, [1], r"run must map queries to documents, not be \[\]"),
        ({1: {}}, QRELS, [1], "run: the id of a query must be a string, not 1"),
        ({"q": ["a"]}, QRELS, [1], r"run\['q'\] must map documents to numbers"),
        ({"q": {"a": math.nan}}, QRELS, [1], r"run\['q'\]\['a'\] must be a finite number, not nan"),
        (RUN, {"q": {"a": "1"}}, [1], r"qrels\['q'\]\['a'\] must be a finite number, not '1'"),
        (RUN, {"q": {5: 1}}, [1], r"qrels\['q'\]: the id of a document must be a string, not 5"),
        (RUN, {"q": {"a": 0}}, [1], "qrels has no query with a document of a relevance above 0"),
        (RUN, QRELS, [0], r"ks must be a list of whole numbers above 0, not \[0\]"),
        (RUN, QRELS, 5, "ks must be a list of whole numbers above 0, not 5"),
    ],
)
def test_run_bad_input_is_named(run, qrels, ks, message):
    with pytest.raises(UserError, match=message):
        cirag_jax.evaluate_retrieval(run, qrels, ks)
