"""Text encoders in Flax NNX: BERT, XLM-RoBERTa, MPNet, ModernBERT, Nomic BERT, GTE and Jina v3.

The architecture is the transformer encoder of Devlin et al. (2019). What differs between families
is a field of `EncoderConfig`. MPNet (Song et al., 2020) adds a relative position bias to the
attention scores. The others after XLM-RoBERTa have rotary positions. ModernBERT (Warner et al.,
2024) has its norms before attention and feed-forward, and windows in most layers.
jina-embeddings-v3 (Sturua et al., 2024) has low-rank adapters for tasks, such as encoding queries.

Modules only store parameters. The arithmetic is in pure functions of arrays, so that a layer can be
scanned, rematerialized or replayed with the same dropout key.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import precision
from cirag_jax.models.activations import Activation
from cirag_jax.models.attention import Implementation, choose_implementation
from cirag_jax.models.dense import DenseConfig, add_dense, output_width
from cirag_jax.models.layers import (
    activate_gated,
    drop_units,
    feed_forward,
    layer_norm,
    linear,
    linear_parts,
    split_features,
)
from cirag_jax.models.pooling import Pooling
from cirag_jax.models.precision import Dtype
from cirag_jax.models.rope import Rope, rope_tables, rotate
from cirag_jax.sharding import ShapesAndAxes

_MASKED = -1e9  # score of a padding key; finite, so that a fully masked row has no NaN

# The smallest distance in each bucket of MPNet's relative bias (Raffel et al., 2020, section 2.1):
# one bucket per distance below 8, then two per octave; the last is unbounded. Keys after the query
# have separate buckets.
_BUCKET_STARTS = (*range(9), 12, 16, 23, 32, 46, 64, 91)
RELATIVE_BUCKETS = 2 * len(_BUCKET_STARTS)


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Hyper-parameters of an encoder; hashable, so usable as a static argument.

    Attributes:
      type_vocab_size: number of token types; 0 for MPNet, which has none.
      position_offset: index of the first real position: 0 for BERT, ``pad_id + 1`` for XLM-R.
      max_positions: rows of the position table, including the offset; with ``rope``, the maximum
        number of tokens.
      rope: rotary positions; None means a position table.
      local_rope: rotary positions of layers with a window, if they differ.
      rotary_dim: number of rotated dimensions of each head; None is all.
      windows: for each layer, how many tokens a token attends to on each side; 0 means all. Empty
        means 0 in every layer.
      pre_norm: whether layers normalize the inputs of attention and feed-forward, with one more
        norm after the last layer (ModernBERT). Otherwise, they normalize the residual sums.
      first_norm: whether the first layer has a norm before attention (not in ModernBERT).
      gated: whether the feed-forward layer is ``act(x W) * (x V)`` (Shazeer, 2020).
      attention_bias, up_bias, down_bias, norm_bias: which layers have biases; ``up`` and ``down``
        are the two layers of the feed-forward layer.
      relative_bias: whether one relative position bias is added to the scores of all layers
        (MPNet).
      hidden_dropout, attention_dropout: dropout rates; used only in calls with a dropout key.
      dtype: compute dtype. Softmax, layer norm and the embedding output are always fp32. Parameters
        are fp32, too, except after `precision.round_weights`.
      attention: see `choose_attention`.
      remat: whether the backward pass recomputes each layer.
      scan_layers: whether the parameters of all layers are stacked and run with `jax.lax.scan`.
      unroll: layers per iteration of the scan; with all layers, there is no loop.
      pooling: how `pooling.embed` turns hidden states into one vector.
      dense: layers that `pooling.embed` applies to the pooled vector.
      dimensions: number of leading dimensions that `pooling.embed` keeps (Matryoshka representation
        learning, Kusupati et al., 2022); None keeps all.
      tasks: numbers of the checkpoint's task adapters for queries and passages; one number if they
        are equal, empty without adapters.
      num_tasks: number of task adapters in the checkpoint.
      task_rank, task_scale: inner dimension of the task adapters, and the factor on their output.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    max_positions: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    position_offset: int = 0
    hidden_act: Activation = "gelu"
    pad_id: int = 0
    relative_bias: bool = False
    rope: Rope | None = None
    local_rope: Rope | None = None
    rotary_dim: int | None = None
    windows: tuple[int, ...] = ()
    pre_norm: bool = False
    first_norm: bool = True
    gated: bool = False
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    norm_bias: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    dtype: Dtype = "float32"
    attention: Implementation = "xla"
    remat: bool = False
    scan_layers: bool = False
    unroll: int = 1
    pooling: Pooling = "mean"
    dense: tuple[DenseConfig, ...] = ()
    dimensions: int | None = None
    tasks: tuple[int, ...] = ()
    num_tasks: int = 0
    task_rank: int = 0
    task_scale: float = 1.0

    @property
    def embedding_size(self) -> int:
        """Dimension of an embedding."""
        return self.dimensions or output_width(self.dense, self.d_model)

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.d_model // self.num_heads

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a text, including special tokens."""
        return self.max_positions - self.position_offset


