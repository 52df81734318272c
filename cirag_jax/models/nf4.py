"""Kernels in 4 bits, for a frozen base with an adapter (QLoRA, Dettmers et al., 2023).

NormalFloat (NF4) has 16 values: quantiles of a normal distribution, scaled to [-1, 1]. The weights
of a block share an fp32 scale, their largest absolute value. With blocks of 64, a weight takes 4.5
bits. The scales themselves are not quantized.

Blocks are along the inputs of a kernel, as in bitsandbytes. Both arrays have as many axes as the
kernel, so that they are split over devices by the kernel's logical axes.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cirag_jax.errors import UserError

BLOCK = 64  # Inputs of a block, or the largest power of two that divides their number.
# The values of bitsandbytes' `create_normal_map`.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


class Nf4(NamedTuple):
    """A kernel ``(..., inputs, outputs)`` in 4 bits, without a gradient.

    Attributes:
      codes: uint8 ``(..., inputs / 2, outputs)``, indices in `LEVELS`: the lower four bits are of
        an input with an even number, the upper ones of the next input.
      scales: fp32 ``(..., inputs / block, outputs)``.
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        *leading, pairs, outputs = self.codes.shape
        return (*leading, 2 * pairs, outputs)


def shapes(shape: tuple[int, ...]) -> Nf4:
    """Returns the shapes of the arrays of a kernel of ``shape``."""
    *leading, inputs, outputs = shape
    block = math.gcd(inputs, BLOCK)
    if block == 1:
        raise UserError(f"nf4 needs kernels with an even number of inputs, not {inputs}")
    return Nf4((*leading, inputs // 2, outputs), (*leading, inputs // block, outputs))


def quantize(kernel: jax.Array) -> Nf4:
    """Returns ``kernel`` with each weight rounded to the nearest of the block's 16 values.

    The leading axis of kernels of several layers is a loop, which saves memory.
    """
    if kernel.ndim > 2:
        return jax.lax.map(quantize, kernel)
    codes_shape, scales_shape = shapes(kernel.shape)
    blocks = kernel.astype(jnp.float32).reshape(scales_shape[0], -1, kernel.shape[1])
    scales = jnp.abs(blocks).max(1)
    normed = blocks / jnp.where(scales > 0, scales, 1.0)[:, None]
    codes = jnp.zeros(normed.shape, jnp.uint8)
    for low, high in zip(LEVELS, LEVELS[1:], strict=False):
        codes += (normed > (low + high) / 2).astype(jnp.uint8)
    pairs = codes.reshape(codes_shape[0], 2, codes_shape[1])
    return Nf4(pairs[:, 0] | (pairs[:, 1] << 4), scales)


def dequantize(kernel: Nf4, dtype: Any) -> jax.Array:
    """Returns the kernel, computed in fp32 and rounded to ``dtype``."""
    *leading, _, outputs = kernel.shape
    codes = jnp.stack([kernel.codes & 15, kernel.codes >> 4], axis=-2)
    codes = codes.reshape(*leading, kernel.scales.shape[-2], -1, outputs)
    values = jnp.asarray(LEVELS, jnp.float32).at[codes].get(mode="promise_in_bounds")
    return (values * kernel.scales[..., None, :]).reshape(kernel.shape).astype(dtype)
