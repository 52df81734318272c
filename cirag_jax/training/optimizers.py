"""AdamW with clipping by global norm and a warm-up schedule."""

from typing import Any, Literal

import jax
import optax

from cirag_jax.errors import check_at_least, check_choice, check_positive
from cirag_jax.training.compact_adam import scale_by_compact_adam
from cirag_jax.types import Config, UnitInterval
from cirag_jax.validation import check_value

Schedule = Literal["linear", "cosine", "constant"]


def check_optimizer(config: Config) -> None:
    """Raises `UserError` for invalid settings of ``config.optimizer``."""
    check_positive(config, "optimizer.learning_rate")
    check_at_least(0, config, "optimizer.weight_decay", "optimizer.clip_norm")
    check_value("config.optimizer.warmup_ratio", config.optimizer.warmup_ratio, UnitInterval)
    check_choice("config.optimizer.state", config.optimizer.state, (None, "int8", "factored"))
    check_value("config.optimizer.schedule", config.optimizer.schedule, Schedule)


def make_schedule(config: Config, total_steps: int) -> optax.Schedule:
    """Returns a learning-rate schedule with a linear warm-up over ``warmup_ratio`` of the steps.

    After the warm-up, ``linear`` and ``cosine`` decay to zero at ``total_steps``; ``constant`` does
    not decay.
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
    """Returns AdamW with clipping, and without weight decay of biases and norm scales."""
    moments = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    if config.state is None:
        scale = optax.scale_by_adam(**moments)
    else:
        scale = scale_by_compact_adam(**moments, factored=config.state == "factored")
    adamw = optax.chain(
        scale,
        optax.add_decayed_weights(config.weight_decay, _decays),
        optax.scale_by_learning_rate(make_schedule(config, total_steps)),
    )
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, adamw)


def _decays(params: Any) -> Any:
    """Returns a tree that is True for kernels and embedding tables.

    Names decide, because the biases of stacked layers are matrices, too.
    """

    def is_matrix(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path)
        return "bias" not in name and "scale" not in name

    return jax.tree_util.tree_map_with_path(is_matrix, params)
