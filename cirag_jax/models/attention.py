"""Grouped-query attention over cached or whole sequences, softmax in fp32.

All query heads of a key head are rows of one matrix product: operands are laid out B K (G T) H.
Keys are held transposed, B K H S, so that a step over a few rows runs along memory in both
products; in pages, P pages of C tokens, of which a row's table names N.
"""

import logging
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

log = logging.getLogger(__name__)

Implementation = Literal["transposed", "xla", "cudnn"]
MASKED = -1e30  # finite, so that a row without any key has no NaN
_GROUP = 4  # rows that are read together


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


def read_pages(k_PKHC: jax.Array, v_PKCH: jax.Array, tables_BN: jax.Array) -> tuple[Any, Any]:
    """Keys ``[B, K, H, N C]`` and values ``[B, K, N C, H]`` of rows whose pages ``tables_BN`` has.

    They are as the cache holds them, see `packed`. What a table names beyond the last page is any
    finite number.
    """
    k_BNKHC = jnp.take(k_PKHC, tables_BN, axis=0, mode="clip")
    v_BNKCH = jnp.take(v_PKCH, tables_BN, axis=0, mode="clip")
    b, n, k, h, c = k_BNKHC.shape
    k_BKHS = k_BNKHC.transpose(0, 2, 3, 1, 4).reshape(b, k, h, n * c)
    return k_BKHS, v_BNKCH.transpose(0, 2, 1, 3, 4).reshape(b, k, n * c, h)


def attend_pages(
    scoring: Scoring,
    q_BTNH: jax.Array,
    k_PKHC: jax.Array,
    v_PKCH: jax.Array,
    tables_BN: jax.Array,
    slots_BT: jax.Array,
    window: int,
    branches: Branches | None = None,
) -> jax.Array:
    """As `attend`, over the pages of each row's table up to its last slot, with a running softmax.

    Tokens stand at ``slots_BT`` and see those less than ``window`` before them.
    Rows are read in groups of `_GROUP`, each up to the last page of its longest row: the work
    follows what is written, if rows of about the same length stand together. A page that is masked
    for a row changes nothing in it, bit for bit, so that a row does not depend on its neighbours.
    Source: Milakov and Gimelshein (2018), online softmax. For CPUs: on a GPU, a loop whose length
    is data costs more than it saves.
    """
    b, t, n, h = q_BTNH.shape
    kv_heads, size = k_PKHC.shape[1], k_PKHC.shape[3]
    groups, together = n // kv_heads, math.gcd(b, _GROUP)
    q_BKRH = q_BTNH.reshape(b, t, -1, groups, h).transpose(0, 2, 3, 1, 4)
    q_BKRH = q_BKRH.reshape(b, -1, groups * t, h) * jnp.asarray(scoring.scale, q_BTNH.dtype)
    slots_BR = jnp.tile(slots_BT, (1, groups))
    multiply = _multiply_few if t == 1 else _multiply
    # Pages of each group of rows, and where they end in a list of all.
    pages_G = slots_BT.reshape(-1, together * t).max(1) // size + 1
    ends_G = jnp.cumsum(jnp.minimum(pages_G, tables_BN.shape[1]))

    def of_group(x: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, row, together, 0)

    def page(j, state):
        group = (ends_G <= j).sum(dtype=jnp.int32)
        i = j - jnp.where(group > 0, ends_G[jnp.maximum(group - 1, 0)], 0)
        row = group * together
        most_BKR, total_BKR, mixed_BKRH = (of_group(x, row) for x in state)
        ids_B = jax.lax.dynamic_index_in_dim(of_group(tables_BN, row), i, 1, keepdims=False)
        k_BKHC = unpacked(jnp.take(k_PKHC, ids_B, axis=0, mode="clip"))
        v_BKCH = unpacked(jnp.take(v_PKCH, ids_B, axis=0, mode="clip"))
        scores = softcap(multiply(of_group(q_BKRH, row), k_BKHC), scoring.softcap)
        keys_C = i * size + jnp.arange(size, dtype=jnp.int32)
        own = branches and Branches(of_group(branches.start_B, row), branches.size)
        distance_BRC = distances(of_group(slots_BR, row), keys_C, own)
        visible_BRC = (distance_BRC >= 0) & (distance_BRC < window)
        scores = jnp.where(visible_BRC[:, None], scores, MASKED)
        new_BKR = jnp.maximum(most_BKR, scores.max(-1))
        weights = jnp.exp(scores - new_BKR[..., None])
        decay_BKR = jnp.exp(most_BKR - new_BKR)
        added_BKRH = multiply(weights.astype(v_BKCH.dtype), v_BKCH)
        total_BKR = total_BKR * decay_BKR + weights.sum(-1)
        mixed_BKRH = mixed_BKRH * decay_BKR[..., None] + added_BKRH
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, part, row, 0)
            for whole, part in zip(state, (new_BKR, total_BKR, mixed_BKRH), strict=True)
        )

    shape = q_BKRH.shape[:3]
    state = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, h), jnp.float32),
    )
    _, total_BKR, mixed_BKRH = jax.lax.fori_loop(jnp.int32(0), ends_G[-1], page, state)
    mixed = (mixed_BKRH / total_BKR[..., None]).astype(q_BTNH.dtype)
    mixed = mixed.reshape(b, kv_heads, groups, t, h)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def probabilities(
    scoring: Scoring, q_BTNH: jax.Array, k_BKHS: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """What `attend` weighs the values with, fp32 ``[B, T, N, S]``."""
    b, t, n, _ = q_BTNH.shape
    probs = jax.nn.softmax(_scores(scoring, q_BTNH, k_BKHS, mask_BTS), axis=-1)
    return probs.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)
