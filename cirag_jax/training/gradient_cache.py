"""Exact gradients of a batch-wide loss, computed one chunk of rows at a time.

First, all texts of the batch are embedded chunk by chunk into one table. Next, the loss and the
gradient of the table are computed. Finally, each chunk is back-propagated from its rows of the
table's gradient. The result is the gradient of the full batch, including in-batch negatives, with
the memory of one chunk (Gao et al., 2021, "Scaling deep contrastive learning batch size under
memory limited setup").

The forward pass of a chunk runs twice, unless its activations fit into memory. If the batch is one
chunk that fits, the trainer compiles all parts into one program (`is_one_program`).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from cirag_jax import sharding
from cirag_jax.models import precision
from cirag_jax.models.pooling import embed
from cirag_jax.training.contrastive import contrastive_loss
from cirag_jax.training.data.pools import Batch, Chunk

Params = Any
Metrics = dict[str, jax.Array]


def loss_and_gradient(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: Batch,
    frozen: Params | None = None,
    *,
    temperature: float,
    width: int,
    dtype: str = "float32",
    dropout_key: jax.Array | None = None,
    keep_bytes: float = 0.0,
    run: Callable[..., Any] = operator.call,
) -> tuple[jax.Array, Metrics, Params]:
    """Returns the loss, metrics and float32 gradient of a complete batch on the mesh.

    The gradient is kept per shard (`sharding.zeros_per_shard`); `state.apply_gradient` sums it.
    ``frozen`` are the parameters that are not trained; those that are split over fsdp stay split
    (`sharding.gather_parameter`). ``width`` is the embedding size D. ``params`` are rounded to
    ``dtype`` once. Each device may store ``keep_bytes`` of activations. ``run`` calls the compiled
    functions, see `rehearsal`; with `is_one_program`, a caller can compile this function instead.
    """
    params = sharding.gather_fsdp(precision.round_weights(params, dtype, run), run)
    params = params, nnx.State({}) if frozen is None else frozen
    if isinstance(batch.count_BC, Tracer):
        zeros_ND = jnp.zeros(_table_shape(batch, width), jnp.float32)
        table_ND = sharding.constrain(zeros_ND, None, None)
    else:  # An array without a sharding would cause a second compilation.
        zeros_ND = np.zeros(_table_shape(batch, width), np.float32)
        table_ND = sharding.place(zeros_ND, batch.count_BC.sharding)
    keys = [
        None if dropout_key is None else run(jax.random.fold_in, dropout_key, index)
        for index in range(len(batch.chunks))
    ]
    backward = []
    for chunk, key in zip(batch.chunks, keys, strict=True):
        pull, inputs = None, (graphdef, params, table_ND, chunk, key)
        size = _stored_bytes(*inputs) if 0 < keep_bytes < math.inf else 0
        if keep_bytes > 0 and size <= keep_bytes:
            keep_bytes -= size
            table_ND, pull = run(_embed_and_keep, *inputs)
        else:
            table_ND = run(_embed, *inputs)
        backward.append(pull)
    loss, metrics, gradient_ND = run(
        _table_loss, table_ND, batch.positive_B, batch.count_BC, batch.weight_B, temperature
    )
    gradient = run(_zeros, params[0])
    for index, (chunk, key) in enumerate(zip(batch.chunks, keys, strict=True)):
        pull, backward[index] = backward[index], None  # Frees the activations.
        if pull is not None:
            gradient = run(_pull_kept, pull, params, gradient, gradient_ND, chunk.row_B)
        else:
            gradient = run(_pull, graphdef, params, gradient, gradient_ND, chunk, key)
    return loss, metrics, gradient


def is_one_program(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: Batch,
    frozen: Params | None,
    width: int,
    key: jax.Array | None,
    keep_bytes: float,
) -> bool:
    """Returns whether a batch is one chunk, whose activations fit ``keep_bytes`` per device.

    `loss_and_gradient` can then be traced into one program, with ``keep_bytes=math.inf``.
    """
    chunk, *others = batch.chunks
    if others or not 0 < keep_bytes < math.inf:
        return not others and keep_bytes > 0
    table_ND = jax.ShapeDtypeStruct(_table_shape(batch, width), jnp.float32)
    states = params, nnx.State({}) if frozen is None else frozen
    return _stored_bytes(graphdef, states, table_ND, chunk, key) <= keep_bytes


def _table_shape(batch: Batch, width: int) -> tuple[int, int]:
    queries, candidates = batch.count_BC.shape
    return queries + candidates + 1, width


def _rows_and_pull(
    graphdef: nnx.GraphDef, params: Params, chunk: Chunk, key: jax.Array | None
) -> tuple[jax.Array, Callable[[jax.Array], tuple[Params]]]:
    """Returns embeddings, and a backward function that gives one gradient per data shard.

    Summing these gradients for the shared parameters would need communication in every chunk.
    """

    def embed_rows(params, split, key):
        (trained, frozen), (buffers, chunk) = params, split
        buffers = jax.tree.map(lambda x: x.squeeze(0), buffers)  # The buffers of this shard.
        trained = precision.redirect_gradients(trained, buffers)
        return _embed_chunk(graphdef, (trained, frozen), chunk, key)

    return jax.vjp(
        lambda buffers: _map_shards(embed_rows, params)(params, (buffers, chunk), key),
        sharding.zeros_per_shard(params[0]),
    )


def _embed_chunk(graphdef, params, chunk, key):
    trained, frozen = params
    state = nnx.merge_state(trained, frozen) if frozen else trained
    return embed(graphdef, state, chunk.tokens_BT, chunk.mask_BT, key, chunk.passage_B)


def _map_shards(function, params):
    """Returns `sharding.map_shards` of ``function``, whose frozen parameters stay split."""
    specs = jax.sharding.PartitionSpec(), sharding.fsdp_specs(params[1])
    return sharding.map_shards(function, specs if params[1] else specs[0])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _embed(graphdef, params, table_ND, chunk, key):
    """Embeds a chunk into its rows of the table."""
    embed_rows = _map_shards(functools.partial(_embed_chunk, graphdef), params)
    return table_ND.at[chunk.row_B].set(embed_rows(params, chunk, key))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _embed_and_keep(graphdef, params, table_ND, chunk, key):
    """Does the same as `_embed`; also returns the chunk's backward function, with activations.

    References replace the parameters in the backward function, so that chunks do not copy them.
    """
    emb_BD, pull = _rows_and_pull(graphdef, params, chunk, key)
    references = {id(x): _Parameter(index) for index, x in enumerate(jax.tree.leaves(params))}
    pull = jax.tree.map(lambda x: references.get(id(x), x), pull)
    return table_ND.at[chunk.row_B].set(emb_BD), pull


def _stored_bytes(*inputs: Any) -> int:
    """Returns the bytes per device that `_embed_and_keep` stores (an upper bound)."""
    row_B, (_, pull) = inputs[3].row_B, jax.eval_shape(_embed_and_keep, *inputs)
    share = row_B.sharding.shard_shape(row_B.shape)[0] / row_B.size
    return math.ceil(share * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull)))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A reference to a parameter: its index among all parameters."""

    index: int


