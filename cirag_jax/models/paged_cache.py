"""A key-value cache in P pages of C tokens each; a page table lists the N pages of each row.

This module writes, reads and attends to pages; the generation engine assigns them to rows. Keys are
stored transposed, see `attention`. On a CPU, attention reads the pages in place. On other platforms
the pages of a row are gathered first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from cirag_jax.models import attention
from cirag_jax.models.attention import MASKED, Branches, Scoring

# One array per layer: "k" of [P, K, H, C], "v" of [P, K, C, H].
Cache = dict[str, tuple[jax.Array, ...]]

_GROUP = 4  # rows whose pages are read together


def pack(x: jax.Array, dtype: Any) -> jax.Array:
    """Converts ``x`` to the ``dtype`` of a cache; uint16 stores the bits of bf16.

    A bf16 array would be slow, because XLA on a CPU copies all of it to fp32 and back to write into
    it.
    """
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def unpack(x: jax.Array) -> jax.Array:
    """Undoes `pack`: uint16 becomes fp32, any other dtype is unchanged."""
    if x.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x


def pack_pair(k: jax.Array, v: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Packs keys and values; if a value is not finite, its key becomes NaN instead.

    Attention replaces the scores of masked keys but multiplies masked values by 0, and 0 times NaN
    is NaN. With finite values, NaN spreads only to tokens that attend to the key.
    """
    packed_v = pack(v, dtype)
    finite = jnp.isfinite(unpack(packed_v)).all(-1, keepdims=True)
    packed_k = pack(jnp.where(finite, k, jnp.asarray(jnp.nan, k.dtype)), dtype)
    return packed_k, jnp.where(finite, packed_v, jnp.zeros((), packed_v.dtype))


def gather_rows(cache: Cache, tables_BN: jax.Array) -> Cache:
    """Returns a cache with one long page per row, in which the row's pages are concatenated."""
    pairs = [read_pages(*layer, tables_BN) for layer in zip(cache["k"], cache["v"], strict=True)]
    keys, values = zip(*pairs, strict=True)
    return {"k": keys, "v": values}


def scatter_rows(
    cache: Cache, rows: Cache, tables_BN: jax.Array, start_B: jax.Array, count: int
) -> Cache:
    """Returns ``cache`` with some tokens copied from ``rows``, the result of `gather_rows`.

    In each row, the ``count`` tokens from position ``start_B`` on are copied.
    """
    slots_BT = start_B[:, None] + jnp.arange(count, dtype=jnp.int32)
    at_BT = locate_slots(cache, tables_BN, slots_BT)
    row_B1 = jnp.arange(len(start_B))[:, None]
    pages = [
        write_slots(k, v, at_BT, new_k[row_B1, :, :, slots_BT], new_v[row_B1, :, slots_BT])
        for k, v, new_k, new_v in zip(cache["k"], cache["v"], rows["k"], rows["v"], strict=True)
    ]
    keys, values = zip(*pages, strict=True)
    return {"k": keys, "v": values}


def locate_slots(
    cache: Cache, tables_BN: jax.Array | None, slots_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the page, and the offset in the page, of each slot, int32 ``[B, T]``.

    Slots beyond the page table get a page number beyond the last page.
    """
    num_pages, _, size, _ = cache["v"][0].shape
    if tables_BN is None:
        return jnp.arange(num_pages, dtype=jnp.int32)[:, None], slots_BT
    pages_BT = jnp.take_along_axis(
        tables_BN, slots_BT // size, axis=1, mode="fill", fill_value=num_pages
    )
    return pages_BT, slots_BT % size


def write_slots(
    k_PKHC: jax.Array,
    v_PKCH: jax.Array,
    at_BT: tuple[jax.Array, jax.Array],
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the pages with new keys and values; ``at_BT`` comes from `locate_slots`."""
    page_BT, offset_BT = at_BT
    k_PKHC = k_PKHC.at[page_BT, :, :, offset_BT].set(k_BTKH, mode="drop")
    return k_PKHC, v_PKCH.at[page_BT, :, offset_BT].set(v_BTKH, mode="drop")


def read_pages(k_PKHC: jax.Array, v_PKCH: jax.Array, tables_BN: jax.Array) -> tuple[Any, Any]:
    """Gathers keys ``[B, K, H, N C]`` and values ``[B, K, N C, H]`` of the rows of ``tables_BN``.

    Their dtype is the dtype of the cache, see `pack`. Page numbers beyond the last page yield the
    last page; its values are finite (`pack_pair`), and its keys must be masked.
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
    """Attention over cached pages in place, with a running softmax; see `attention.attend`.

    Tokens at ``slots_BT`` attend to tokens less than ``window`` slots before them. Rows are read in
    groups of `_GROUP`, up to the last page of the longest row in the group, so neighboring rows
    should have similar lengths. Masked pages do not change the result of a row, bit for bit, so the
    result does not depend on neighboring rows. This is for CPUs: on a GPU, a loop of data-dependent
    length costs more than it saves.
    """
    b, t, n, _ = q_BTNH.shape
    kv_heads, size = k_PKHC.shape[1], k_PKHC.shape[3]
    group_size = math.gcd(b, _GROUP)
    q_BKRH = attention.group_heads(q_BTNH, kv_heads)
    q_BKRH = q_BKRH * jnp.asarray(scoring.scale, q_BTNH.dtype)
    slots_BR = jnp.tile(slots_BT, (1, n // kv_heads))
    # The loop runs over the pages of all groups of rows; ends_G is where each group's pages end.
    pages_G = slots_BT.reshape(-1, group_size * t).max(1) // size + 1
    ends_G = jnp.cumsum(jnp.minimum(pages_G, tables_BN.shape[1]))

    def rows_of_group(x: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, row, group_size, 0)

    def page(j, state):
        group = (ends_G <= j).sum(dtype=jnp.int32)
        i = j - jnp.where(group > 0, ends_G[jnp.maximum(group - 1, 0)], 0)
        row = group * group_size
        ids_B = jax.lax.dynamic_index_in_dim(rows_of_group(tables_BN, row), i, 1, keepdims=False)
        k_BKHC = unpack(jnp.take(k_PKHC, ids_B, axis=0, mode="clip"))
        v_BKCH = unpack(jnp.take(v_PKCH, ids_B, axis=0, mode="clip"))
        scores = attention.multiply_heads(rows_of_group(q_BKRH, row), k_BKHC)
        scores = attention.softcap(scores, scoring.softcap)
        keys_C = i * size + jnp.arange(size, dtype=jnp.int32)
        group_branches = branches and Branches(rows_of_group(branches.start_B, row), branches.size)
        distance_BRC = attention.distances(rows_of_group(slots_BR, row), keys_C, group_branches)
        visible_BRC = (distance_BRC >= 0) & (distance_BRC < window)
        updated = attention.update_softmax(
            tuple(rows_of_group(x, row) for x in state),
            jnp.where(visible_BRC[:, None], scores, MASKED),
            lambda weights: attention.multiply_heads(weights.astype(v_BKCH.dtype), v_BKCH),
        )
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(x, part, row, 0)
            for x, part in zip(state, updated, strict=True)
        )

    state = attention.start_softmax(q_BKRH)
    _, total_BKR, mixed_BKRH = jax.lax.fori_loop(jnp.int32(0), ends_G[-1], page, state)
    return attention.ungroup_heads((mixed_BKRH / total_BKR[..., None]).astype(q_BTNH.dtype), t)
