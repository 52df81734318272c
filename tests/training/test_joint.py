"""The joint scorer: its loss, what it learns from, resumption, what it changes in a search."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.config_files import load_config
from cirag_jax.datasets import load
from cirag_jax.datasets.chains import sentence_texts
from cirag_jax.errors import UserError
from cirag_jax.models.cross_encoder import apply, load_cross_encoder
from cirag_jax.models.io.workdir import open_cross_encoder
from cirag_jax.retrieval.pairs import score_groups
from cirag_jax.training import aligner, cross_encoder, joint, link_head, optimizers, preemption
from cirag_jax.training.choices import Choice, choices_of
from cirag_jax.training.state import make_state
from tests import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax raises a float to the integer step count; our own code passes the strict rule."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def _config(trained, **changes):
    workdir, data, model = trained
    values = {
        "checkpoint": workdir, "data.dir": data, "model.spec": model, "dev.questions": 2,
        "choices_per_step": 4, "candidates": 4, "depth": 6, "num_steps": 6, "save_every": 0,
        "buckets": "(32, 64)", "max_length": 64, "chunk_choices": 2,
        "optimizer.learning_rate": 0.003, "mesh.data": 1, **changes,
    }  # fmt: skip
    given = [f"--config.{key}={value}" for key, value in values.items()]
    return load_config(str(_ROOT / "configs/joint.py"), given)


def _choices(trained, workdir, **changes):
    config = _config(trained, **changes)
    sets = [aligner.split_questions(one, config) for one in load.load_datasets(config.data)]
    return choices_of(config, workdir, sets)


@pytest.fixture(scope="module")
def choices(trained, tmp_path_factory):
    """What the searches for training questions chose from."""
    with jax.numpy_dtype_promotion("standard"):
        return _choices(trained, tmp_path_factory.mktemp("w"))[0]


def _by_hand(logit_K, gold_K):
    """The mean over gold texts of -log softmax among itself and all that are not gold."""
    others = [z for z, gold in zip(logit_K, gold_K, strict=True) if not gold]
    losses = []
    for z in [z for z, gold in zip(logit_K, gold_K, strict=True) if gold]:
        losses.append(np.log(np.exp([z, *others]).sum()) - z)
    return np.mean(losses)


def test_the_loss_of_lists_is_that_by_hand_and_what_is_not_there_counts_nothing():
    rng = np.random.default_rng(0)
    logit_GK = rng.normal(size=(4, 5)).astype(np.float32)
    gold_GK = np.array([[1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    sizes = [5, 4, 3, 0]  # The last list is not there at all.
    weight_GK = np.zeros((4, 5), np.float32)
    for group, size in enumerate(sizes[:3]):
        weight_GK[group, :size] = 1 / 3 / size

    def mean_loss(logit_GK):
        return cross_encoder.listwise(logit_GK, jnp.array(gold_GK), jnp.array(weight_GK))

    (loss, correct), gradient_GK = jax.value_and_grad(mean_loss, has_aux=True)(logit_GK)
    lists = [(logit_GK[g, :size], gold_GK[g, :size]) for g, size in enumerate(sizes[:3])]
    np.testing.assert_allclose(loss, np.mean([_by_hand(*one) for one in lists]), rtol=1e-6)
    right = [gold[logit.argmax()] for logit, gold in lists]
    np.testing.assert_allclose(correct, np.mean(right), rtol=1e-6)
    assert np.isfinite(gradient_GK).all() and (gradient_GK[weight_GK == 0] == 0).all()
    assert (gradient_GK[weight_GK > 0] != 0).all()


def test_every_choice_has_a_gold_candidate_that_its_chain_does_not_have(trained, choices):
    dataset = load.load_dataset(_config(trained).data)
    questions = {question.question: question for question in dataset.questions}
    texts = {p.id: set(sentence_texts(p)) for p in dataset.corpus.values()}
    assert len(choices) > 6 and len({choice.query for choice in choices}) > 6
    for choice in choices:
        (question,) = (q for text, q in questions.items() if choice.query.startswith(text))
        assert question.split == "train" and len(choice.texts) == len(choice.score_K) == 6
        assert (np.diff(choice.score_K) <= 0).all()
        assert 0 < choice.is_gold_K.sum() < 6
        gold = set().union(*(texts[id] for id in question.supporting or ()))
        for text, is_gold in zip(choice.texts, choice.is_gold_K, strict=True):
            assert is_gold == (text in gold) and text not in choice.query


def test_held_out_questions_are_measured_and_not_learnt_from(trained, tmp_path):
    train, dev = _choices(trained, tmp_path)
    assert dev and not {choice.query for choice in train} & {choice.query for choice in dev}
    train, dev = _choices(trained, tmp_path, **{"dev.questions": 0})
    assert train and not dev


def test_what_was_searched_stays_in_the_workdir(trained, tmp_path, monkeypatch):
    searched, explore = [], link_head.explore
    monkeypatch.setattr(link_head, "explore", lambda *a: (searched.append(1), explore(*a))[1])
    first = _choices(trained, tmp_path)
    again = _choices(trained, tmp_path)
    assert len(searched) == 1
    for one, other in zip(first[0] + first[1], again[0] + again[1], strict=True):
        assert one[:3] == other[:3]
        np.testing.assert_array_equal(one.score_K, other.score_K)
        np.testing.assert_array_equal(one.is_gold_K, other.is_gold_K)
    (file,) = tmp_path.glob("searched-*.npy")
    rows = np.load(file)
    for column in (0, 1):  # A question and a unit that are not there.
        damaged = rows.copy()
        damaged[0, column] = 10**6
        np.save(file, damaged)
        _choices(trained, tmp_path)
    assert len(searched) == 3
    _choices(trained, tmp_path, depth=3)
    assert len(searched) == 4


def _choice(num_gold, size):
    texts = tuple(f"text {place}" for place in range(size))
    return Choice(
        "id", "query", texts, np.arange(size)[::-1].astype(np.float32), np.arange(size) < num_gold
    )


@pytest.mark.parametrize(
    ("num_gold", "size", "gold", "others"), [(1, 9, 1, 3), (2, 3, 2, 1), (6, 9, 3, 1)]
)
def test_a_step_draws_others_beside_the_gold_candidates(trained, num_gold, size, gold, others):
    config, choice = _config(trained, choices_per_step=1), _choice(num_gold, size)
    drawn = [joint.choices_of_step([choice], step, config)[0] for step in range(40)]
    for one in drawn:
        assert (one.is_gold_K.sum(), (~one.is_gold_K).sum()) == (gold, others)
        places = [choice.texts.index(text) for text in one.texts]
        assert len(set(places)) == len(places)
        np.testing.assert_array_equal(one.is_gold_K, choice.is_gold_K[places])
        np.testing.assert_array_equal(one.score_K, choice.score_K[places])
    assert {text for one in drawn for text in one.texts} == set(choice.texts)
    again = joint.choices_of_step([choice], 7, config)[0]
    assert again.texts == drawn[7].texts


def _step(trained, choices, mesh):
    config = _config(trained)
    model = load_cross_encoder(config.model.spec, mesh=mesh, new_head=0, max_length=64)
    tx = optimizers.make_optimizer(config.optimizer, 6)
    state = make_state(model.state, tx, 0, mesh)
    drawn = joint.choices_of_step(choices, 0, config)
    batch = joint.make_batch(config, model, drawn, mesh)
    with jax.set_mesh(mesh):
        _, metrics = cross_encoder.train_step(model.graphdef, tx, state, batch, config, mesh)
    return model, drawn, {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def alone(trained, choices):
    """A step on one device."""
    with jax.numpy_dtype_promotion("standard"):
        return _step(trained, choices, sharding.make_mesh(devices=jax.devices()[:1]))


def test_a_step_has_the_loss_of_its_choices(trained, choices, alone):
    """Each alone, of a size of its own, whatever chunks they are packed into."""
    model, drawn, metrics = alone
    uneven = [drawn[0], Choice(*drawn[1][:2], *(x[:3] for x in drawn[1][2:])), *drawn[2:]]
    assert len({len(choice.texts) for choice in uneven}) == 2
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    for choices_of_batch, wanted in ((drawn, metrics["loss"]), (uneven, None)):
        batch = joint.make_batch(_config(trained), model, choices_of_batch, mesh)
        assert len(batch.chunks) == 2
        total = 0.0
        for tokens, types, lengths, label, weight in batch.chunks:
            mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
            logit = apply(model.graphdef, model.state, tokens, mask, types)
            total += cross_encoder.listwise(*(x.reshape(-1, 4) for x in (logit, label, weight)))[0]
        by_hand = []
        for choice in choices_of_batch:
            (logit_K,) = score_groups(model, None, [choice.query], [choice.texts])
            by_hand.append(_by_hand(logit_K, choice.is_gold_K))
        np.testing.assert_allclose(total, np.mean(by_hand), rtol=2e-6)
        if wanted is not None:
            np.testing.assert_allclose(wanted, np.mean(by_hand), rtol=2e-6)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_a_step_is_the_same_on_a_mesh(trained, choices, alone, shape):
    sharded = _step(trained, choices, sharding.make_mesh(*shape))[2]
    for name in ("loss", "accuracy", "gradient_norm"):
        np.testing.assert_allclose(sharded[name], alone[2][name], rtol=4e-6, err_msg=name)


def test_training_learns_and_measures_head_and_scorer_together(trained, tmp_path, one_device):
    result = joint.train_and_evaluate(_config(trained, num_steps=60), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert result["complete"] and 0 <= result["dev/accuracy"] <= 1


def test_what_is_measured_is_head_and_scorer_by_their_weight(trained, choices):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    model = load_cross_encoder(str(trained[2]), mesh=mesh, new_head=0, max_length=64)
    queries, texts = [c.query for c in choices], [c.texts for c in choices]
    logits = score_groups(model, None, queries, texts)

    def share(scores):
        return np.mean([c.is_gold_K[one.argmax()] for c, one in zip(choices, scores, strict=True)])

    by_head, by_model = share([c.score_K for c in choices]), share(logits)
    assert by_head != by_model
    for weight, wanted in ((0.0, by_head), (1e6, by_model)):
        config = _config(trained, weight=weight)
        measured = joint.make_evaluate(config, choices, model, mesh)(model.state)
        assert measured == {"dev/accuracy": wanted, "dev/head_accuracy": by_head}


def test_resumed_equals_uninterrupted_bit_for_bit(trained, tmp_path, one_device, monkeypatch):
    config = _config(trained, **{"model.dropout": 0.1})
    joint.train_and_evaluate(config, tmp_path / "whole")
    calls = iter([False] * 3 + [True] * 9)
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: next(calls))
    stopped = joint.train_and_evaluate(config, tmp_path / "cut")
    assert stopped["complete"] is False and stopped["step"] == 4
    monkeypatch.setattr(preemption, "out_of_time", lambda *_: False)
    assert joint.train_and_evaluate(config, tmp_path / "cut")["complete"]
    states = [open_cross_encoder(str(tmp_path / name))[0].state for name in ("cut", "whole")]
    for a, b in zip(*map(tiny.arrays, states), strict=True):
        np.testing.assert_array_equal(a, b)
    monkeypatch.setattr(joint, "choices_of", None)  # What takes long is not begun.
    with pytest.raises(UserError, match="was started with max_length=64, not 32"):
        joint.train_and_evaluate(_config(trained, max_length=32), tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": "null"}, r"config\.checkpoint is required"),
        ({"candidates": 1}, r"config\.candidates=1 must be at least 2"),
        ({"weight": -1}, r"config\.weight=-1"),
        ({"corpus": "some"}, r"config\.corpus"),
        ({"buckets": "(64, 32)"}, r"config\.buckets=\(64, 32\)"),
        ({"best_metric": "dev/mrr"}, "best_metric=dev/mrr is not measured here; .* dev/accuracy"),
    ],
)
def test_what_cannot_be_trained_is_said(trained, tmp_path, one_device, changes, message):
    with pytest.raises(UserError, match=message):
        joint.train_and_evaluate(_config(trained, **changes), tmp_path)


def test_a_model_without_a_head_cannot_be_learnt_from(trained, tmp_path):
    config = _config(trained, checkpoint=trained[2])
    with pytest.raises(UserError, match=r"has no link_head\.safetensors"):
        joint.train_and_evaluate(config, tmp_path)


def test_searches_that_teach_nothing_are_said(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(np, "isin", lambda ids, gold: np.zeros(len(ids), bool))
    with pytest.raises(UserError, match="no search of a training question came upon a gold"):
        _choices(trained, tmp_path)
