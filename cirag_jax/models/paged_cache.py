"""Paged keys and values: P pages of C tokens; each row's table lists its N pages in order.

This module writes pages, reads them and computes attention over them; the engine assigns pages to
rows. Keys are stored transposed, see `attention`. On CPUs attention reads pages in place; on other
devices the pages of a row are first copied into one array.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from cirag_jax.models.attention import MASKED, Branches, Scoring, distances, softcap

# One array per layer: "k" of [P, K, H, C], "v" of [P, K, C, H].
Cache = dict[str, tuple[jax.Array, ...]]

_GROUP = 4  # rows processed together


def packed(x: jax.Array, dtype: Any) -> jax.Array:
    """Converts ``x`` for a cache of ``dtype``; uint16 holds the bits of bf16.

    XLA on CPUs converts a whole bf16 array to fp32 and back to write into it.
    """
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def unpacked(x: jax.Array) -> jax.Array:
    """Reverses `packed`: converts uint16 to fp32 and leaves other arrays unchanged."""
    if x.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x


# --------------------------------------------------------------------------------- written, read


def laid_out(cache: Cache, tables_BN: jax.Array) -> Cache:
    """Returns a cache with one long page per row, which joins the row's pages."""
    pairs = [read_pages(*layer, tables_BN) for layer in zip(cache["k"], cache["v"], strict=True)]
    keys, values = zip(*pairs, strict=True)
    return {"k": keys, "v": values}


def written_back(
    cache: Cache, rows: Cache, tables_BN: jax.Array, start_B: jax.Array, count: int
) -> Cache:
    """Copies ``count`` tokens from ``start_B`` of `laid_out` ``rows`` back into ``cache``."""
    slots_BT = start_B[:, None] + jnp.arange(count, dtype=jnp.int32)
    at_BT = places(cache, tables_BN, slots_BT)
    row_B1 = jnp.arange(len(start_B))[:, None]
    written = [
        write(k, v, at_BT, own_k[row_B1, :, :, slots_BT], own_v[row_B1, :, slots_BT])
        for k, v, own_k, own_v in zip(cache["k"], cache["v"], rows["k"], rows["v"], strict=True)
    ]
    keys, values = zip(*written, strict=True)
    return {"k": keys, "v": values}


def places(
    cache: Cache, tables_BN: jax.Array | None, slots_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns page and offset of each slot, int32 ``[B, T]``; missing pages are out of range."""
    num_pages, _, size, _ = cache["v"][0].shape
    if tables_BN is None:
        return jnp.arange(num_pages, dtype=jnp.int32)[:, None], slots_BT
    pages_BT = jnp.take_along_axis(
        tables_BN, slots_BT // size, axis=1, mode="fill", fill_value=num_pages
    )
    return pages_BT, slots_BT % size


def write(
    k_PKHC: jax.Array,
    v_PKCH: jax.Array,
    at_BT: tuple[jax.Array, jax.Array],
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes new keys and values at `places`."""
    page_BT, offset_BT = at_BT
    k_PKHC = k_PKHC.at[page_BT, :, :, offset_BT].set(k_BTKH, mode="drop")
    return k_PKHC, v_PKCH.at[page_BT, :, offset_BT].set(v_BTKH, mode="drop")


def read_pages(k_PKHC: jax.Array, v_PKCH: jax.Array, tables_BN: jax.Array) -> tuple[Any, Any]:
    """Returns keys ``[B, K, H, N C]`` and values ``[B, K, N C, H]`` of the pages ``tables_BN``.

    They are in the format of the cache, see `packed`. Entries beyond the last page give arbitrary
    finite numbers.
    """
    k_BNKHC = jnp.take(k_PKHC, tables_BN, axis=0, mode="clip")
    v_BNKCH = jnp.take(v_PKCH, tables_BN, axis=0, mode="clip")
    b, n, k, h, c = k_BNKHC.shape
    k_BKHS = k_BNKHC.transpose(0, 2, 3, 1, 4).reshape(b, k, h, n * c)
    return k_BKHS, v_BNKCH.transpose(0, 2, 1, 3, 4).reshape(b, k, n * c, h)


# -------------------------------------------------------------------------------------- attention


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
    """Computes `attend` over the pages of each row's table, with a running softmax.

    Tokens at ``slots_BT`` attend to tokens less than ``window`` before them. Rows are processed in
    groups of `_GROUP`, up to the last page of the longest row, so rows of similar length should be
    adjacent. Masked pages do not change a row's result by a bit, so rows do not depend on others.
    Source: Milakov and Gimelshein (2018), online softmax. For CPUs only: on a GPU, a loop of
    data-dependent length costs more than it saves.
    """
    b, t, n, h = q_BTNH.shape
    kv_heads, size = k_PKHC.shape[1], k_PKHC.shape[3]
    groups, together = n // kv_heads, math.gcd(b, _GROUP)
    q_BKRH = q_BTNH.reshape(b, t, -1, groups, h).transpose(0, 2, 3, 1, 4)
    q_BKRH = q_BKRH.reshape(b, -1, groups * t, h) * jnp.asarray(scoring.scale, q_BTNH.dtype)
    slots_BR = jnp.tile(slots_BT, (1, groups))
    multiply = _multiply_few if t == 1 else _multiply
    # Pages of each group of rows, and their ends in the list of all pages.
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


def _multiply(x_BKRI: jax.Array, y_BKIJ: jax.Array) -> jax.Array:
    """Computes a batched matrix product in fp32."""
    return jax.lax.dot_general(
        x_BKRI,
        y_BKIJ,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )


def _multiply_few(x_BKRI: jax.Array, y_BKIJ: jax.Array) -> jax.Array:
    """Computes the same for few rows R in one pass over ``y``, without a library call per head."""
    product = x_BKRI[..., None].astype(jnp.float32) * y_BKIJ[:, :, None].astype(jnp.float32)
    return product.sum(-2)