def choose_attention(
    dtype: str,
    head_dim: int,
    *,
    platform: str | None = None,
    dropout: float = 0.0,
    relative_bias: bool = False,
) -> Implementation:
    """Returns the attention implementation; see `attention.choose_implementation`.

    Attention dropout needs ``transposed``. ``cudnn`` does not support a ``relative_bias``.
    """
    return choose_implementation(
        dtype, head_dim, platform, plain=dropout > 0.0, fusible=not relative_bias
    )


def layer_parameters(config: EncoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter of one layer.

    Queries, keys and values share one kernel, see `_project`.
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
    absent = {
        "qkv_bias": not config.attention_bias,
        "out_bias": not config.attention_bias,
        "up_bias": not config.up_bias,
        "down_bias": not config.down_bias,
    }

    def is_absent(name):
        return not config.norm_bias if name.endswith("norm_bias") else absent.get(name, False)

    return {name: value for name, value in parameters.items() if not is_absent(name)}


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
        if config.d_model % config.num_heads:
            raise UserError(
                f"encoder width {config.d_model} is not a multiple of its {config.num_heads} heads"
            )
        if config.rope and config.head_dim % 2:
            raise UserError(f"rotary positions need an even head size, not {config.head_dim}")
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
                return _layer(config, params, hidden_BTD, context, place, key)

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
            hidden_BTD = _norm(config, embeddings, "final_norm", hidden_BTD)
        return hidden_BTD


class _Context(NamedTuple):
    """Inputs that all layers share.

    Attributes:
      mask_BT: True at real tokens.
      bias_NTS: relative position bias, or None.
      tables: cosine and sine ``[R, B or 1, T, H / 2]`` of R ropes, or None.
      task_B: index of each text's task in ``config.tasks``, or None.
    """

    mask_BT: jax.Array
    bias_NTS: jax.Array | None
    tables: tuple[jax.Array, jax.Array] | None
    task_B: jax.Array | None


def _make_context(config, embeddings, mask_BT, passage_B) -> _Context:
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
    return _Context(mask_BT, bias_NTS, tables, task_B)


class _Place(NamedTuple):
    """Settings that differ between layers; arrays in a scan, Python values otherwise.

    Attributes:
      window: how many tokens a token attends to on each side; None means all.
      rope: index of the layer's tables; None means the only ones.
      is_first: whether the norm before attention is left out; None means no.
    """

    window: Any
    rope: Any
    is_first: Any


def _places(config: EncoderConfig, length: int) -> list[_Place]:
    """Returns the place of each layer, for texts of ``length`` tokens."""
    windows = config.windows or (0,) * config.num_layers
    is_narrow = [0 < window < length - 1 for window in windows]
    places = []
    for index, window in enumerate(windows):
        limit = window if is_narrow[index] else length
        is_needed = any(is_narrow) if config.scan_layers else is_narrow[index]
        places.append(
            _Place(
                window=limit if is_needed else None,
                rope=None if config.local_rope is None else int(window > 0),
                is_first=None if config.first_norm else index == 0,
            )
        )
    return places


def _norm(config, params, name, x_BTD) -> Any:
    scale_D, bias_D = params[f"{name}_scale"], params.get(f"{name}_bias")
    return layer_norm(x_BTD, scale_D, bias_D, config.layer_norm_eps)


def _add_task(config, p, name, x, y, task_B):
    """Adds the output of each row's task adapter to ``y``, the output of a linear layer."""
    if task_B is None:
        return y
    a, b = (p[f"{name}_task_{side}"][task_B].astype(x.dtype) for side in "ab")
    inner = tuple(range(2, x.ndim))
    down_BTR = jax.lax.dot_general(x, a, ((inner, tuple(range(1, a.ndim - 1))), ((0,), (0,))))
    return y + config.task_scale * jax.lax.dot_general(down_BTR, b, (((2,), (1,)), ((0,), (0,))))


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
    hidden_BTD = _norm(config, params, "embedding_norm", hidden_BTD)
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


def _layer(config, p, hidden_BTD, context, place, key):
    attention_key = out_key = down_key = None
    if key is not None:
        attention_key, out_key, down_key = jax.random.split(key, 3)
    x_BTD = hidden_BTD
    if config.pre_norm:
        x_BTD = _norm(config, p, "attention_norm", hidden_BTD)
        if place.is_first is not None:
            x_BTD = jnp.where(place.is_first, hidden_BTD, x_BTD)
    x_BTD = _attention(config, p, x_BTD, context, place, attention_key)
    hidden_BTD += drop_units(x_BTD, config.hidden_dropout, out_key)
    if not config.pre_norm:
        hidden_BTD = _norm(config, p, "attention_norm", hidden_BTD)
    hidden_BTD = x_BTD = sharding.constrain(hidden_BTD, "batch", "length", "act_embed")
    if config.pre_norm:
        x_BTD = _norm(config, p, "output_norm", hidden_BTD)
    x_BTD = _transform(config, p, x_BTD, context.task_B)
    hidden_BTD += drop_units(x_BTD, config.hidden_dropout, down_key)
    if not config.pre_norm:
        hidden_BTD = _norm(config, p, "output_norm", hidden_BTD)
    return sharding.constrain(hidden_BTD, "batch", "length", "act_embed")


def _transform(config, p, x_BTD, task_B):
    """Applies the feed-forward layer, before dropout and residual."""
    up, down = ((p[f"{name}_kernel"], p.get(f"{name}_bias")) for name in ("up", "down"))
    if task_B is None:
        return feed_forward(config.hidden_act, x_BTD, *up, *down)
    pre_BTF = _add_task(config, p, "up", x_BTD, linear(x_BTD, *up), task_B)
    hidden_BTF = activate_gated(split_features(pre_BTF), config.hidden_act)
    return _add_task(config, p, "down", hidden_BTF, linear(hidden_BTF, *down), task_B)


def _attention(config, p, hidden_BTD, context, place, key):
    """Multi-head self-attention with output projection, before dropout and residual."""
    mask_BT, bias_NTS, tables, task_B = context
    q_BTNH, k_BSNH, v_BSNH = _project(config, p, hidden_BTD, task_B)
    if tables is not None:
        index = 0 if place.rope is None else place.rope
        q_BTNH, k_BSNH = (
            rotate(x, tuple(each[index] for each in tables)) for x in (q_BTNH, k_BSNH)
        )
    q_BTNH, k_BSNH, v_BSNH = (
        sharding.constrain(part, "batch", "length", "act_heads", None)
        for part in (q_BTNH, k_BSNH, v_BSNH)
    )
    near_TS = None
    if place.window is not None:
        index_T = jnp.arange(mask_BT.shape[1], dtype=jnp.int32)
        near_TS = jnp.abs(index_T[:, None] - index_T) <= place.window
    dropping = key is not None and config.attention_dropout > 0.0
    if config.attention == "transposed" or dropping:
        mixed_BTNH = _attend_transposed(
            config, q_BTNH, k_BSNH, v_BSNH, mask_BT, near_TS, bias_NTS, key if dropping else None
        )
    elif config.attention == "cudnn":
        lengths_B = jnp.maximum(mask_BT.sum(-1, dtype=jnp.int32), 1)
        mixed_BTNH = jax.nn.dot_product_attention(
            q_BTNH,
            k_BSNH,
            v_BSNH,
            mask=None if near_TS is None else near_TS[None, None],
            query_seq_lengths=jnp.full_like(lengths_B, mask_BT.shape[1]),
            key_value_seq_lengths=lengths_B,
            implementation="cudnn",
        )
    else:
        bias_1NTS = None if bias_NTS is None else bias_NTS[None]
        mask_B1TS = _combine(mask_BT, near_TS)
        mixed_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BSNH, v_BSNH, bias_1NTS, mask_B1TS, implementation="xla"
        )
    y_BTD = linear(mixed_BTNH, p["out_kernel"], p.get("out_bias"))
    return _add_task(config, p, "out", mixed_BTNH, y_BTD, task_B)


