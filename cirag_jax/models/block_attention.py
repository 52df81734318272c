"""Block-sparse attention over packed rows, for training on CPUs.

A row of packed conversations is mostly masked, and the scores of a whole row do not fit a
processor's cache. Only blocks with a visible score are computed, and computed again in the backward
pass. Source: Dao et al. (2022), FlashAttention, algorithms 1 and 4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from cirag_jax.models.attention import MASKED, Scoring, softcap

BLOCK = 256  # queries, and keys, per block
SAVED = "block_attention"  # name for remat policies: small, and expensive to recompute
_EVERYTHING = 1 << 30  # no window


class Visibility(NamedTuple):
    """Mask of packed rows: a token attends to its segment up to itself, and to the shared prefix.

    Padding attends to nothing and is masked for all tokens.

    Attributes:
      segments_BT: int32 segment of each token, from 1; padding has 0 or less.
      positions_BT: int32 positions, used for windows.
      shared_B: int32 length of each row's prefix, to which all later tokens attend.
      pairs_P: int32 visible blocks as ``queries * num_blocks + keys``, ascending, then padding.
      count: int32 scalar, number of visible blocks.
    """

    segments_BT: jax.Array
    positions_BT: jax.Array
    shared_B: jax.Array
    pairs_P: jax.Array
    count: jax.Array

    def mask(self, length: int, window: int | jax.Array) -> jax.Array:
        """Returns the dense mask of the first ``length`` tokens, ``[B, T, T]``."""
        return _seen(self, window, 0, 0, length)


def make_visibility(
    segments_BT: jax.Array, positions_BT: jax.Array, shared_B: jax.Array | None = None
) -> Visibility:
    """Returns the mask of rows of any length; compute it once for all layers."""
    length = segments_BT.shape[1]
    missing = -length % BLOCK
    segments_BT = jnp.pad(segments_BT, ((0, 0), (0, missing)), constant_values=-1)
    positions_BT = jnp.pad(positions_BT, ((0, 0), (0, missing)))
    if shared_B is None:
        shared_B = jnp.zeros(segments_BT.shape[0], jnp.int32)
    blocks = segments_BT.shape[1] // BLOCK
    nothing = jnp.zeros(0, jnp.int32)
    visible = Visibility(segments_BT, positions_BT, shared_B, nothing, jnp.int32(0))
    seen_BTS = visible.mask(segments_BT.shape[1], _EVERYTHING)
    seen_IJ = seen_BTS.reshape(-1, blocks, BLOCK, blocks, BLOCK).any((0, 2, 4))
    size = blocks * (blocks + 1) // 2
    (pairs_P,) = jnp.nonzero(seen_IJ.ravel(), size=size, fill_value=0)
    return visible._replace(pairs_P=pairs_P.astype(jnp.int32), count=seen_IJ.sum(dtype=jnp.int32))


def attend_visible(
    scoring: Scoring,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    visible: Visibility,
    window: int | jax.Array,
) -> jax.Array:
    """Returns grouped-query attention, ``mixed_BTNH`` in the dtype of the values.

    Args:
      scoring: factor and soft cap.
      q_BTNH: queries.
      k_BTKH: keys of the same tokens.
      v_BTKH: values of the same tokens.
      visible: mask of these tokens.
      window: a token attends only to tokens fewer positions back than this.
    """
    length, groups = q_BTNH.shape[1], q_BTNH.shape[2] // k_BTKH.shape[2]
    missing = visible.segments_BT.shape[1] - length

    def heads_first(x):
        return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    q_BNTH = heads_first(q_BTNH)
    q_BKGTH = q_BNTH.reshape(q_BNTH.shape[0], -1, groups, *q_BNTH.shape[2:])
    mixed_BKGTH: Any = _attend(
        scoring, q_BKGTH, heads_first(k_BTKH), heads_first(v_BTKH), visible, jnp.int32(window)
    )
    return mixed_BKGTH.reshape(q_BNTH.shape).transpose(0, 2, 1, 3)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scoring, q_BKGTH, k_BKTH, v_BKTH, visible, window):
    return _forward(scoring, q_BKGTH, k_BKTH, v_BKTH, visible, window)[0]


def _forward(scoring, q_BKGTH, k_BKTH, v_BKTH, visible, window):
    """Computes a running softmax over visible blocks; also returns log normalizers."""
    k_BKHT = k_BKTH.swapaxes(2, 3)

    def block(p, state):
        most_BKGT, total_BKGT, mixed_BKGTH = state
        i, j = _places(visible, p)
        products = _multiply("bkgth,bkhs->bkgts", _take(q_BKGTH, i, 3), _take(k_BKHT, j, 3))
        seen_BTS = _seen(visible, window, i * BLOCK, j * BLOCK, BLOCK)
        scores, _ = _scores(scoring, products, seen_BTS[:, None, None])
        most, total = _take(most_BKGT, i, 3), _take(total_BKGT, i, 3)
        new = jnp.maximum(most, scores.max(-1))
        weights = jnp.exp(scores - new[..., None])
        decay = jnp.exp(most - new)
        v_BKCH = _take(v_BKTH, j, 2)
        added = _multiply("bkgts,bksh->bkgth", weights.astype(v_BKCH.dtype), v_BKCH)
        mixed = _take(mixed_BKGTH, i, 3) * decay[..., None] + added
        return (
            _put(most_BKGT, new, i, 3),
            _put(total_BKGT, total * decay + weights.sum(-1), i, 3),
            _put(mixed_BKGTH, mixed, i, 3),
        )

    rows = q_BKGTH.shape[:-1]
    state = (
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(q_BKGTH.shape, jnp.float32),
    )
    most, total, mixed = jax.lax.fori_loop(jnp.int32(0), visible.count, block, state)
    total = jnp.where(total == 0, 1.0, total)  # padding, for which no block was computed
    mixed = checkpoint_name((mixed / total[..., None]).astype(v_BKTH.dtype), SAVED)
    normaliser = checkpoint_name(most + jnp.log(total), SAVED)
    return mixed, (q_BKGTH, k_BKTH, v_BKTH, visible, window, mixed, normaliser)


def _backward(scoring, kept, slope_BKGTH):
    """Returns the gradients of queries, keys and values; recomputes the scores.

    A block's scores have keys first (``[B, K, S, G, T]``), and operands are transposed once for all
    blocks, so that no product transposes an array as large as the scores.
    """
    q_BKGTH, k_BKTH, v_BKTH, visible, window, mixed_BKGTH, normaliser_BKGT = kept
    inner_BKGT = jnp.sum(slope_BKGTH.astype(jnp.float32) * mixed_BKGTH.astype(jnp.float32), -1)
    q_BKHGT, slope_BKHGT = (x.transpose(0, 1, 4, 2, 3) for x in (q_BKGTH, slope_BKGTH))
    k_BKHT = k_BKTH.swapaxes(2, 3)

    def block(p, state):
        dq_BKHGT, dk_BKTH, dv_BKTH = state
        i, j = _places(visible, p)
        products = _multiply("bksh,bkhgt->bksgt", _take(k_BKTH, j, 2), _take(q_BKHGT, i, 4))
        seen_BST = _seen(visible, window, i * BLOCK, j * BLOCK, BLOCK).swapaxes(1, 2)
        scores, capped = _scores(scoring, products, seen_BST[:, None, :, None])
        weights = jnp.exp(scores - _take(normaliser_BKGT, i, 3)[:, :, None])
        ds = _multiply("bksh,bkhgt->bksgt", _take(v_BKTH, j, 2), _take(slope_BKHGT, i, 4))
        ds = (ds - _take(inner_BKGT, i, 3)[:, :, None]) * weights * scoring.scale
        if scoring.softcap is not None:
            ds = ds * (1.0 - jnp.square(capped / scoring.softcap))
        ds, weights = ds.astype(q_BKGTH.dtype), weights.astype(v_BKTH.dtype)
        dq = _multiply("bkhs,bksgt->bkhgt", _take(k_BKHT, j, 3), ds)
        dk = _multiply("bksgt,bkgth->bksh", ds, _take(q_BKGTH, i, 3))
        dv = _multiply("bksgt,bkgth->bksh", weights, _take(slope_BKGTH, i, 3))
        return (
            _put(dq_BKHGT, _take(dq_BKHGT, i, 4) + dq, i, 4),
            _put(dk_BKTH, _take(dk_BKTH, j, 2) + dk, j, 2),
            _put(dv_BKTH, _take(dv_BKTH, j, 2) + dv, j, 2),
        )

    state = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_BKHGT, k_BKTH, v_BKTH))
    slopes: Any = jax.lax.fori_loop(jnp.int32(0), visible.count, block, state)
    dq_BKHGT, dk_BKTH, dv_BKTH = slopes
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (visible, window))
    return (
        dq_BKHGT.transpose(0, 1, 3, 4, 2).astype(q_BKGTH.dtype),
        dk_BKTH.astype(k_BKTH.dtype),
        dv_BKTH.astype(v_BKTH.dtype),
        *nothing,
    )


_attend.defvjp(_forward, _backward)


def _scores(scoring, products, seen):
    """Returns the scores of a block, masked and unmasked."""
    capped = softcap(products * scoring.scale, scoring.softcap)
    return jnp.where(seen, capped, MASKED), capped


def _seen(visible, window, queries, keys, size):
    """Returns the mask of a block of ``size`` queries and ``size`` keys."""

    def part(x_BT, start):
        return jax.lax.dynamic_slice_in_dim(x_BT, start, size, 1)

    index = jnp.arange(size, dtype=jnp.int32)
    own_BT1 = part(visible.segments_BT, queries)[:, :, None]
    same = own_BT1 == part(visible.segments_BT, keys)[:, None]
    same |= (keys + index)[None, None, :] < visible.shared_B[:, None, None]
    causal = (queries + index)[None, :, None] >= (keys + index)[None, None, :]
    distance = part(visible.positions_BT, queries)[:, :, None]
    distance = distance - part(visible.positions_BT, keys)[:, None]
    return (own_BT1 > 0) & same & causal & (distance < window)


def _places(visible, p):
    blocks = visible.segments_BT.shape[1] // BLOCK
    return visible.pairs_P[p] // blocks, visible.pairs_P[p] % blocks


def _take(x, block, axis):
    return jax.lax.dynamic_slice_in_dim(x, block * BLOCK, BLOCK, axis)


def _put(x, value, block, axis):
    return jax.lax.dynamic_update_slice_in_dim(x, value, block * BLOCK, axis)


def _multiply(spec, a, b):
    """Computes a batched product in fp32."""
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
