"""Fixtures for the tests of trainings."""

import jax
import pytest

from cirag_jax.methods.cirag import prompts
from tests import tiny
from tests.distill import by_hand
from tests.training.students import base_folder, write


@pytest.fixture()
def short(monkeypatch):
    """Shortens the instruction. Optax needs standard promotion for the power of a float."""
    monkeypatch.setattr(prompts, "_INSTRUCTION", "Collect facts.")
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def model_and_data(tmp_path_factory):
    """Folders of a tiny encoder and of a tiny dataset."""
    root = tmp_path_factory.mktemp("tiny")
    return tiny.model_folder(root / "model"), tiny.dataset_folder(root / "data")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a tiny base and of twelve trajectories with one to three rounds."""
    root = tmp_path_factory.mktemp("integrator")
    made = [by_hand.trajectory(number, 1 + number % 3) for number in range(12)]
    return base_folder(root / "base"), write(root / "t", made)
