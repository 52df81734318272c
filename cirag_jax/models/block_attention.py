"""Attention for training on CPUs, which skips fully masked blocks of scores.

Most scores of a row of packed conversations are masked, and the scores of a complete row do not fit
a processor's cache. The backward pass recomputes the scores. Source: Dao et al. (2022),
FlashAttention, algorithms 1 and 4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from cirag_jax.models import attention
from cirag_jax.models.attention import MASKED, Scoring

BLOCK = 256  # number of queries, and of keys, in one block
SAVED = "block_attention"  # checkpoint name for remat policies: small, expensive to recompute
_NO_WINDOW = 1 << 30


class Visibility(NamedTuple):
    """The attention mask of packed rows, in compact form.

    A token attends to earlier tokens of its segment and to the shared prefix; without causality,
    also to later tokens. Padding is masked.

    Attributes:
      segments_BT: int32 segment of each token, counted from 1; 0 or negative for padding.
      positions_BT: int32 positions; windows limit their differences.
      shared_B: int32 length of each row's shared prefix, which all later tokens attend to.
      ahead: int32 scalar, how many tokens ahead a token may attend to.
      pairs_P: int32 indices of visible blocks (those with an unmasked score), ascending, then
        padding. An index is ``query_block * num_blocks + key_block``.
      count: int32 scalar, the number of visible blocks.
    """

    segments_BT: jax.Array
    positions_BT: jax.Array
    shared_B: jax.Array
    ahead: jax.Array
    pairs_P: jax.Array
    count: jax.Array

    def mask(self, length: int, window: int | jax.Array) -> jax.Array:
        """Returns the mask of the first ``length`` tokens, ``[B, T, T]``."""
        return _mask(self, window, 0, 0, length)


def make_visibility(
    segments_BT: jax.Array,
    positions_BT: jax.Array,
    shared_B: jax.Array | None = None,
    *,
    causal: bool = True,
) -> Visibility:
    """Returns the `Visibility` of packed rows; one result serves all layers."""
    length = segments_BT.shape[1]
    missing = -length % BLOCK
    segments_BT = jnp.pad(segments_BT, ((0, 0), (0, missing)), constant_values=-1)
    positions_BT = jnp.pad(positions_BT, ((0, 0), (0, missing)))
    if shared_B is None:
        shared_B = jnp.zeros(segments_BT.shape[0], jnp.int32)
    blocks = segments_BT.shape[1] // BLOCK
    no_pairs = jnp.zeros(0, jnp.int32)
    ahead = jnp.int32(0 if causal else _NO_WINDOW)
    visible = Visibility(segments_BT, positions_BT, shared_B, ahead, no_pairs, jnp.int32(0))
    seen_BTS = visible.mask(segments_BT.shape[1], _NO_WINDOW)
    seen_IJ = seen_BTS.reshape(-1, blocks, BLOCK, blocks, BLOCK).any((0, 2, 4))
    size = blocks * (blocks + 1) // 2 if causal else blocks**2
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
    """Grouped-query attention: returns ``mixed_BTNH`` in the dtype of the values.

    Softmax is in fp32. A token attends only to tokens fewer than ``window`` positions away.
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
    """Running softmax over the visible blocks; the residuals include the log of the normalizer."""
    k_BKHT = k_BKTH.swapaxes(2, 3)

    def block(p, state):
        i, j = _block_pair(visible, p)
        products = _multiply("bkgth,bkhs->bkgts", _take(q_BKGTH, i, 3), _take(k_BKHT, j, 3))
        mask_BTS = _mask(visible, window, i * BLOCK, j * BLOCK, BLOCK)
        scores, _ = _scores(scoring, products, mask_BTS[:, None, None])
        v_BKCH = _take(v_BKTH, j, 2)
        updated = attention.update_softmax(
            tuple(_take(x, i, 3) for x in state),
            scores,
            lambda weights: _multiply("bkgts,bksh->bkgth", weights.astype(v_BKCH.dtype), v_BKCH),
        )
        return tuple(_put(x, part, i, 3) for x, part in zip(state, updated, strict=True))

    state = attention.start_softmax(q_BKGTH)
    maximum, total, mixed = jax.lax.fori_loop(jnp.int32(0), visible.count, block, state)
    total = jnp.where(total == 0, 1.0, total)  # 0 for padding in blocks that are not visible
    mixed = checkpoint_name((mixed / total[..., None]).astype(v_BKTH.dtype), SAVED)
    normalizer = checkpoint_name(maximum + jnp.log(total), SAVED)
    return mixed, (q_BKGTH, k_BKTH, v_BKTH, visible, window, mixed, normalizer)