def _project(config, p, hidden_BTD, task_B):
    """Returns queries, keys and values, ``BTNH`` each.

    ``transposed`` attention copies them, so one product for all three is faster. Other attention
    reads them as they are. On devices of a tensor group, three products would exchange the gradient
    of the input three times.
    """
    kernel, bias = p["qkv_kernel"], p.get("qkv_bias")
    if config.attention != "transposed" and task_B is None and sharding.tensor_ways() == 1:
        return linear_parts(hidden_BTD, kernel, bias)
    qkv_BT3NH = linear(hidden_BTD, kernel, bias)
    qkv_BT3NH = _add_task(config, p, "qkv", hidden_BTD, qkv_BT3NH, task_B)
    # The gradient of a split is one concatenation; the gradient of three slices is a padded sum.
    return (part.squeeze(2) for part in jnp.split(qkv_BT3NH, 3, axis=2))


def _combine(mask_BT, near_TS):
    """Returns which keys each query attends to, ``[B, 1, T or 1, S]``."""
    mask_B11S = mask_BT[:, None, None, :]
    return mask_B11S if near_TS is None else mask_B11S & near_TS


def _attend_transposed(config, q_BTNH, k_BSNH, v_BSNH, mask_BT, near_TS, bias_NTS, key):
    """Attention over operands transposed to B N T H, which XLA on CPU multiplies fastest."""
    q_BNTH, k_BNSH, v_BNSH = (x.transpose(0, 2, 1, 3) for x in (q_BTNH, k_BSNH, v_BSNH))
    heads = ((0, 1), (0, 1))
    scores_BNTS = jax.lax.dot_general(
        q_BNTH * (config.head_dim**-0.5),
        k_BNSH,
        (((3,), (3,)), heads),
        preferred_element_type=jnp.float32,
    )
    if bias_NTS is not None:
        scores_BNTS += bias_NTS
    scores_BNTS += jnp.where(_combine(mask_BT, near_TS), 0.0, _MASKED)
    probs_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(v_BNSH.dtype)
    probs_BNTS = drop_units(probs_BNTS, config.attention_dropout, key)
    mixed_BNTH = precision.multiply(probs_BNTS, v_BNSH, ((3,), (2,)), heads)
    return mixed_BNTH.transpose(0, 2, 1, 3)
