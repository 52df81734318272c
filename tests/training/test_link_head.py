"""Training of the link head after the aligner."""

import dataclasses

import numpy as np
import pytest

from cirag_jax.commands import evaluate_retrieval
from cirag_jax.config_files import load_config
from cirag_jax.datasets import load
from cirag_jax.errors import UserError
from cirag_jax.models import link_head as link_head_model
from cirag_jax.models.io.workdir import training_ids
from cirag_jax.retrieval import stopping
from cirag_jax.retrieval.candidates import FEATURES
from cirag_jax.retrieval.encoders import FlaxEncoder
from cirag_jax.training import aligner, link_head
from configs import retrieval
from tests.training.aligners import config_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


@pytest.mark.parametrize("rate", [1e38, float("nan")])
def test_fit_head_that_is_not_finite_is_refused(rate):
    features = np.random.default_rng(0).normal(size=(9, len(FEATURES))).astype(np.float32)
    states = [link_head.State(0, features, np.arange(9) == 3)] * 20
    settings = load_config("configs/aligner.py").head
    settings.learning_rate = rate
    with pytest.raises(UserError, match="no loss of the link head is finite in epoch"):
        link_head.fit_head(states, settings, 0)


def test_train_head_finished_is_kept_changed_is_retrained(
    model_and_data, tmp_path, one_device, monkeypatch
):
    calls, train_head = [], link_head.train_link_head
    monkeypatch.setattr(
        link_head, "train_link_head", lambda *args: (calls.append(1), train_head(*args))[1]
    )
    changes = {"num_steps": 1, "eval_every": 0, "data.units": "sentence", "head.rounds": 1}

    def train(**more):
        config = config_of(model_and_data, **changes, **{"head.epochs": 2, **more})
        result = aligner.train_and_evaluate(config, tmp_path)
        return {name: value for name, value in result.items() if name != "seconds"}

    stopped = train(stop_after_minutes=1e-9)  # There is only one step, and no head.
    assert not stopped["complete"] and not calls
    assert not list(tmp_path.glob("*link_head*"))
    first = train()
    assert first["complete"] and first["head_loss"] > 0 and calls == [1]
    file = tmp_path / "link_head.safetensors"
    before = file.read_bytes()
    assert train() == first and calls == [1]
    assert file.read_bytes() == before
    assert train(**{"head.epochs": 3}) != first and calls == [1, 1]
    file.write_bytes(before[:40])
    assert train() == first and calls == [1, 1, 1]
    monkeypatch.setattr(stopping, "num_features", lambda steps: 99)  # Imitates another version.
    train()
    assert calls == [1, 1, 1, 1]


def test_train_head_several_processes_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(link_head.jax, "process_count", lambda: 2)
    assert link_head.train_head(None, tmp_path, (), 0.0) == {}
    assert not list(tmp_path.iterdir())


def test_train_head_embeddings_are_reused(model_and_data, tmp_path, one_device, monkeypatch):
    monkeypatch.setenv("CIRAG_JAX_CACHE", str(tmp_path / "cache"))
    embedded, encode = [], FlaxEncoder.encode

    def counting(self, texts, kind="passage", progress=None):
        embedded.append(kind)
        return encode(self, texts, kind, progress)

    monkeypatch.setattr(FlaxEncoder, "encode", counting)
    changes = {"num_steps": 1, "eval_every": 0, "data.units": "sentence", "head.rounds": 1}
    config, workdir = config_of(model_and_data, **changes, **{"head.epochs": 1}), tmp_path / "w"
    aligner.train_and_evaluate(config, workdir)
    assert {*embedded} == {"passage", "query"}

    (workdir / "link_head.safetensors").unlink()
    embedded.clear()
    aligner.train_and_evaluate(config, workdir)
    assert {*embedded} == {"query"}

    eval_config = retrieval.get_config()
    eval_config.checkpoint, eval_config.data.dir, eval_config.data.split = (
        str(workdir),
        str(model_and_data[1]),
        "dev",
    )
    eval_config.systems, eval_config.bootstrap_samples = ("linked",), 10
    eval_config.query_max_length, eval_config.unit_max_length = (
        config.query_max_length,
        config.unit_max_length,
    )
    embedded.clear()
    evaluate_retrieval.evaluate(eval_config, tmp_path)
    assert {*embedded} == {"query"}


def test_train_head_ignores_dev_questions_of_other_split(
    model_and_data, tmp_path, one_device, monkeypatch
):
    held_out, train_head = [], link_head.train_link_head
    monkeypatch.setattr(
        link_head,
        "train_link_head",
        lambda head, *rest: (held_out.append(head.held_out), train_head(head, *rest))[1],
    )
    changes = {"num_steps": 1, "eval_every": 0, "data.units": "sentence", "head.rounds": 1}
    num_trained_on = []
    for name, dev in (("dev", "dev"), ("held_out", None)):
        config = config_of(model_and_data, **changes, **{"head.epochs": 1})
        config.dev.split, config.dev.questions = dev, 2
        aligner.train_and_evaluate(config, tmp_path / name)
        num_trained_on.append(len(training_ids(str(tmp_path / name))))
    assert held_out == [0, 3]
    # The two held-out questions count as training questions, because the head learns from them.
    train = load.select_questions(load.load_dataset(config.data), config.data)
    assert num_trained_on == [len(train), len(train)]
    head = link_head_model.load_link_head(tmp_path / "held_out", FEATURES)
    dataclasses.replace(head, record={"taught": [1]}).save(tmp_path / "held_out")
    with pytest.raises(UserError, match=r"taught of link_head\.safetensors must be a list of ids"):
        training_ids(str(tmp_path / "held_out"))


def test_train_head_by_reinforcement(model_and_data, tmp_path, one_device):
    changes = {"num_steps": 1, "eval_every": 0, "data.units": "sentence", "head.rounds": 1}
    more = {"head.epochs": 2, "head.held_out": 0, "head.updates": 2, "head.searches": 2}
    result = aligner.train_and_evaluate(config_of(model_and_data, **changes, **more), tmp_path)
    assert result["complete"] and 0 <= result["first_reward"] <= 1 >= result["last_reward"]
    assert (tmp_path / "link_head.safetensors").is_file()
