"""Runs the training or evaluation of a config, for launch/{train,evaluate,sweep}.py."""

import pathlib
from typing import Any

from cirag_jax.errors import UserError, check_choice
from cirag_jax.training import state as state_lib
from cirag_jax.types import Config


def run(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains or evaluates, depending on the config."""
    is_training = state_lib.is_training(config) or config.get("component") == "router"
    return (train if is_training else evaluate)(config, workdir)


def train(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains the component of a config."""
    if config.get("component") == "router":
        from cirag_jax.commands import train_router

        return train_router.train_and_evaluate(config, workdir)
    component = state_lib.component_of(config)
    if component == "grpo":
        from cirag_jax.commands import reinforce

        return reinforce.train_and_evaluate(config, workdir)
    if component == "cross_encoder":
        from cirag_jax.training import cross_encoder as trainer
    elif component == "aligner":
        from cirag_jax.training import aligner as trainer
    else:
        from cirag_jax.training import adapter as trainer
    return trainer.train_and_evaluate(config, workdir)


def evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs an evaluation; with ``config.follow``, on every checkpoint of a training run."""
    from cirag_jax.commands import (
        comparison,
        difficulty,
        evaluate_extraction,
        evaluate_integrator,
        evaluate_reader,
        evaluate_retrieval,
        follow,
        judge,
    )

    if "bootstrap_samples" not in config:
        raise UserError(
            "--config is not an evaluation config; choose configs/retrieval.py, "
            "integrator_eval.py, extractor_eval.py, reader_eval.py, comparison.py, difficulty.py "
            "or judge.py."
        )
    component = config.get("component")
    evaluations = {
        None: evaluate_retrieval.evaluate,
        "integrator": evaluate_integrator.evaluate,
        "extractor": evaluate_extraction.evaluate,
        "reader": evaluate_reader.evaluate,
        "answers": comparison.compare,
        "difficulty": difficulty.evaluate,
        "judge": judge.evaluate,
    }
    check_choice("config.component", component, evaluations)
    evaluation = evaluations[component]
    if config.get("follow"):
        return follow.follow(config, workdir, evaluation)
    return evaluation(config, workdir)
