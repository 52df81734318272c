"""Text encoders in Flax NNX: BERT, XLM-RoBERTa, MPNet, ModernBERT, Nomic BERT, GTE and Jina v3.

The architecture is the transformer encoder of Devlin et al. (2019). What differs between families
is a field of `EncoderConfig`. MPNet (Song et al., 2020) adds a relative position bias to the
attention scores. The others after XLM-RoBERTa have rotary positions. ModernBERT (Warner et al.,
2024) has its norms before attention and feed-forward, and windows in most layers.
jina-embeddings-v3 (Sturua et al., 2024) has low-rank adapters for tasks, such as encoding queries.

Modules only store parameters. The arithmetic is in pure functions of arrays, so that a layer can be
scanned, rematerialized or replayed with the same dropout key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models.dense import add_dense
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.encoder_layer import Context, Place, norm, run_layer
from cirag_jax.models.layers import drop_units
from cirag_jax.models.rope import rope_tables
from cirag_jax.sharding import ShapesAndAxes

# The smallest distance in each bucket of MPNet's relative bias (Raffel et al., 2020, section 2.1):
# one bucket per distance below 8, then two per octave; the last is unbounded. Keys after the query
# have separate buckets.
_BUCKET_STARTS = (*range(9), 12, 16, 23, 32, 46, 64, 91)
RELATIVE_BUCKETS = 2 * len(_BUCKET_STARTS)


def layer_parameters(config: EncoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter of one layer.

    Queries, keys and values share one kernel, see `encoder_layer`.
    """
    d, n, h, f = config.d_model, config.num_heads, config.head_dim, config.d_ff
    up, up_axes = ((2, f), (None, "mlp")) if config.gated else ((f,), ("mlp",))
    parameters: ShapesAndAxes = {
        "qkv_kernel": ((d, 3, n, h), ("embed", None, "heads", "head_dim")),
        "qkv_bias": ((3, n, h), (None, "heads", "head_dim")),
        "out_kernel": ((n, h, d), ("heads", "head_dim", "embed")),
        "out_bias": ((d,), ("norm",)),
        "attention_norm_scale": ((d,), ("norm",)),
        "attention_norm_bias": ((d,), ("norm",)),
        "up_kernel": ((d, *up), ("embed", *up_axes)),
        "up_bias": (up, up_axes),
        "down_kernel": ((f, d), ("mlp", "embed")),
        "down_bias": ((d,), ("norm",)),
        "output_norm_scale": ((d,), ("norm",)),
        "output_norm_bias": ((d,), ("norm",)),
    }
    inputs = {"qkv": 1, "out": 2, "up": 1, "down": 1} if config.tasks else {}
    for name, rank in inputs.items():
        shape, axes = parameters[f"{name}_kernel"]
        parameters |= _task_adapter(
            config, name, (shape[:rank], axes[:rank]), (shape[rank:], axes[rank:])
        )
    return _with_biases(config, parameters)


def _task_adapter(config, name, inputs, outputs) -> ShapesAndAxes:
    """Returns the two factors of the task adapters of a kernel or table."""
    count, rank = len(config.tasks), config.task_rank
    sides = {"a": (*inputs[0], rank), "b": (rank, *outputs[0])}
    axes = {"a": (*inputs[1], "lora_rank"), "b": ("lora_rank", *outputs[1])}

    def replicate(axis):
        return "lora_embed" if axis == "embed" else axis

    return {
        f"{name}_task_{side}": ((count, *shape), (None, *map(replicate, axes[side])))
        for side, shape in sides.items()
    }


def _with_biases(config: EncoderConfig, parameters: ShapesAndAxes) -> ShapesAndAxes:
    """Removes the biases that the model lacks."""
    present = {
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "up_bias": config.up_bias,
        "down_bias": config.down_bias,
        **{name: config.norm_bias for name in parameters if name.endswith("norm_bias")},
    }
    return {name: value for name, value in parameters.items() if present.get(name, True)}


