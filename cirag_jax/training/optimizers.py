"""Optimisers by config: AdamW, a warm-up schedule, clipping by global norm."""

from typing import Any

import jax
import optax

from cirag_jax.errors import UserError, check_at_least, check_choice, check_positive
from cirag_jax.types import Config

SCHEDULES = ("linear", "cosine", "constant")


def check_optimizer(config: Config) -> None:
    """Raises UserError where a number or the schedule of ``config.optimizer`` cannot be.

    Args:
      config: of the whole training.
    """
    check_positive(config, "optimizer.learning_rate")
    check_at_least(0, config, "optimizer.weight_decay", "optimizer.clip_norm")
    ratio = config.optimizer.warmup_ratio
    if not 0.0 <= ratio <= 1.0:
        raise UserError(f"config.optimizer.warmup_ratio={ratio} must be in [0, 1].")
    check_choice("config.optimizer.schedule", config.optimizer.schedule, SCHEDULES)


def make_schedule(config: Config, total_steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up over ``warmup_ratio`` of the steps, then ``schedule``.

    ``linear`` and ``cosine`` decay to zero at ``total_steps``; ``constant`` stays. It must be one
    of `SCHEDULES`, see `check_optimizer`.
    """
    warmup = int(round(config.warmup_ratio * total_steps))
    peak = config.learning_rate
    rest = max(total_steps - warmup, 1)
    decays = {
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "constant": optax.constant_schedule(peak),
    }
    if warmup == 0:
        return decays[config.schedule]
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup), decays[config.schedule]], [warmup]
    )


def make_optimizer(config: Config, total_steps: int) -> optax.GradientTransformation:
    """AdamW after clipping; biases and norms (arrays of one dimension per layer) do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.adamw(
            make_schedule(config, total_steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=_decays,
        ),
    )


def _decays(params: Any) -> Any:
    """True at kernels and embedding tables, by name: stacked layers give biases a second axis."""

    def is_matrix(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path)
        return "bias" not in name and "scale" not in name

    return jax.tree_util.tree_map_with_path(is_matrix, params)
