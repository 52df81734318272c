"""Low-rank product and dropout of LoRA adapters, both optimized for CPUs."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cirag_jax.models import precision
from cirag_jax.models.precision import Weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def low_rank(
    scale: float, x: jax.Array, pairs: Sequence[tuple[Weight, Weight]]
) -> tuple[jax.Array, ...]:
    """Returns ``scale * x A B`` of each pair (A, B), in the dtype of ``x``.

    The matrices A are multiplied as one matrix, because a product with few columns is limited by
    memory bandwidth: it reads ``x`` once, and its gradient is written once.

    The hand-written backward pass flattens all tokens into one axis before it multiplies. It
    accumulates gradients in the dtype of the weights, or in fp32 for `Rounded` weights. A layer of
    SmolLM2-135M with rank 64 takes 210 ms on a CPU, and 280 ms with JAX's automatic gradient.
    """
    return _low_rank_forward(scale, x, pairs)[0]


def _value(weight: Weight, dtype: Any) -> jax.Array:
    return precision.weight_value(weight).astype(dtype)


def _join(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _split(x: jax.Array, pairs: Sequence[tuple[Weight, Weight]]) -> list[jax.Array]:
    """Splits the last axis of ``x`` into the ranks of the pairs."""
    ranks = [precision.weight_value(b).shape[0] for _, b in pairs]
    return jnp.split(x, list(itertools.accumulate(ranks[:-1])), axis=-1)


def _low_rank_forward(scale, x, pairs):
    a_IR = _join([_value(a, x.dtype) for a, _ in pairs])
    down = checkpoint_name((x @ a_IR) * jnp.asarray(scale, x.dtype), "projection")
    parts = zip(_split(down, pairs), pairs, strict=True)
    residuals = [tuple(map(precision.residual_of, pair)) for pair in pairs]
    return tuple(part @ _value(b, x.dtype) for part, (_, b) in parts), (x, down, residuals)


def _low_rank_backward(scale, saved, dys):
    x, down, pairs = saved
    a_IR = _join([_value(a, x.dtype) for a, _ in pairs])
    x_MI, down_MR, *dys_MO = (v.reshape(-1, v.shape[-1]) for v in (x, down, *dys))
    ddowns = [dy @ _value(b, x.dtype).T for dy, (_, b) in zip(dys_MO, pairs, strict=True)]
    ddown_MR = _join(ddowns) * jnp.asarray(scale, x.dtype)
    dx = (ddown_MR @ a_IR.T).reshape(x.shape)

    def gradient(weight, left, right):
        dtype = precision.gradient_dtype(weight)
        tokens = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(left, right, tokens, preferred_element_type=dtype)

    das = _split(gradient(pairs[0][0], x_MI, ddown_MR), pairs)
    dbs = [
        gradient(b, part, dy)
        for part, dy, (_, b) in zip(_split(down_MR, pairs), dys_MO, pairs, strict=True)
    ]
    gradients = [
        tuple(map(precision.cotangent_of, pair, gradient))
        for pair, gradient in zip(pairs, zip(das, dbs, strict=True), strict=True)
    ]
    return dx, gradients


low_rank.defvjp(_low_rank_forward, _low_rank_backward)


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Applies inverted dropout, about four times as fast as with `jax.random.bernoulli` on a CPU.

    One random 32-bit word serves two neighbors on the last axis, so the rate is rounded to a
    multiple of 2**-16. Elements further apart might be on different devices. An array of
    2048 x 1536 takes 15 ms instead of 63 ms.
    """
    half = -(-x.shape[-1] // 2)
    words = jax.random.bits(key, (*x.shape[:-1], half), jnp.uint32)
    draws = (words[..., None] >> jnp.array([0, 16], jnp.uint32)) & 0xFFFF
    draws = draws.reshape(*x.shape[:-1], 2 * half)[..., : x.shape[-1]]
    keep = draws >= round(rate * 2**16)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
