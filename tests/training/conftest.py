"""What the tests of trainings share."""

import contextlib
import pathlib

import jax
import pytest

from cirag_jax import sharding
from cirag_jax.config_files import load_config
from cirag_jax.methods.cirag import prompts
from cirag_jax.training import aligner, joint
from tests import tiny
from tests.distill import by_hand
from tests.training.students import base_folder, write

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture()
def short(monkeypatch):
    """A short instruction makes short examples. Optax raises a float to the integer step."""
    monkeypatch.setattr(prompts, "_INSTRUCTION", "Collect facts.")
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def model_and_data(tmp_path_factory):
    """Folders of a tiny encoder and of a tiny dataset."""
    root = tmp_path_factory.mktemp("tiny")
    return tiny.model_folder(root / "model"), tiny.dataset_folder(root / "data")


@pytest.fixture(scope="module")
def trained(model_and_data, tmp_path_factory):
    """A workdir of an aligner with a head, and a folder of data."""
    model, data = model_and_data
    values = {
        "model.spec": model, "data.dir": data, "dev.questions": 2, "batch_size": 8,
        "num_negatives": 2, "num_steps": 1, "eval_every": 0, "head.steps": 3, "head.rounds": 1,
        "head.epochs": 1, "mesh.data": 1,
    }  # fmt: skip
    given = [f"--config.{key}={value}" for key, value in values.items()]
    workdir = tmp_path_factory.mktemp("aligner")
    with _alone():
        config = load_config(f"{_ROOT}/configs/aligner.py:linked", given)
        aligner.train_and_evaluate(config, workdir)
    return workdir, data, model


@pytest.fixture(scope="module")
def scorer(trained, tmp_path_factory):
    """A workdir of a joint scorer, which has learnt from that aligner's searches."""
    workdir, data, model = trained
    values = {
        "checkpoint": workdir, "data.dir": data, "model.spec": model, "dev.questions": 3,
        "choices_per_step": 4, "candidates": 4, "depth": 6, "num_steps": 20, "buckets": "(32, 64)",
        "max_length": 64, "optimizer.learning_rate": 0.003, "mesh.data": 1,
    }  # fmt: skip
    given = [f"--config.{key}={value}" for key, value in values.items()]
    folder = tmp_path_factory.mktemp("scorer")
    with _alone():
        joint.train_and_evaluate(load_config(f"{_ROOT}/configs/joint.py", given), folder)
    return folder


@contextlib.contextmanager
def _alone():
    """Trains on one device, in a fixture that several tests share (else: `one_device`)."""
    make_mesh, one = sharding.make_mesh, jax.devices()[:1]
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", lambda *sizes: make_mesh(*sizes, devices=one))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base, and twelve trajectories of one to three rounds."""
    root = tmp_path_factory.mktemp("integrator")
    made = [by_hand.trajectory(number, 1 + number % 3) for number in range(12)]
    return base_folder(root / "base"), write(root / "t", made)
