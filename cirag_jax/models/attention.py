"""Grouped-query attention over cached or whole sequences, softmax in fp32.

All query heads of a key head are rows of one matrix product: operands are laid out B K (G T) H.
Keys are held transposed, B K H S, so that a step over a few rows runs along memory in both
products.
"""

import logging
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

log = logging.getLogger(__name__)

Implementation = Literal["transposed", "xla", "cudnn"]
MASKED = -1e30  # finite, so that a row without any key has no NaN
_KEY_BLOCK = 128


def choose(
    dtype: str, head_dim: int, platform: str | None, *, plain: bool = False, fusible: bool = True
) -> Implementation:
    """The implementation of a platform (None: the one JAX runs on), which is logged.

    ``transposed`` on a CPU and where attention is to be ``plain``; ``cudnn``, the fused kernel of
    NVIDIA GPUs, for 16-bit operands and heads of at most 128 in multiples of 8, where the rest is
    ``fusible``; ``xla`` else.
    """
    platform = platform or jax.default_backend()
    fusible = fusible and dtype == "bfloat16" and head_dim <= 128 and not head_dim % 8
    choice: Implementation = "xla"
    if platform == "cpu" or plain:
        choice = "transposed"
    elif platform in ("gpu", "cuda") and fusible:
        choice = "cudnn"
    log.info(
        "attention: %s (platform %s, dtype %s, head size %d)", choice, platform, dtype, head_dim
    )
    return choice


class Scoring(NamedTuple):
    """Factor on the products of queries and keys, and the soft cap after it (None: none)."""

    scale: float
    softcap: float | None = None


class Branches(NamedTuple):
    """Tokens that lie one after another in the cache, and in pieces of which each follows the past.

    Attributes:
      start_B: int32, where the past ends and the first branch begins.
      size: tokens of a branch.
    """

    start_B: jax.Array
    size: int

    def skipped(self, slots_BT: jax.Array) -> jax.Array:
        """How many tokens of other branches lie between the past and the own branch, ``[B, T]``."""
        return (slots_BT - self.start_B[:, None]) // self.size * self.size


def distances(
    slots_BT: jax.Array, keys_S: jax.Array, branches: Branches | None = None
) -> jax.Array:
    """How many tokens before each slot a key stands, int32 ``[B, T, S]``; negative: not seen."""
    back_BTS = slots_BT[:, :, None] - keys_S
    if branches is None:
        return back_BTS
    start_B11 = branches.start_B[:, None, None]
    skipped_BT1 = branches.skipped(slots_BT)[:, :, None]
    own_BTS = jnp.where(keys_S < start_B11 + skipped_BT1, -1, back_BTS)
    return jnp.where(keys_S < start_B11, back_BTS - skipped_BT1, own_BTS)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """``cap * tanh(x / cap)``; ``x`` where ``cap`` is None (Gemma 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def packed(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` as a cache of ``dtype`` holds it; uint16 are the bits of bf16.

    XLA on a CPU writes into an array of bf16 by way of a copy of all of it in fp32.
    """
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def unpacked(x: jax.Array) -> jax.Array:
    """What `packed` made of an array: fp32 of uint16, anything else as it is."""
    if x.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x


