"""The smallest datasets that trainings accept."""

import dataclasses
import pathlib

import pytest

from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.training import aligner, aligner_batches
from cirag_jax.training.data import splits
from tests import tiny

_CONFIGS = pathlib.Path(__file__).resolve().parents[3] / "configs"


def dataset_of(count):
    """Returns a dataset of ``count`` training questions."""
    dataset = tiny.dataset()
    questions = tuple(
        dataclasses.replace(dataset.questions[i % 8], id=f"n{i}") for i in range(count)
    )
    return dataclasses.replace(dataset, questions=questions)


def aligner_chains(count, **changes):
    """Returns the number of chains that the aligner's default config trains on."""
    config = load_config(str(_CONFIGS / "aligner.py"))
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    aligner.check_config(config)
    at_least = aligner_batches.questions_per_step(config)
    questions = splits.split_questions(dataset_of(count), config, at_least)
    chains, _, _, _ = aligner_batches.training_chains([questions], config, pathlib.Path())
    return len(chains)


def test_aligner_needs_66_questions_by_default():
    assert aligner_chains(66) == 16
    message = (
        r"training needs at least 66 questions, 50 to hold out \(config\.dev\.questions\) and 16 "
        r"per step, but there are 65; add questions or set config\.dev\.questions to at most 49"
    )
    with pytest.raises(UserError, match=message):
        aligner_chains(65)
    assert aligner_chains(65, **{"dev.questions": 49}) == 16
    with pytest.raises(UserError, match="there are 9; add questions or lower config.batch_size"):
        aligner_chains(9)
    assert aligner_chains(9, **{"dev.questions": 1, "batch_size": 32}) == 8


def test_aligner_chains_fewer_than_a_step_are_refused(monkeypatch):
    chains_and_pools = aligner_batches.pools_lib.chains_and_pools
    monkeypatch.setattr(
        aligner_batches.pools_lib,
        "chains_and_pools",
        lambda *arguments: tuple(rows[:10] for rows in chains_and_pools(*arguments)),
    )
    message = (
        r"a step needs 16 training questions with a chain \(config\.batch_size=64 / "
        r"config\.prefixes_per_question=4\), but there are only 10; .* at most 40,"
    )
    with pytest.raises(UserError, match=message):
        aligner_chains(66)


def test_cross_encoder_needs_31_questions_by_default():
    config = load_config(str(_CONFIGS / "cross_encoder.py"))
    questions = dataset_of(31).questions
    assert len(splits.hold_out(questions, config)[0]) == 1
    with pytest.raises(UserError, match="needs at least 31 questions, .* at most 29"):
        splits.hold_out(questions[:30], config)


def test_split_questions_unknown_dev_split_is_named():
    config = load_config(str(_CONFIGS / "aligner.py"), ["--config.dev.split=valid"])
    with pytest.raises(UserError, match=r"config\.dev\.split=valid matches no question of tiny"):
        splits.split_questions(dataset_of(66), config)
    config = load_config(str(_CONFIGS / "aligner.py"), ["--config.data.fold=train"])
    with pytest.raises(UserError, match=r"config\.data\.fold=train matches .* values: null"):
        splits.split_questions(dataset_of(66), config)
