"""The rule that decides how many passages of a linked search to keep."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy

from cirag_jax.errors import UserError
from cirag_jax.models import link_head
from cirag_jax.models.link_head import StopRule
from cirag_jax.retrieval import stopping
from cirag_jax.retrieval.index import open_retriever
from cirag_jax.retrieval.linked import open_link_head
from cirag_jax.training import link_head as training
from cirag_jax.training.link_head import Ranking, Task, fit_stop, train_link_head
from configs import aligner, retrievers
from tests.retrieval.films import DATASET, PASSAGES, QUESTION, ROW, Words, make_head, make_index


def _log_odds(p):
    return np.log(p / (1 - p))


def test_stop_features_of_the_first_passages():
    likely = [{4: 0.5, 7: 0.5}, {7: 0.8, 9: 0.2}]
    x_KF = stopping.stop_features([4, 7, 9], likely, 3)
    assert x_KF.shape == (3, stopping.num_features(3)) and x_KF.dtype == np.float32
    rare = _log_odds(1e-4)
    of_4, of_7, of_9 = _log_odds(0.5), _log_odds(0.9), _log_odds(0.2)
    best = [_log_odds(0.5), _log_odds(0.8), rare]  # The third step had no candidates.
    expected = [
        [of_4, of_7, of_7, 0.0, 1, 0, 0, 0, 0, *best, 0.0, rare, rare],
        [of_7, of_9, of_9, 0.5, 0, 1, 0, 0, 0, *best, 0.0, _log_odds(0.8), rare],
        [of_9, rare, rare, 1.4, 0, 0, 1, 0, 0, *best, rare, _log_odds(0.2), rare],
    ]
    np.testing.assert_allclose(x_KF, expected, rtol=1e-6, atol=1e-6)
    # The likeliest later passage is not always the next one.
    assert stopping.stop_features([7, 9, 4], likely, 3)[0, 1:3].tolist() == [
        pytest.approx(of_9),
        pytest.approx(of_4),
    ]
    assert len(stopping.stop_features(range(20), [], 3)) == stopping.PLACES
    assert stopping.stop_features([], [], 3).shape == (0, stopping.num_features(3))


def test_fit_stop_rule_equals_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    random = np.random.default_rng(0)
    x_NF = random.normal(3, [1, 9, 0.1], (200, 3))
    is_gold_N = (x_NF - 3) @ [1, 0.1, -9] + random.normal(size=200) > 0
    rule = fit_stop([Ranking(x_NF[:70], is_gold_N[:70]), Ranking(x_NF[70:], is_gold_N[70:])])
    z_NF = (x_NF - x_NF.mean(0)) / (x_NF.std(0) + 1e-3)
    expected = linear_model.LogisticRegression(C=1.0, tol=1e-8).fit(z_NF, is_gold_N)
    np.testing.assert_allclose(
        rule.probability(x_NF), expected.predict_proba(z_NF)[:, 1], rtol=1e-4, atol=1e-6
    )


def _with_stop_rule(head, **weights):
    """Adds a stopping rule to ``head`` that uses only the passage's place."""
    weight_F = np.zeros(stopping.num_features(2), np.float32)
    weight_F[4:9] = [weights.get(name, -9.0) for name in ("one", "two", "three", "four", "five")]
    return dataclasses.replace(head, stop=StopRule(weight_F, np.zeros((), np.float32)))


def test_search_drops_unneeded_passages_but_keeps_the_first():
    head = _with_stop_rule(make_head(named=9.0, named_by_passages=5.0), two=9.0)
    row_QK, score_QK = make_index(head, steps=2, stop=0.6).search([QUESTION.question], 4)
    found = [PASSAGES[row].id for row in row_QK[0, :2]]
    assert found == ["Grey Harbour", "Anna Berg"]
    assert row_QK[0, 2:].tolist() == [-1, -1] and np.isneginf(score_QK[0, 2:]).all()
    row_QK, _ = make_index(head, steps=2, stop=0.0).search([QUESTION.question], 4)
    assert row_QK.min() >= 0
    with pytest.raises(
        UserError, match=r"link_head\.safetensors: the link head has no stopping rule"
    ):
        make_index(make_head(), stop=0.5)


