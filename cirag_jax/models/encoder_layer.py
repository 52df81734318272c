"""One layer of a text encoder: attention and feed-forward layer, with norms and task adapters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cirag_jax import sharding
from cirag_jax.models import precision
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.layers import (
    activate_gated,
    drop_units,
    feed_forward,
    layer_norm,
    linear,
    linear_parts,
    split_features,
)
from cirag_jax.models.rope import rotate

_MASKED = -1e9  # score of a padding key; finite, so that a fully masked row has no NaN


class Context(NamedTuple):
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


class Place(NamedTuple):
    """Settings that differ between layers; arrays in a scan, Python values otherwise.

    Attributes:
      window: how many tokens a token attends to on each side; None means all.
      rope: index of the layer's tables; None means the only ones.
      is_first: whether the norm before attention is left out; None means no.
    """

    window: Any
    rope: Any
    is_first: Any


def norm(config: EncoderConfig, params: Any, name: str, x_BTD: jax.Array) -> Any:
    """Layer norm of ``x_BTD`` with the parameters ``name``."""
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


def run_layer(
    config: EncoderConfig,
    p: Any,
    hidden_BTD: jax.Array,
    context: Context,
    place: Place,
    key: jax.Array | None,
) -> jax.Array:
    """Returns the output of the layer with the parameters ``p``, see `encoder.layer_parameters`.

    ``key`` is that of dropout, or None.
    """
    attention_key = out_key = down_key = None
    if key is not None:
        attention_key, out_key, down_key = jax.random.split(key, 3)
    x_BTD = hidden_BTD
    if config.pre_norm:
        x_BTD = norm(config, p, "attention_norm", hidden_BTD)
        if place.is_first is not None:
            x_BTD = jnp.where(place.is_first, hidden_BTD, x_BTD)
    x_BTD = _attention(config, p, x_BTD, context, place, attention_key)
    hidden_BTD += drop_units(x_BTD, config.hidden_dropout, out_key)
    if not config.pre_norm:
        hidden_BTD = norm(config, p, "attention_norm", hidden_BTD)
    hidden_BTD = x_BTD = sharding.constrain(hidden_BTD, "batch", "length", "act_embed")
    if config.pre_norm:
        x_BTD = norm(config, p, "output_norm", hidden_BTD)
    x_BTD = _transform(config, p, x_BTD, context.task_B)
    hidden_BTD += drop_units(x_BTD, config.hidden_dropout, down_key)
    if not config.pre_norm:
        hidden_BTD = norm(config, p, "output_norm", hidden_BTD)
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
