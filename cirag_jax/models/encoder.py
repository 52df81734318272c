"""BERT-family text encoders in Flax NNX: BERT, MiniLM, BGE, E5, XLM-RoBERTa and MPNet.

The architecture is the post-layer-norm transformer encoder of Devlin et al. (2019). MPNet (Song et
al., 2020) adds a relative position bias to the attention scores. Modules only store parameters. The
arithmetic is in pure functions of arrays, so that a layer can be scanned, rematerialized or
replayed with the same dropout key.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import precision
from cirag_jax.models.attention import Implementation, choose_implementation
from cirag_jax.models.precision import Dtype, Weight
from cirag_jax.sharding import ShapesAndAxes

Pooling = Literal["mean", "cls"]
Activation = Literal["gelu", "gelu_new", "relu"]

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
      max_positions: rows of the position table, including the offset.
      relative_bias: whether one relative position bias is added to the scores of all layers
        (MPNet).
      hidden_dropout, attention_dropout: dropout rates; used only in calls with a dropout key.
      dtype: compute dtype. Softmax, layer norm and the embedding output are always fp32. Parameters
        are fp32, too, except after `precision.round_weights`.
      attention: see `choose_attention`.
      remat: whether the backward pass recomputes each layer.
      scan_layers: whether the parameters of all layers are stacked and run with `jax.lax.scan`.
      pooling: how `embed` turns hidden states into one vector.
      dimensions: number of leading dimensions that `embed` keeps (Matryoshka representation
        learning, Kusupati et al., 2022); None keeps all.
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
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    dtype: Dtype = "float32"
    attention: Implementation = "xla"
    remat: bool = False
    scan_layers: bool = False
    pooling: Pooling = "mean"
    dimensions: int | None = None

    @property
    def embedding_size(self) -> int:
        """Dimension of an embedding."""
        return self.dimensions or self.d_model

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

    Queries, keys and values share one kernel, so that one product replaces three.
    """
    d, n, h, f = config.d_model, config.num_heads, config.head_dim, config.d_ff
    return {
        "qkv_kernel": ((d, 3, n, h), ("embed", None, "heads", "head_dim")),
        "qkv_bias": ((3, n, h), (None, "heads", "head_dim")),
        "out_kernel": ((n, h, d), ("heads", "head_dim", "embed")),
        "out_bias": ((d,), ("norm",)),
        "attention_norm_scale": ((d,), ("norm",)),
        "attention_norm_bias": ((d,), ("norm",)),
        "up_kernel": ((d, f), ("embed", "mlp")),
        "up_bias": ((f,), ("mlp",)),
        "down_kernel": ((f, d), ("mlp", "embed")),
        "down_bias": ((d,), ("norm",)),
        "output_norm_scale": ((d,), ("norm",)),
        "output_norm_bias": ((d,), ("norm",)),
    }


