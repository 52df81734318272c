"""The training step of an aligner: loss, gradient and update of a batch."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models.pooling import embedding_size
from cirag_jax.training import gradient_cache, optimizers
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import pools as pools_lib
from cirag_jax.types import Config


def make_optimizer(config: Config, total_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of the parameters that ``config.model.train`` selects."""
    tx = optimizers.make_optimizer(config.optimizer, total_steps)
    if config.model.train == "all":
        return tx

    def labels(params: Any) -> Any:
        def label(path: Any, _: Any) -> str:
            is_task = "_task_" in jax.tree_util.keystr(path)
            return "train" if is_task == (config.model.train == "tasks") else "keep"

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.multi_transform({"train": tx, "keep": optax.set_to_zero()}, labels)


def train_step(
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    state: state_lib.TrainState,
    batch: pools_lib.Batch,
    config: Config,
    mesh: jax.sharding.Mesh,
    run: Callable[..., Any] = operator.call,
    *,
    frozen: nnx.State | None = None,
) -> tuple[state_lib.TrainState, dict[str, jax.Array]]:
    """Runs one optimizer step on a global batch; call it under ``jax.set_mesh(mesh)``.

    Donates ``state``. If a batch is one chunk whose activations may be stored, the step is one
    program, so gradients are not passed between programs. ``run`` calls the compiled functions, see
    `rehearsal`. ``frozen`` are the parameters that are not trained.

    Returns:
      The new state, and metrics as device scalars: loss, accuracy, mean score of the positives, and
      norms of gradient, update and parameters.
    """
    params: Any = state.params
    limit = math.inf if config.activations_gib is None else config.activations_gib * 2**30
    settings = _StepSettings(
        temperature=config.temperature,
        width=embedding_size(graphdef, *filter(None, (params, frozen))),
        dtype=config.model.dtype,
        has_dropout=config.model.dropout > 0 or config.model.lora.dropout > 0,
        keep_bytes=limit if config.keep_activations else 0.0,
    )
    batch = place_batch(batch, mesh)
    key = state.key if settings.has_dropout else None
    if gradient_cache.is_one_program(
        graphdef, params, batch, frozen, settings.width, key, settings.keep_bytes
    ):
        settings = settings._replace(keep_bytes=math.inf)
        return run(compiled_step(mesh.size > 1), graphdef, tx, settings, state, batch, frozen)
    return _step(graphdef, tx, settings, state, batch, frozen, run)


class _StepSettings(NamedTuple):
    """Settings of a step; see `gradient_cache.loss_and_gradient`."""

    temperature: float
    width: int
    dtype: str
    has_dropout: bool
    keep_bytes: float


def _step(graphdef, tx, settings, state, batch, frozen, run=operator.call):
    key = run(jax.random.fold_in, state.key, state.step) if settings.has_dropout else None
    loss, metrics, gradient = gradient_cache.loss_and_gradient(
        graphdef,
        state.params,
        batch,
        frozen,
        temperature=settings.temperature,
        width=settings.width,
        dtype=settings.dtype,
        dropout_key=key,
        keep_bytes=settings.keep_bytes,
        run=run,
    )
    state, norms = run(_apply_gradient, tx, state, gradient, loss)
    return state, {"loss": loss, **metrics, **norms}


@functools.cache
def compiled_step(exchanges: bool) -> Any:
    """Returns `_step` as one program; ``exchanges`` is whether several devices run it."""
    # XLA overlaps exchanges with other work only with this scheduler, which is off by default.
    has_option = exchanges and jax.default_backend() != "tpu"
    options = {"xla_gpu_enable_latency_hiding_scheduler": True} if has_option else None
    return jax.jit(_step, static_argnums=(0, 1, 2), donate_argnums=3, compiler_options=options)


_apply_gradient = jax.jit(state_lib.apply_gradient, static_argnums=0, donate_argnums=1)


def place_batch(batch: pools_lib.Batch, mesh: jax.sharding.Mesh) -> pools_lib.Batch:
    """Places a host batch (equal on all processes) on the mesh; rows of chunks are sharded."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return pools_lib.Batch(
        state_lib.place_rows(batch.chunks, mesh),
        sharding.place(batch.positive_B, replicated),
        sharding.place(batch.count_BC, replicated),
        sharding.place(batch.weight_B, replicated),
    )
