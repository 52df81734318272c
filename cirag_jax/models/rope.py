"""Rotary position embeddings (RoFormer, Su et al., 2021) and their scaling to longer contexts."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary positions beyond the trained length.

    Attributes:
      kind: ``linear`` divides all frequencies by ``factor``. ``llama3`` (Llama 3.1) divides only
        low frequencies, with a ramp between divided and unchanged frequencies. ``yarn`` is the
        method of Peng et al., 2023. ``longrope`` (Ding et al., 2024) divides each frequency by
        its own number, which is another one for texts longer than the trained length.
        ``dynamic`` raises the base for texts longer than the trained length, by a power of their
        length (NTK-aware scaling, as in transformers); only encoders support it.
      factor: ratio of the new length to the trained one.
      original_positions: the trained length, in tokens.
      low_frequency, high_frequency: ends of the ramp in ``llama3``, in turns over the trained
        length.
      beta_fast, beta_slow: ends of the ramp in ``yarn``, in the same unit.
      attention_factor: factor on sines and cosines in ``yarn`` and ``longrope``.
      short_factors, long_factors: divisors of the frequencies in ``longrope``, one per frequency.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "dynamic"]
    factor: float
    original_positions: int = 8192
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer: base of the frequencies, and scaling."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    @property
    def factors(self) -> tuple[tuple[float, ...], ...]:
        """The divisors of ``longrope`` for short and for long texts."""
        return (
            () if self.scaling is None else (self.scaling.short_factors, self.scaling.long_factors)
        )

    @property
    def switch(self) -> int | None:
        """The length above which a text has other frequencies (``longrope``), if any."""
        if self.scaling is None or self.scaling.kind != "longrope":
            return None
        return self.scaling.original_positions


def rope_frequencies(dim: int, rope: Rope, *, is_long: bool = False) -> tuple[list[float], float]:
    """Returns ``dim / 2`` angular frequencies, and the factor on sine and cosine.

    Dimension pair ("plane") i of a head is rotated with frequency i. Source: RoFormer, section 3.2.

    Args:
      dim: number of rotated dimensions of a head.
      rope: base and scaling.
      is_long: whether the text is longer than ``rope.switch``.
    """
    theta, scaling = rope.theta, rope.scaling
    base = [theta ** (-i / dim) for i in range(0, dim, 2)]
    if scaling is None or scaling.kind == "dynamic":  # `_tables` scales for each text
        return base, 1.0
    if scaling.kind == "linear":
        return [f / scaling.factor for f in base], 1.0
    if scaling.kind == "longrope":
        divisors = scaling.long_factors if is_long else scaling.short_factors
        return [f / d for f, d in zip(base, divisors, strict=True)], scaling.attention_factor
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
    positions_BT: jax.Array,
    dim: int,
    ropes: Sequence[Rope | None],
    totals_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of int32 positions, fp32 ``[R, B, T, dim / 2]``, for each of R ropes.

    A rope that is None leaves queries and keys unchanged. ``totals_BT`` (or ``[B, 1]``) is the
    length of the text of each token, which is needed if a rope has a `Rope.switch`.
    """
    tables = [_tables(positions_BT, dim, rope, totals_BT) for rope in ropes]
    # Only some ropes may depend on the length of each text.
    cos, sin = (jnp.stack(jnp.broadcast_arrays(*each)) for each in zip(*tables, strict=True))
    return cos, sin


def _tables(positions_BT, dim, rope, totals_BT):
    if rope is None:
        shape = (*positions_BT.shape, -(-dim // 2))
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    values, factor = rope_frequencies(dim, rope)
    frequencies = jnp.asarray(values, jnp.float32)
    if rope.switch is not None:
        longer = jnp.asarray(rope_frequencies(dim, rope, is_long=True)[0], jnp.float32)
        frequencies = jnp.where(totals_BT[..., None] > rope.switch, longer, frequencies)
    if rope.scaling is not None and rope.scaling.kind == "dynamic":
        scale, original = rope.scaling.factor, rope.scaling.original_positions
        ratio = totals_BT[..., None].astype(jnp.float32) / original
        growth = jnp.maximum(scale * ratio - (scale - 1.0), 1.0)
        frequencies = frequencies * growth ** (-jnp.arange(0, dim, 2, jnp.float32) / (dim - 2))
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the first dimensions of each head by the angles of the position (Llama).

    With tables ``[B, T, P]``, dimension i is paired with dimension ``P + i``, and all dimensions
    from ``2 P`` on are left unchanged.
    """
    cos, sin = (table[:, :, None, :] for table in tables)
    planes = cos.shape[-1]
    x32 = x_BTNH[..., : 2 * planes].astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    rotated = rotated.astype(x_BTNH.dtype)
    if 2 * planes == x_BTNH.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_BTNH[..., 2 * planes :]], -1)