def _backward(scoring, residuals, dmixed_BKGTH):
    """Gradients of queries, keys and values; recomputes the scores.

    Scores of a block have keys first, ``[B, K, S, G, T]``, so that no product transposes an operand
    as large as the scores. Smaller operands are transposed once for all blocks.
    """
    q_BKGTH, k_BKTH, v_BKTH, visible, window, mixed_BKGTH, normalizer_BKGT = residuals
    inner_BKGT = jnp.sum(dmixed_BKGTH.astype(jnp.float32) * mixed_BKGTH.astype(jnp.float32), -1)
    q_BKHGT, dmixed_BKHGT = (x.transpose(0, 1, 4, 2, 3) for x in (q_BKGTH, dmixed_BKGTH))
    k_BKHT = k_BKTH.swapaxes(2, 3)

    def block(p, state):
        dq_BKHGT, dk_BKTH, dv_BKTH = state
        i, j = _block_pair(visible, p)
        products = _multiply("bksh,bkhgt->bksgt", _take(k_BKTH, j, 2), _take(q_BKHGT, i, 4))
        mask_BST = _mask(visible, window, i * BLOCK, j * BLOCK, BLOCK).swapaxes(1, 2)
        scores, capped = _scores(scoring, products, mask_BST[:, None, :, None])
        weights = jnp.exp(scores - _take(normalizer_BKGT, i, 3)[:, :, None])
        ds = _multiply("bksh,bkhgt->bksgt", _take(v_BKTH, j, 2), _take(dmixed_BKHGT, i, 4))
        ds = (ds - _take(inner_BKGT, i, 3)[:, :, None]) * weights * scoring.scale
        if scoring.softcap is not None:
            ds = ds * (1.0 - jnp.square(capped / scoring.softcap))
        ds, weights = ds.astype(q_BKGTH.dtype), weights.astype(v_BKTH.dtype)
        dq = _multiply("bkhs,bksgt->bkhgt", _take(k_BKHT, j, 3), ds)
        dk = _multiply("bksgt,bkgth->bksh", ds, _take(q_BKGTH, i, 3))
        dv = _multiply("bksgt,bkgth->bksh", weights, _take(dmixed_BKGTH, i, 3))
        return (
            _put(dq_BKHGT, _take(dq_BKHGT, i, 4) + dq, i, 4),
            _put(dk_BKTH, _take(dk_BKTH, j, 2) + dk, j, 2),
            _put(dv_BKTH, _take(dv_BKTH, j, 2) + dv, j, 2),
        )

    state = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_BKHGT, k_BKTH, v_BKTH))
    gradients: Any = jax.lax.fori_loop(jnp.int32(0), visible.count, block, state)
    dq_BKHGT, dk_BKTH, dv_BKTH = gradients
    no_gradient = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (visible, window))
    return (
        dq_BKHGT.transpose(0, 1, 3, 4, 2).astype(q_BKGTH.dtype),
        dk_BKTH.astype(k_BKTH.dtype),
        dv_BKTH.astype(v_BKTH.dtype),
        *no_gradient,
    )


_attend.defvjp(_forward, _backward)


def _scores(scoring, products, mask):
    """Returns the scores of one block, masked and unmasked."""
    capped = attention.softcap(products * scoring.scale, scoring.softcap)
    return jnp.where(mask, capped, MASKED), capped


def _mask(visible, window, queries, keys, size):
    """Returns the mask of ``size`` queries and ``size`` keys, starting at the two given tokens."""

    def part(x_BT, start):
        return jax.lax.dynamic_slice_in_dim(x_BT, start, size, 1)

    index = jnp.arange(size, dtype=jnp.int32)
    segments_BT1 = part(visible.segments_BT, queries)[:, :, None]
    same = segments_BT1 == part(visible.segments_BT, keys)[:, None]
    same |= (keys + index)[None, None, :] < visible.shared_B[:, None, None]
    reach = (queries + index)[None, :, None] + visible.ahead
    reached = reach >= (keys + index)[None, None, :]
    distance = part(visible.positions_BT, queries)[:, :, None]
    distance = distance - part(visible.positions_BT, keys)[:, None]
    return (segments_BT1 > 0) & same & reached & (jnp.abs(distance) < window)


def _block_pair(visible, p):
    blocks = visible.segments_BT.shape[1] // BLOCK
    return visible.pairs_P[p] // blocks, visible.pairs_P[p] % blocks


def _take(x, block, axis):
    return jax.lax.dynamic_slice_in_dim(x, block * BLOCK, BLOCK, axis)


def _put(x, value, block, axis):
    return jax.lax.dynamic_update_slice_in_dim(x, value, block * BLOCK, axis)


def _multiply(spec, a, b):
    """Batched product, accumulated and returned in fp32."""
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