def embedding_parameters(config: EncoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter outside the layers."""
    d = config.d_model
    parameters: ShapesAndAxes = {
        "token_embedding": ((config.vocab_size, d), ("vocab", "embed")),
        "position_embedding": ((config.max_positions, d), ("position", "embed")),
    }
    if config.type_vocab_size:
        parameters["type_embedding"] = ((config.type_vocab_size, d), (None, "embed"))
    parameters["embedding_norm_scale"] = ((d,), ("norm",))
    parameters["embedding_norm_bias"] = ((d,), ("norm",))
    if config.relative_bias:
        parameters["relative_embedding"] = ((RELATIVE_BUCKETS, config.num_heads), (None, "heads"))
    return parameters


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
        """Creates random parameters from ``rngs.params``."""
        if config.relative_bias and config.attention == "cudnn":
            raise ValueError(
                "attention 'cudnn' does not support relative_bias; see `choose_attention`"
            )
        if config.d_model % config.num_heads:
            raise UserError(
                f"encoder width {config.d_model} is not a multiple of its {config.num_heads} heads"
            )
        self.config = config
        add_parameters(self, embedding_parameters(config), config, rngs)
        if config.scan_layers:
            self.layers = Layer(config, stacked=True, rngs=rngs)
        else:
            self.layers = nnx.List(
                [Layer(config, stacked=False, rngs=rngs) for _ in range(config.num_layers)]
            )

    def __call__(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array,
        *,
        types_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the hidden states of the last layer, ``hidden_BTD`` in the compute dtype.

        Args:
          tokens_BT: int32 token ids, padded on the right.
          mask_BT: 1 or True at real tokens.
          types_BT: int32 token types (first or second text of a pair); None means all 0. Ignored by
            models without token types.
          dropout_key: a `jax.random` key; the same key drops the same units. None disables dropout.
        """
        config = self.config
        mask_BT = mask_BT.astype(bool)
        embeddings = {name: getattr(self, name)[...] for name in embedding_parameters(config)}
        keys = None
        if dropout_key is not None:
            dropout_key, keys = jax.random.split(dropout_key)
            keys = jax.random.split(keys, config.num_layers)
        hidden_BTD = _embed_tokens(config, embeddings, tokens_BT, mask_BT, types_BT, dropout_key)
        bias_NTS = None
        if config.relative_bias:  # once for all layers, even if they are rematerialized
            bias_NTS = _relative_bias(embeddings["relative_embedding"], tokens_BT.shape[1])

        def layer(params, hidden_BTD, key):
            return _layer(config, params, hidden_BTD, mask_BT, bias_NTS, key)

        if config.remat:
            layer = jax.checkpoint(layer, prevent_cse=not config.scan_layers)
        if isinstance(self.layers, Layer):

            def step(hidden_BTD, inputs):
                return layer(inputs[0], hidden_BTD, inputs[1]), None

            hidden_BTD, _ = jax.lax.scan(step, hidden_BTD, (self.layers.arrays(config), keys))
            return hidden_BTD
        for index, module in enumerate(self.layers):
            key = None if keys is None else keys[index]
            hidden_BTD = layer(module.arrays(config), hidden_BTD, key)
        return hidden_BTD


def drop_units(x: Any, rate: float, key: jax.Array | None) -> jax.Array:
    """Applies inverted dropout; without a key, returns ``x`` unchanged."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    """Layer norm in fp32 over the last axis, returned in the dtype of ``x_BTD``.

    The hand-written backward pass stores only the normalized values and one number per row. JAX's
    automatic gradient would also store the broadcast scale.
    """
    return _layer_norm_forward(x_BTD, scale_D, bias_D, eps)[0]


def _layer_norm_forward(x_BTD, scale_D, bias_D, eps):
    x32_BTD = x_BTD.astype(jnp.float32)
    centred_BTD = x32_BTD - x32_BTD.mean(-1, keepdims=True)
    rstd_BT1 = jax.lax.rsqrt(jnp.square(centred_BTD).mean(-1, keepdims=True) + eps)
    normed_BTD = centred_BTD * rstd_BT1
    y_BTD = (normed_BTD * scale_D + bias_D).astype(x_BTD.dtype)
    return y_BTD, (normed_BTD.astype(x_BTD.dtype), rstd_BT1, scale_D)


def _layer_norm_backward(eps, residuals, dy_BTD):
    del eps
    normed_BTD, rstd_BT1, scale_D = residuals
    normed32_BTD, dy32_BTD = normed_BTD.astype(jnp.float32), dy_BTD.astype(jnp.float32)
    dnormed_BTD = dy32_BTD * scale_D
    along_BT1 = (dnormed_BTD * normed32_BTD).mean(-1, keepdims=True)
    dx_BTD = rstd_BT1 * (
        dnormed_BTD - dnormed_BTD.mean(-1, keepdims=True) - normed32_BTD * along_BT1
    )
    dscale_D = (dy32_BTD * normed32_BTD).sum((0, 1))
    return dx_BTD.astype(dy_BTD.dtype), dscale_D, dy32_BTD.sum((0, 1))


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def _norm(config, params, name, x_BTD) -> Any:
    scale_D, bias_D = params[f"{name}_scale"], params[f"{name}_bias"]
    return _layer_norm(x_BTD, scale_D, bias_D, config.layer_norm_eps)


@jax.custom_vjp
def _linear(x: jax.Array, kernel: Weight, bias: Weight) -> jax.Array:
    """Returns ``x @ kernel + bias`` in the dtype of ``x``.

    ``x`` is ``[B, T, *I]``, the kernel ``[*I, *O]``; kernel and bias are fp32, or both `Rounded`.
    Heads remain a separate axis, because merging axes would gather an axis that is split over
    devices.

    The backward pass is hand-written for two reasons. It accumulates the parameters' gradients in
    fp32 in any compute dtype. It also computes them as `x^T dy`, which XLA on a CPU runs three
    times as fast as the `dy^T x` of JAX's automatic gradient.
    """
    kernel, bias = (precision.weight_value(weight).astype(x.dtype) for weight in (kernel, bias))
    return jnp.tensordot(x, kernel, x.ndim - 2) + bias


def _linear_forward(x, kernel, bias):
    return _linear(x, kernel, bias), (x, precision.residual_of(kernel))


def _linear_backward(residuals, dy):
    x, weight = residuals
    kernel = precision.weight_value(weight)
    outer = range(2, dy.ndim)
    contracted = (outer, range(kernel.ndim - len(outer), kernel.ndim))
    dx = jax.lax.dot_general(dy, kernel.astype(dy.dtype), (contracted, ((), ())))
    return dx, *_kernel_gradient(weight, x, dy)


def _kernel_gradient(weight: Weight, x: jax.Array, dy: jax.Array) -> tuple[Any, Any]:
    """Returns the fp32 gradients of the kernel ``weight`` and of the bias."""
    if jax.default_backend() == "cpu":  # XLA there has no product of 3-axis bf16 arrays into fp32
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    rows = x.shape[0] * x.shape[1]
    x_RI, dy = x.reshape(rows, -1), dy.reshape(rows, *dy.shape[2:])
    dkernel = jax.lax.dot_general(
        x_RI, dy, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    dkernel = dkernel.reshape(*x.shape[2:], *dy.shape[1:])
    gradients = dkernel, dy.sum(0, dtype=jnp.float32)
    return precision.cotangent_of(weight, gradients[0]), precision.cotangent_of(
        weight, gradients[1]
    )


_linear.defvjp(_linear_forward, _linear_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(act, x_BTD, up_DF, up_bias_F, down_FD, down_bias_D):
    """Two linear layers with an activation between them.

    Only the input and the pre-activation are stored; the backward pass recomputes the activation.
    This costs less than storing and reading two more arrays of width F.
    """
    return _feed_forward_forward(act, x_BTD, up_DF, up_bias_F, down_FD, down_bias_D)[0]


def _feed_forward_forward(act, x_BTD, up_DF, up_bias_F, down_FD, down_bias_D):
    pre_BTF = sharding.constrain(_linear(x_BTD, up_DF, up_bias_F), "batch", "length", "act_mlp")
    y_BTD = _linear(_activation(pre_BTF, act), down_FD, down_bias_D)
    return y_BTD, (x_BTD, pre_BTF, precision.residual_of(up_DF), precision.residual_of(down_FD))


def _feed_forward_backward(act, residuals, dy_BTD):
    x_BTD, pre_BTF, up, down = residuals
    up_DF, down_FD = precision.weight_value(up), precision.weight_value(down)
    # Without the barrier, XLA would store the activation of the forward pass instead.
    pre_BTF, dy_BTD = jax.lax.optimization_barrier((pre_BTF, dy_BTD))
    hidden_BTF, pull = jax.vjp(lambda pre_BTF: _activation(pre_BTF, act), pre_BTF)
    (dpre_BTF,) = pull(dy_BTD @ down_FD.astype(dy_BTD.dtype).T)
    dx_BTD = dpre_BTF @ up_DF.astype(dpre_BTF.dtype).T
    dup, ddown = _kernel_gradient(up, x_BTD, dpre_BTF), _kernel_gradient(down, hidden_BTF, dy_BTD)
    return dx_BTD, *dup, *ddown


_feed_forward.defvjp(_feed_forward_forward, _feed_forward_backward)


def _activation(x: jax.Array, kind: str) -> jax.Array:
    if kind == "relu":
        return jax.nn.relu(x)
    if kind == "gelu_new":
        return jax.nn.gelu(x, approximate=True)
    y = x.astype(jnp.float32)
    return (0.5 * y * (1.0 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def _embed_tokens(config, params, tokens_BT, mask_BT, types_BT, key):
    """Returns the normed sum of token, position and type embeddings, ``hidden_BTD``."""
    length = tokens_BT.shape[1]
    if length > config.max_length:
        raise UserError(
            f"a batch of {length} tokens is longer than the {config.max_length} positions of "
            "the encoder"
        )
    hidden_BTD = params["token_embedding"][tokens_BT]
    if config.type_vocab_size:
        hidden_BTD += params["type_embedding"][0 if types_BT is None else types_BT]
    if config.position_offset == 0:
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


def _layer(config, p, hidden_BTD, mask_BT, bias_NTS, key):
    attention_key = out_key = down_key = None
    if key is not None:
        attention_key, out_key, down_key = jax.random.split(key, 3)
    mixed_BTD = _attention(config, p, hidden_BTD, mask_BT, bias_NTS, attention_key)
    mixed_BTD = drop_units(mixed_BTD, config.hidden_dropout, out_key)
    hidden_BTD = _norm(config, p, "attention_norm", hidden_BTD + mixed_BTD)
    hidden_BTD = sharding.constrain(hidden_BTD, "batch", "length", "act_embed")
    weights = (p["up_kernel"], p["up_bias"], p["down_kernel"], p["down_bias"])
    down_BTD = _feed_forward(config.hidden_act, hidden_BTD, *weights)
    down_BTD = drop_units(down_BTD, config.hidden_dropout, down_key)
    hidden_BTD = _norm(config, p, "output_norm", hidden_BTD + down_BTD)
    return sharding.constrain(hidden_BTD, "batch", "length", "act_embed")


def _attention(config, p, hidden_BTD, mask_BT, bias_NTS, key):
    """Multi-head self-attention with output projection, before dropout and residual."""
    qkv_BT3NH = _linear(hidden_BTD, p["qkv_kernel"], p["qkv_bias"])
    # The gradient of a split is one concatenation; the gradient of three slices is a padded sum.
    q_BTNH, k_BSNH, v_BSNH = (
        sharding.constrain(part.squeeze(2), "batch", "length", "act_heads", None)
        for part in jnp.split(qkv_BT3NH, 3, axis=2)
    )
    dropping = key is not None and config.attention_dropout > 0.0
    if config.attention == "transposed" or dropping:
        mixed_BTNH = _attend_transposed(
            config, q_BTNH, k_BSNH, v_BSNH, mask_BT, bias_NTS, key if dropping else None
        )
    elif config.attention == "cudnn":
        lengths_B = jnp.maximum(mask_BT.sum(-1, dtype=jnp.int32), 1)
        mixed_BTNH = jax.nn.dot_product_attention(
            q_BTNH,
            k_BSNH,
            v_BSNH,
            query_seq_lengths=jnp.full_like(lengths_B, mask_BT.shape[1]),
            key_value_seq_lengths=lengths_B,
            implementation="cudnn",
        )
    else:
        bias_1NTS = None if bias_NTS is None else bias_NTS[None]
        mask_B11S = mask_BT[:, None, None, :]
        mixed_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BSNH, v_BSNH, bias_1NTS, mask_B11S, implementation="xla"
        )
    return _linear(mixed_BTNH, p["out_kernel"], p["out_bias"])


def _attend_transposed(config, q_BTNH, k_BSNH, v_BSNH, mask_BT, bias_NTS, key):
    """Attention over operands transposed to B N T H, which XLA on CPU multiplies fastest."""
    q_BNTH, k_BNSH, v_BNSH = (x.transpose(0, 2, 1, 3) for x in (q_BTNH, k_BSNH, v_BSNH))
    scores_BNTS = jax.lax.dot_general(
        q_BNTH * (config.head_dim**-0.5), k_BNSH, (((3,), (3,)), ((0, 1), (0, 1)))
    ).astype(jnp.float32)
    if bias_NTS is not None:
        scores_BNTS += bias_NTS
    scores_BNTS += jnp.where(mask_BT, 0.0, _MASKED)[:, None, None, :]
    probs_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(v_BNSH.dtype)
    probs_BNTS = drop_units(probs_BNTS, config.attention_dropout, key)
    mixed_BNTH = jax.lax.dot_general(probs_BNTS, v_BNSH, (((3,), (2,)), ((0, 1), (0, 1))))
    return mixed_BNTH.transpose(0, 2, 1, 3)


def pool(hidden_BTD: jax.Array, mask_BT: jax.Array, kind: Pooling) -> jax.Array:
    """Returns unit-length ``emb_BD`` in fp32: the mean over real tokens, or the first token.

    A row without real tokens gives zeros, with a finite (zero) gradient.
    """
    mask_BT = mask_BT.astype(jnp.float32)
    if kind == "mean":
        # A product instead of a masked sum needs no B T D temporary in fp32.
        total_BD = jnp.einsum("btd,bt->bd", hidden_BTD, mask_BT, preferred_element_type=jnp.float32)
        pooled_BD = total_BD / jnp.maximum(mask_BT.sum(-1, keepdims=True), 1.0)
    elif kind == "cls":
        first_BD = hidden_BTD[:, 0].astype(jnp.float32)
        pooled_BD = jnp.where(mask_BT.any(-1, keepdims=True), first_BD, 0.0)
    else:
        raise ValueError(f"unknown pooling {kind!r}")
    return _normalize(pooled_BD)


def _normalize(emb_BD: jax.Array) -> jax.Array:
    square_B1 = jnp.square(emb_BD).sum(-1, keepdims=True)
    return emb_BD * jax.lax.rsqrt(jnp.maximum(square_B1, 1e-24))


def embed(
    graphdef: nnx.GraphDef,
    state: Any,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns the embeddings of a padded batch, unit-length ``emb_BD`` in fp32.

    ``graphdef, state = nnx.split(Encoder(...))``; ``graphdef`` is static under `jax.jit`.
    """
    encoder = nnx.merge(graphdef, state)
    hidden_BTD = encoder(tokens_BT, mask_BT, dropout_key=dropout_key)
    emb_BD = pool(hidden_BTD, mask_BT, encoder.config.pooling)
    if encoder.config.embedding_size < emb_BD.shape[1]:
        emb_BD = _normalize(emb_BD[:, : encoder.config.embedding_size])
    return sharding.constrain(emb_BD, "batch", "act_embed")


def embedding_size(graphdef: nnx.GraphDef, state: Any) -> int:
    """Returns the dimension of the embeddings of `embed`."""
    return nnx.merge(graphdef, state).config.embedding_size
