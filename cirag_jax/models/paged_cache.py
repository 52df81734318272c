"""Keys and values in pages: P pages of C tokens, of which a row's table names N, in order.

They are written, read and attended to here; which page is whose is the engine's matter. Keys are
held transposed, see `attention`. On a CPU attention reads the pages themselves; elsewhere a row's
pages are laid out in one piece first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from cirag_jax.models.attention import MASKED, Branches, Scoring, distances, softcap

# One array a layer: "k" of [P, K, H, C], "v" of [P, K, C, H].
Cache = dict[str, tuple[jax.Array, ...]]

_GROUP = 4  # rows that are read together


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


# --------------------------------------------------------------------------------- written, read


def laid_out(cache: Cache, tables_BN: jax.Array) -> Cache:
    """A cache in which each row has one page, its pages of ``cache`` one after another."""
    pairs = [read_pages(*layer, tables_BN) for layer in zip(cache["k"], cache["v"], strict=True)]
    keys, values = zip(*pairs, strict=True)
    return {"k": keys, "v": values}


def written_back(
    cache: Cache, rows: Cache, tables_BN: jax.Array, start_B: jax.Array, count: int
) -> Cache:
    """``cache`` with ``count`` tokens from ``start_B`` on of what was `laid_out` as ``rows``."""
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
    """Page and place on it of each slot, int32 ``[B, T]``; where there is none, beyond the last."""
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
    """Pages of keys and values with new ones at `places`."""
    page_BT, offset_BT = at_BT
    k_PKHC = k_PKHC.at[page_BT, :, :, offset_BT].set(k_BTKH, mode="drop")
    return k_PKHC, v_PKCH.at[page_BT, :, offset_BT].set(v_BTKH, mode="drop")


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
