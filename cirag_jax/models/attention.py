"""Grouped-query attention over cached or whole sequences, softmax in fp32.

All query heads of a key head are rows of one matrix product, with operands of layout B K (G T) H.
Keys are stored transposed, B K H S, so that both products of a step with few rows read memory
sequentially.
"""

import logging
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

log = logging.getLogger(__name__)

Implementation = Literal["transposed", "xla", "cudnn"]
MASKED = -1e30  # finite, so that a fully masked row has no NaN


def choose(
    dtype: str, head_dim: int, platform: str | None, *, plain: bool = False, fusible: bool = True
) -> Implementation:
    """Returns and logs the attention implementation for a platform (None: JAX's default).

    It is ``transposed`` on CPUs and if ``plain`` is set; ``cudnn``, NVIDIA's fused kernel, for
    16-bit operands and head sizes up to 128 in multiples of 8, if ``fusible``; otherwise ``xla``.
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
    """Factor on the products of queries and keys, and the soft cap after it, or None."""

    scale: float
    softcap: float | None = None


class Branches(NamedTuple):
    """Alternative continuations of a common past, stored one after another in the cache.

    Attributes:
      start_B: int32 slot at which the past ends and the first branch begins.
      size: tokens per branch.
    """

    start_B: jax.Array
    size: int

    def skipped(self, slots_BT: jax.Array) -> jax.Array:
        """Returns the number of tokens of other branches before each token's branch, ``[B, T]``."""
        return (slots_BT - self.start_B[:, None]) // self.size * self.size


def distances(
    slots_BT: jax.Array, keys_S: jax.Array, branches: Branches | None = None
) -> jax.Array:
    """Returns the distance from slots back to keys, int32 ``[B, T, S]``; negative is masked."""
    back_BTS = slots_BT[:, :, None] - keys_S
    if branches is None:
        return back_BTS
    start_B11 = branches.start_B[:, None, None]
    skipped_BT1 = branches.skipped(slots_BT)[:, :, None]
    own_BTS = jnp.where(keys_S < start_B11 + skipped_BT1, -1, back_BTS)
    return jnp.where(keys_S < start_B11, back_BTS - skipped_BT1, own_BTS)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns ``cap * tanh(x / cap)`` (Gemma 2), or ``x`` if ``cap`` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _scores(
    scoring: Scoring, q_BTNH: jax.Array, k_BKHS: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Returns masked scores, fp32 ``[B, K, G, T, S]`` with G query heads per key head."""
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
    """Returns grouped-query attention, ``mixed_BTNH`` in the dtype of the values."""
    b, t, n, h = q_BTNH.shape
    scores = _scores(scoring, q_BTNH, k_BKHS, mask_BTS)
    probs = jax.nn.softmax(scores, axis=-1).astype(v_BKSH.dtype)
    probs_BKRS = probs.reshape(b, k_BKHS.shape[1], -1, k_BKHS.shape[3])
    mixed_BKRH = jax.lax.dot_general(probs_BKRS, v_BKSH, (((3,), (2,)), ((0, 1), (0, 1))))
    mixed = mixed_BKRH.reshape(b, k_BKHS.shape[1], n // k_BKHS.shape[1], t, h)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def probabilities(
    scoring: Scoring, q_BTNH: jax.Array, k_BKHS: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Returns the attention probabilities of `attend`, fp32 ``[B, T, N, S]``."""
    b, t, n, _ = q_BTNH.shape
    probs = jax.nn.softmax(_scores(scoring, q_BTNH, k_BKHS, mask_BTS), axis=-1)
    return probs.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)