def test_training_head_learns_to_stop_after_two(tmp_path):
    config = aligner.linked().head
    config.update({"epochs": 30, "batch_size": 8, "hidden": 8, "steps": 2})
    task = Task(make_index(steps=2), tuple(ROW), DATASET.questions[:5], DATASET.questions[5:9])
    with jax.numpy_dtype_promotion("standard"):  # Optax raises a float to an integer power.
        head, _ = train_link_head(config, [task], "sentence", seed=0)
    head.save(tmp_path)
    loaded = open_link_head(str(tmp_path))
    row_QK, _ = make_index(loaded, steps=2, stop=0.5).search([DATASET.questions[9].question], 6)
    assert row_QK[0].tolist() == [ROW["Wild Harbour"], ROW["Jon Berg"], -1, -1, -1, -1]


@pytest.mark.parametrize(("held_out", "num_rankings"), [(0, 1), (3, 1 + 3 * 4)])
def test_training_stop_rule_uses_only_its_split(monkeypatch, held_out, num_rankings):
    rankings = []
    monkeypatch.setattr(
        training, "fit_stop", lambda found: (rankings.extend(found), fit_stop(found))[1]
    )
    config = aligner.linked().head
    config.update({"epochs": 1, "batch_size": 8, "hidden": 8, "steps": 2, "rounds": 2})
    config.held_out = held_out
    task = Task(make_index(steps=2), tuple(ROW), DATASET.questions[:1], DATASET.questions[1:5])
    with jax.numpy_dtype_promotion("standard"):
        train_link_head(config, [task], "sentence", seed=0)
    assert len(rankings) == num_rankings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_bias": None}, "tensor stop_bias is missing or"),
        ({"stop_weight_F": np.zeros(13)}, "tensor stop_weight_F is missing or has an unexpected"),
        (
            {"stop_weight_F": np.zeros(7, np.float32)},
            "the stopping rule needs 7 features, but this",
        ),
        ({"stop_bias": np.full((), np.nan, np.float32)}, "gives numbers that are not finite"),
    ],
)
def test_open_link_head_damaged_rule_is_refused(tmp_path, changes, message):
    _with_stop_rule(make_head()).save(tmp_path)
    file = tmp_path / link_head.FILE
    with safetensors.safe_open(file, framework="numpy") as opened:
        had = opened.metadata()
    tensors = safetensors.numpy.load_file(file) | changes
    tensors = {name: array for name, array in tensors.items() if array is not None}
    safetensors.numpy.save_file(tensors, file, metadata=had)
    with pytest.raises(UserError, match=message) as refused:
        open_link_head(str(tmp_path))
    assert str(file) in str(refused.value)


def test_open_retriever_uses_the_stop_threshold(tmp_path):
    encoder = Words()
    encoder.identity = {"model": str(tmp_path)}
    _with_stop_rule(make_head(named=9.0)).save(tmp_path)
    config = retrievers.retriever()
    config.kind, config.stop = "linked", 0.6
    row_QK, _ = open_retriever(config, PASSAGES, encoder).search([QUESTION.question], 3)
    assert row_QK[0].tolist() == [ROW["Grey Harbour"], -1, -1]
    config.stop = 1.5
    with pytest.raises(UserError, match=r"config\.retriever\.stop=1\.5 must lie between 0 and 1"):
        open_retriever(config, PASSAGES, encoder)
    config.kind, config.stop = "bm25", 0.5
    with pytest.raises(UserError, match=r"retriever\.stop needs config\.retriever\.kind=linked"):
        open_retriever(config, PASSAGES, None)