def _scores(
    scoring: Scoring, q_BTNH: jax.Array, k_BKHS: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Masked attention scores, fp32 ``[B, K, G, T, S]`` with G query heads a key head."""
    b, t, n, h = q_BTNH.shape
    groups = n // k_BKHS.shape[1]
    q_BKRH = q_BTNH.reshape(b, t, -1, groups, h).transpose(0, 2, 3, 1, 4)
    q_BKRH = q_BKRH.reshape(b, -1, groups * t, h)
    scores_BKRS = jax.lax.dot_general(
        q_BKRH,
        k_BKHS,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    scores = scores_BKRS.reshape(b, -1, groups, t, k_BKHS.shape[3])
    scores = softcap(scores * scoring.scale, scoring.softcap)
    return jnp.where(mask_BTS[:, None, None], scores, MASKED)


def attend(
    scoring: Scoring,
    q_BTNH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    mask_BTS: jax.Array,
) -> jax.Array:
    """Grouped-query attention, ``mixed_BTNH`` in the dtype of the values; softmax in fp32.

    All query heads of a key head are rows of one matrix product.
    """
    b, t, n, h = q_BTNH.shape
    scores = _scores(scoring, q_BTNH, k_BKHS, mask_BTS)
    probs = jax.nn.softmax(scores, axis=-1).astype(v_BKSH.dtype)
    probs_BKRS = probs.reshape(b, k_BKHS.shape[1], -1, k_BKHS.shape[3])
    mixed_BKRH = jax.lax.dot_general(probs_BKRS, v_BKSH, (((3,), (2,)), ((0, 1), (0, 1))))
    mixed = mixed_BKRH.reshape(b, k_BKHS.shape[1], n // k_BKHS.shape[1], t, h)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def _multiply(x_BKRI: jax.Array, y_BKIJ: jax.Array) -> jax.Array:
    """Batched matrix product, accumulated and returned in fp32."""
    return jax.lax.dot_general(
        x_BKRI,
        y_BKIJ,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )


def _multiply_few(x_BKRI: jax.Array, y_BKIJ: jax.Array) -> jax.Array:
    """The same for few rows R: one pass over ``y`` instead of a call to the library a head."""
    product = x_BKRI[..., None].astype(jnp.float32) * y_BKIJ[:, :, None].astype(jnp.float32)
    return product.sum(-2)


def attend_blocks(
    scoring: Scoring,
    q_BTNH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    slots_BT: jax.Array,
    window: int,
    branches: Branches | None = None,
) -> jax.Array:
    """As `attend`, over blocks of keys up to the last slot, with a running softmax.

    The work follows what is written in the cache, not its size. A block that is masked for a row
    changes nothing in it, bit for bit, so that a row does not depend on how far its neighbours
    are. Source: Milakov and Gimelshein (2018), online softmax. For CPUs: on a GPU, a loop whose
    length is data costs more than it saves.
    """
    b, t, n, h = q_BTNH.shape
    groups, length = n // k_BKHS.shape[1], k_BKHS.shape[3]
    size = _KEY_BLOCK if length % _KEY_BLOCK == 0 else length
    q_BKRH = q_BTNH.reshape(b, t, -1, groups, h).transpose(0, 2, 3, 1, 4)
    q_BKRH = q_BKRH.reshape(b, -1, groups * t, h) * jnp.asarray(scoring.scale, q_BTNH.dtype)
    slots_BR = jnp.tile(slots_BT, (1, groups))
    multiply = _multiply_few if t == 1 else _multiply

    def block(i, state):
        most_BKR, total_BKR, mixed_BKRH = state
        k_BKHC = unpacked(jax.lax.dynamic_slice_in_dim(k_BKHS, i * size, size, axis=3))
        v_BKCH = unpacked(jax.lax.dynamic_slice_in_dim(v_BKSH, i * size, size, axis=2))
        scores = softcap(multiply(q_BKRH, k_BKHC), scoring.softcap)
        keys_C = i * size + jnp.arange(size, dtype=jnp.int32)
        distance_BRC = distances(slots_BR, keys_C, branches)
        visible_BRC = (distance_BRC >= 0) & (distance_BRC < window)
        scores = jnp.where(visible_BRC[:, None], scores, MASKED)
        new_BKR = jnp.maximum(most_BKR, scores.max(-1))
        weights = jnp.exp(scores - new_BKR[..., None])
        decay_BKR = jnp.exp(most_BKR - new_BKR)
        added_BKRH = multiply(weights.astype(v_BKCH.dtype), v_BKCH)
        total_BKR = total_BKR * decay_BKR + weights.sum(-1)
        return new_BKR, total_BKR, mixed_BKRH * decay_BKR[..., None] + added_BKRH

    shape = q_BKRH.shape[:3]
    state = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, h), jnp.float32),
    )
    count = slots_BT.max() // size + 1
    _, total_BKR, mixed_BKRH = jax.lax.fori_loop(jnp.int32(0), count, block, state)
    mixed = (mixed_BKRH / total_BKR[..., None]).astype(q_BTNH.dtype)
    mixed = mixed.reshape(b, k_BKHS.shape[1], groups, t, h)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def probabilities(
    scoring: Scoring, q_BTNH: jax.Array, k_BKHS: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """What `attend` weighs the values with, fp32 ``[B, T, N, S]``."""
    b, t, n, _ = q_BTNH.shape
    probs = jax.nn.softmax(_scores(scoring, q_BTNH, k_BKHS, mask_BTS), axis=-1)
    return probs.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)