def embedding_parameters(config: EncoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter outside the layers."""
    d = config.d_model
    parameters: ShapesAndAxes = {
        "token_embedding": ((config.vocab_size, d), ("vocab", "embed")),
    }
    if config.rope is None:
        parameters["position_embedding"] = ((config.max_positions, d), ("position", "embed"))
    if config.type_vocab_size:
        parameters["type_embedding"] = ((config.type_vocab_size, d), (None, "embed"))
    if config.tasks:
        for name in ("token", "type"):
            if f"{name}_embedding" in parameters:
                (rows, _), (axis, _) = parameters[f"{name}_embedding"]
                parameters |= _task_adapter(config, name, ((rows,), (axis,)), ((d,), ("embed",)))
    for name in ("embedding_norm", "final_norm") if config.pre_norm else ("embedding_norm",):
        parameters[f"{name}_scale"] = ((d,), ("norm",))
        parameters[f"{name}_bias"] = ((d,), ("norm",))
    if config.relative_bias:
        parameters["relative_embedding"] = ((RELATIVE_BUCKETS, config.num_heads), (None, "heads"))
    return _with_biases(config, parameters)


def add_parameters(
    module: nnx.Module, parameters: ShapesAndAxes, config: EncoderConfig, rngs: nnx.Rngs
) -> None:
    """Sets parameters on ``module``: scales to one, biases to zero, all others to random normal."""
    for name, (shape, axes) in parameters.items():
        if name.endswith("scale"):
            value = jnp.ones(shape, jnp.float32)
        elif name.endswith("bias"):
            value = jnp.zeros(shape, jnp.float32)
        else:
            noise = jax.random.normal(rngs.params(), shape, jnp.float32)
            value = config.initializer_range * noise
        setattr(module, name, nnx.Param(value, logical_axes=axes))


class Layer(nnx.Module):
    """Parameters of one layer, or of all layers stacked on a leading axis."""

    def __init__(self, config: EncoderConfig, *, stacked: bool, rngs: nnx.Rngs):
        parameters = layer_parameters(config)
        if stacked:
            parameters = sharding.stack_layers(parameters, config.num_layers)
        add_parameters(self, parameters, config, rngs)

    def arrays(self, config: EncoderConfig) -> dict[str, Any]:
        """Returns the parameters as a plain dictionary of arrays or `precision.Rounded` weights."""
        return {name: getattr(self, name).get_value() for name in layer_parameters(config)}


class Encoder(nnx.Module):
    """A BERT-family encoder.

    ``layers`` is an `nnx.List` of `Layer`, or one stacked `Layer` with ``config.scan_layers``.
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        if config.relative_bias and config.attention == "cudnn":
            raise ValueError(
                "attention 'cudnn' does not support relative_bias; see `choose_attention`"
            )
        self.config = config
        add_parameters(self, embedding_parameters(config), config, rngs)
        if config.scan_layers:
            self.layers = Layer(config, stacked=True, rngs=rngs)
        else:
            self.layers = nnx.List(
                [Layer(config, stacked=False, rngs=rngs) for _ in range(config.num_layers)]
            )
        add_dense(self, config.dense, rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array,
        *,
        types_BT: jax.Array | None = None,
        passage_B: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the hidden states of the last layer, ``hidden_BTD`` in the compute dtype.

        Args:
          tokens_BT: int32 token ids, padded on the right.
          mask_BT: nonzero or True at real tokens.
          types_BT: int32 token types (first or second text of a pair); None means all 0. Ignored by
            models without token types.
          passage_B: whether each text is a passage; None means that all are queries. Ignored by
            models without task adapters.
          dropout_key: a `jax.random` key; the same key drops the same units. None disables dropout.
        """
        config = self.config
        mask_BT = mask_BT.astype(bool)
        embeddings = {name: getattr(self, name)[...] for name in embedding_parameters(config)}
        keys = None
        if dropout_key is not None:
            dropout_key, keys = jax.random.split(dropout_key)
            keys = jax.random.split(keys, config.num_layers)
        context = _make_context(config, embeddings, mask_BT, passage_B)
        hidden_BTD = _embed_tokens(config, embeddings, tokens_BT, types_BT, context, dropout_key)

        def run(place, params, hidden_BTD, key):
            def layer(params, hidden_BTD, key):
                return run_layer(config, params, hidden_BTD, context, place, key)

            if config.remat:
                is_loop = config.scan_layers and config.unroll < config.num_layers
                layer = jax.checkpoint(layer, prevent_cse=not is_loop)
            return layer(params, hidden_BTD, key)

        places = _places(config, tokens_BT.shape[1])
        if isinstance(self.layers, Layer):

            def step(hidden_BTD, inputs):
                place, params, key = inputs
                return run(place, params, hidden_BTD, key), None

            stacked = jax.tree.map(lambda *each: jnp.asarray(each), *places)
            inputs = (stacked, self.layers.arrays(config), keys)
            hidden_BTD, _ = jax.lax.scan(step, hidden_BTD, inputs, unroll=config.unroll)
        else:
            for index, (place, module) in enumerate(zip(places, self.layers, strict=True)):
                key = None if keys is None else keys[index]
                hidden_BTD = run(place, module.arrays(config), hidden_BTD, key)
        if config.pre_norm:
            hidden_BTD = norm(config, embeddings, "final_norm", hidden_BTD)
        return hidden_BTD


def _make_context(config, embeddings, mask_BT, passage_B) -> Context:
    rows, length = mask_BT.shape
    bias_NTS = tables = task_B = None
    if config.relative_bias:  # once for all layers, even if they are rematerialized
        bias_NTS = _relative_bias(embeddings["relative_embedding"], length)
    if config.rope is not None:
        ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None]
        total_B1 = mask_BT.sum(-1, dtype=jnp.int32, keepdims=True)
        positions_1T = jnp.arange(length, dtype=jnp.int32)[None]
        dim = config.rotary_dim or config.head_dim
        tables = rope_tables(positions_1T, dim, ropes, total_B1)
    if config.tasks:
        task_B = jnp.zeros(rows, jnp.int32)
        if passage_B is not None and len(config.tasks) > 1:
            task_B = passage_B.astype(jnp.int32)
    return Context(mask_BT, bias_NTS, tables, task_B)


def _places(config: EncoderConfig, length: int) -> list[Place]:
    """Returns the place of each layer, for texts of ``length`` tokens."""
    windows = config.windows or (0,) * config.num_layers
    is_narrow = [0 < window < length - 1 for window in windows]
    places = []
    for index, window in enumerate(windows):
        limit = window if is_narrow[index] else length
        is_needed = any(is_narrow) if config.scan_layers else is_narrow[index]
        places.append(
            Place(
                window=limit if is_needed else None,
                rope=None if config.local_rope is None else int(window > 0),
                is_first=None if config.first_norm else index == 0,
            )
        )
    return places


def _look_up(config, params, name, rows_BT, task_B):
    """Returns rows of an embedding table, ``[B, T, D]``, with the task adapter of each text."""
    hidden_BTD = params[f"{name}_embedding"][rows_BT]
    if task_B is None:
        return hidden_BTD
    a_BTR = params[f"{name}_task_a"][task_B[:, None], rows_BT]
    b_BRD = params[f"{name}_task_b"][task_B]
    return hidden_BTD + config.task_scale * jnp.einsum("btr,brd->btd", a_BTR, b_BRD)


def _embed_tokens(config, params, tokens_BT, types_BT, context, key):
    """Returns the normed sum of token, position and type embeddings, ``hidden_BTD``."""
    length = tokens_BT.shape[1]
    if length > config.max_length:
        raise UserError(
            f"a batch of {length} tokens is longer than the {config.max_length} positions of "
            "the encoder"
        )
    mask_BT, task_B = context.mask_BT, context.task_B
    hidden_BTD = _look_up(config, params, "token", tokens_BT, task_B)
    if config.type_vocab_size:
        if types_BT is None:
            types_BT = jnp.zeros_like(tokens_BT) if config.tasks else 0
        hidden_BTD += _look_up(config, params, "type", types_BT, task_B)
    if config.rope is not None:
        pass
    elif config.position_offset == 0:
        hidden_BTD += params["position_embedding"][:length]
    else:  # XLM-R and MPNet count only real tokens; padding gets the position before the first
        count_BT = jnp.where(mask_BT, jnp.cumsum(mask_BT, axis=1, dtype=jnp.int32), 0)
        hidden_BTD += params["position_embedding"][count_BT + (config.position_offset - 1)]
    hidden_BTD = sharding.constrain_lookup(hidden_BTD)
    hidden_BTD = norm(config, params, "embedding_norm", hidden_BTD)
    hidden_BTD = drop_units(hidden_BTD, config.hidden_dropout, key)
    hidden_BTD = hidden_BTD.astype(config.dtype)
    return sharding.constrain(hidden_BTD, "batch", "length", "act_embed")


def _relative_bias(table_RN: jax.Array, length: int) -> jax.Array:
    """Returns the relative position bias of ``length`` tokens, ``bias_NTS`` in fp32."""
    ahead_E = np.arange(1 - length, length)  # position of the key minus position of the query
    bucket_E = np.searchsorted(_BUCKET_STARTS, np.abs(ahead_E), side="right") - 1
    bucket_E += np.where(ahead_E > 0, len(_BUCKET_STARTS), 0)
    index_T = jnp.arange(length)
    # Indexing with all T x S buckets at once would embed a large constant in every program.
    bias_TSN = table_RN[bucket_E][index_T - index_T[:, None] + length - 1]
    return sharding.constrain(bias_TSN.transpose(2, 0, 1), "act_heads", "length", "length")
