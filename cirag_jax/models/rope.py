"""Rotary position embeddings (RoFormer, Su et al., 2021) and their scaling to longer contexts."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary positions beyond the trained length.

    Attributes:
      kind: ``linear`` divides all frequencies by ``factor``. ``llama3`` (Llama 3.1) divides only
        low frequencies, with a ramp between divided and unchanged frequencies. ``yarn`` is the
        method of Peng et al., 2023.
      factor: ratio of the new length to the trained one.
      original_positions: the trained length, in tokens.
      low_frequency, high_frequency: ends of the ramp in ``llama3``, in turns over the trained
        length.
      beta_fast, beta_slow: ends of the ramp in ``yarn``, in the same unit.
      attention_factor: factor on sines and cosines in ``yarn``.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_positions: int = 8192
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[list[float], float]:
    """Returns ``head_dim / 2`` angular frequencies, and the factor on sine and cosine.

    Dimension pair ("plane") i of a head is rotated with frequency i. Source: RoFormer, section 3.2.
    """
    half = head_dim // 2
    base = [theta ** (-i / half) for i in range(half)]
    if scaling is None:
        return base, 1.0
    if scaling.kind == "linear":
        return [f / scaling.factor for f in base], 1.0
    if scaling.kind == "yarn":
        return _yarn_frequencies(base, theta, scaling), scaling.attention_factor
    turns = [scaling.original_positions * f / (2 * math.pi) for f in base]
    width = scaling.high_frequency - scaling.low_frequency
    keep = [min(max((t - scaling.low_frequency) / width, 0.0), 1.0) for t in turns]
    return [k * f + (1 - k) * f / scaling.factor for k, f in zip(keep, base, strict=True)], 1.0


def _yarn_frequencies(base: list[float], theta: float, scaling: RopeScaling) -> list[float]:
    half = len(base)

    def plane(turns: float) -> float:
        """Returns the (fractional) plane that turns ``turns`` times over the trained length."""
        span = scaling.original_positions / (turns * 2 * math.pi)
        return half * math.log(span) / math.log(theta)

    low = max(math.floor(plane(scaling.beta_fast)), 0)
    high = min(math.ceil(plane(scaling.beta_slow)), 2 * half - 1)
    ramp = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(half)]
    return [r * f / scaling.factor + (1 - r) * f for r, f in zip(ramp, base, strict=True)]


def rope_tables(
    positions_BT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of int32 positions, fp32 ``[B, T, head_dim / 2]``."""
    frequencies, factor = rope_frequencies(head_dim, theta, scaling)
    angles = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates dimensions i and i + H / 2 of each head by the angles of the position (Llama)."""
    cos, sin = (table[:, :, None, :] for table in tables)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(x_BTNH.dtype)
