"""Grouped-query attention over cached or complete sequences, with softmax in fp32.

The G query heads that share a key head are multiplied as rows of one matrix, so queries have the
layout ``B K (G T) H``. Keys are stored transposed, ``B K H S``. With few rows, both products then
read memory contiguously.
"""

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

log = logging.getLogger(__name__)

Implementation = Literal["transposed", "xla", "cudnn", "splash"]
MASKED = -1e30  # finite, so that a fully masked row has no NaN


def choose_implementation(
    dtype: str,
    head_dim: int,
    platform: str | None,
    *,
    plain: bool = False,
    fusible: bool = True,
    splash: bool = False,
) -> Implementation:
    """Returns and logs the implementation for a platform; None is JAX's default platform.

    The result is ``transposed`` on CPUs or if ``plain`` is set. ``cudnn``, the fused kernel of
    NVIDIA GPUs, needs bf16 operands, a head size of at most 128 that is a multiple of 8, and
    ``fusible``. ``splash`` (`splash.attend`) is that of TPUs, if allowed. In all other cases, the
    result is ``xla``.
    """
    platform = platform or jax.default_backend()
    fusible = fusible and dtype == "bfloat16" and head_dim <= 128 and not head_dim % 8
    choice: Implementation = "xla"
    if platform == "cpu" or plain:
        choice = "transposed"
    elif platform in ("gpu", "cuda") and fusible:
        choice = "cudnn"
    elif platform == "tpu" and splash:
        choice = "splash"
    log.info(
        "attention: %s (platform %s, dtype %s, head size %d)", choice, platform, dtype, head_dim
    )
    return choice


class Scoring(NamedTuple):
    """Scale of the query-key products, and soft cap of the scaled products (None: no cap)."""

    scale: float
    softcap: float | None = None


class Branches(NamedTuple):
    """Alternative continuations of one prefix, stored one after another in the cache.

    Attributes:
      start_B: int32 slot where the prefix ends and the first branch begins.
      size: tokens per branch.
    """

    start_B: jax.Array
    size: int

    def skipped(self, slots_BT: jax.Array) -> jax.Array:
        """Returns how many tokens of earlier branches precede each slot, ``[B, T]``."""
        return (slots_BT - self.start_B[:, None]) // self.size * self.size


def distances(
    slots_BT: jax.Array, keys_S: jax.Array, branches: Branches | None = None
) -> jax.Array:
    """Returns how many tokens each slot comes after each key, int32 ``[B, T, S]``.

    A negative number means that the key is masked.
    """
    distance_BTS = slots_BT[:, :, None] - keys_S
    if branches is None:
        return distance_BTS
    start_B11 = branches.start_B[:, None, None]
    skipped_BT1 = branches.skipped(slots_BT)[:, :, None]
    branch_BTS = jnp.where(keys_S < start_B11 + skipped_BT1, -1, distance_BTS)
    return jnp.where(keys_S < start_B11, distance_BTS - skipped_BT1, branch_BTS)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns ``cap * tanh(x / cap)`` (Gemma 2), or ``x`` if ``cap`` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def group_heads(q_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """Groups queries by key head: returns ``q_BKRH`` with rows ``R = (G T)``."""
    b, t, n, h = q_BTNH.shape
    q_BKGTH = q_BTNH.reshape(b, t, -1, n // num_kv_heads, h).transpose(0, 2, 3, 1, 4)
    return q_BKGTH.reshape(b, num_kv_heads, -1, h)


def ungroup_heads(x_BKRH: jax.Array, length: int) -> jax.Array:
    """Returns ``x_BTNH``: the inverse of `group_heads`."""
    b, k, _, h = x_BKRH.shape
    x_BTKGH = x_BKRH.reshape(b, k, -1, length, h).transpose(0, 3, 1, 2, 4)
    return x_BTKGH.reshape(b, length, -1, h)


def multiply_heads(x_BKRI: jax.Array, y_BKIJ: jax.Array) -> jax.Array:
    """Batched matrix product, accumulated and returned in fp32."""
    contracted = (((3,), (2,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(x_BKRI, y_BKIJ, contracted, preferred_element_type=jnp.float32)


def _grouped_probabilities(
    scoring: Scoring, q_BTNH: jax.Array, k_BKHS: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Returns the attention probabilities, fp32 ``[B, K, G, T, S]``."""
    b, t = q_BTNH.shape[:2]
    scores_BKRS = multiply_heads(group_heads(q_BTNH, k_BKHS.shape[1]), k_BKHS)
    scores = scores_BKRS.reshape(b, k_BKHS.shape[1], -1, t, k_BKHS.shape[3])
    scores = softcap(scores * scoring.scale, scoring.softcap)
    return jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, MASKED), axis=-1)


def attend(
    scoring: Scoring, q_BTNH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Grouped-query attention: returns ``mixed_BTNH`` in the dtype of the values."""
    probs = _grouped_probabilities(scoring, q_BTNH, k_BKHS, mask_BTS).astype(v_BKSH.dtype)
    probs_BKRS = probs.reshape(*k_BKHS.shape[:2], -1, k_BKHS.shape[3])
    mixed_BKRH = jax.lax.dot_general(probs_BKRS, v_BKSH, (((3,), (2,)), ((0, 1), (0, 1))))
    return ungroup_heads(mixed_BKRH, q_BTNH.shape[1])


def probabilities(
    scoring: Scoring, q_BTNH: jax.Array, k_BKHS: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Returns the probabilities with which `attend` weights values, fp32 ``[B, T, N, S]``."""
    b, t, n, _ = q_BTNH.shape
    probs = _grouped_probabilities(scoring, q_BTNH, k_BKHS, mask_BTS)
    return probs.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)


# A running softmax: maximum and total of the weights of each row, and the weighted sum of values.
RunningSoftmax = tuple[jax.Array, ...]


def start_softmax(q: jax.Array) -> RunningSoftmax:
    """Returns the initial running softmax of queries ``[..., H]``, over no keys."""
    maximum = jnp.full(q.shape[:-1], MASKED, jnp.float32)
    return maximum, jnp.zeros(q.shape[:-1], jnp.float32), jnp.zeros(q.shape, jnp.float32)


def update_softmax(
    state: RunningSoftmax, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]
) -> RunningSoftmax:
    """Adds one block of keys to a running softmax (Milakov and Gimelshein, 2018).

    ``weigh`` returns the sum of the block's values under the given weights.
    """
    maximum, total, mixed = state
    new_maximum = jnp.maximum(maximum, scores.max(-1))
    weights = jnp.exp(scores - new_maximum[..., None])
    decay = jnp.exp(maximum - new_maximum)
    total = total * decay + weights.sum(-1)
    return new_maximum, total, mixed * decay[..., None] + weigh(weights)