@functools.partial(jax.jit, static_argnums=4)
def _table_loss(table_ND, positive_B, count_BC, weight_B, temperature):
    """Returns the loss, metrics, and the gradient with respect to the table."""
    queries, candidates = count_BC.shape

    def loss(table_ND):
        return contrastive_loss(
            table_ND[:queries],
            table_ND[queries : queries + candidates],
            positive_B,
            count_BC,
            weight_B,
            temperature,
        )

    (value, metrics), gradient_ND = jax.value_and_grad(loss, has_aux=True)(table_ND)
    return value, metrics, gradient_ND


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _pull(graphdef, params, gradient, gradient_ND, chunk, key):
    """Repeats the forward pass of a chunk, and adds the gradient of the chunk."""
    _, pull = _rows_and_pull(graphdef, params, chunk, key)
    return _add(gradient, pull(gradient_ND[chunk.row_B])[0])


@functools.partial(jax.jit, donate_argnums=2)
def _pull_kept(pull, params, gradient, gradient_ND, row_B):
    leaves = jax.tree.leaves(params)
    pull = jax.tree.map(
        lambda x: leaves[x.index] if isinstance(x, _Parameter) else x,
        pull,
        is_leaf=lambda x: isinstance(x, _Parameter),
    )
    return _add(gradient, pull(gradient_ND[row_B])[0])


_zeros = jax.jit(sharding.zeros_per_shard)


def _add(a: Params, b: Params) -> Params:
    return sharding.constrain_per_shard(jax.tree.map(jnp.add, a, b))
