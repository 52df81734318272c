"""Reads fields of ``config.json`` that encoders and decoders share: rotary positions, windows."""

import math
from collections.abc import Sequence
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.models.io.folders import ConfigFields
from cirag_jax.models.rope import Rope, RopeScaling

LAYER_TYPES = ("full_attention", "sliding_attention")


def parse_layer_types(fields: ConfigFields, types: Any, layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has an attention window, from the value of ``layer_types``."""
    is_list = isinstance(types, list) and len(types) == layers
    if not is_list or any(kind not in LAYER_TYPES for kind in types):
        supported = f"{layers} times one of {', '.join(LAYER_TYPES)}"
        raise fields.unsupported("layer_types", types, supported)
    return tuple(kind == "sliding_attention" for kind in types)


def parse_rope(
    fields: ConfigFields, name: str, raw: Any, theta: float, kinds: Sequence[str]
) -> Rope:
    """Returns the rotary positions that field ``name``, an object ``raw``, describes.

    ``theta`` is the default base. ``kinds`` are the supported kinds of scaling, see `RopeScaling`.
    """
    if not isinstance(raw, dict):
        raise fields.unsupported(name, raw, "an object")
    rope = ConfigFields(raw, f"{fields.where}: field {name}")
    theta = float(rope.number("rope_theta", theta))
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind not in kinds:
        raise rope.unsupported("rope_type", kind, ", ".join(("default", *kinds)))
    # Older files often give the trained length only as max_position_embeddings.
    positions, trained = fields.count("max_position_embeddings"), "original_max_position_embeddings"
    original = rope.count(trained, positions)
    if fields.raw.get("model_type") == "phi3":  # it stands outside, also in newer files
        original = fields.count(trained)
    if raw.get("factor") is None and kind in ("yarn", "longrope"):
        factor = positions / original
    else:
        factor = float(rope.number("factor"))
    if factor <= 0.0:
        raise rope.unsupported("factor", factor, "numbers above 0")
    if kind == "dynamic":  # transformers ignores original_max_position_embeddings
        return Rope(theta, RopeScaling("dynamic", factor, positions))
    if kind == "linear":
        return Rope(theta, RopeScaling("linear", factor))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return Rope(theta, RopeScaling("llama3", factor, original, float(low), float(high)))
    if kind == "longrope":
        return Rope(theta, _longrope(rope, factor, original))
    if not rope.flag("truncate", True):
        raise rope.unsupported("truncate", False, "true")
    scaling = RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=float(rope.number("beta_fast", 32.0)),
        beta_slow=float(rope.number("beta_slow", 1.0)),
        attention_factor=_attention_factor(rope, factor),
    )
    return Rope(theta, scaling)


def check_factors(fields: ConfigFields, rope: Rope, planes: int) -> None:
    """Raises `UserError` if ``longrope`` has other than one divisor for each of ``planes``."""
    for name, factors in zip(("short_factor", "long_factor"), rope.factors, strict=False):
        if rope.switch and len(factors) != planes:
            raise UserError(
                f"{fields.where}: field {name} has {len(factors)} numbers; a head needs {planes}, "
                "one for each two dimensions that rotate"
            )


def _longrope(rope: ConfigFields, factor: float, original: int) -> RopeScaling:
    """Returns LongRoPE's scaling (Ding et al., 2024), with the default of its attention factor."""
    divisors = []
    for name in ("short_factor", "long_factor"):
        values: Any = rope.raw.get(name)
        is_list = isinstance(values, list) and bool(values)
        if not is_list or not all(type(v) in (int, float) and 0 < v < math.inf for v in values):
            raise rope.unsupported(name, values, "a list of positive numbers")
        divisors.append(tuple(map(float, values)))
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=float(rope.number("attention_factor", grown)),
        short_factors=divisors[0],
        long_factors=divisors[1],
    )


def _attention_factor(fields: ConfigFields, factor: float) -> float:
    """YaRN's factor on sine and cosine; defaults to 0.1 ln(factor) + 1 (Peng et al., 2023)."""
    if fields.raw.get("attention_factor") is not None:
        return float(fields.number("attention_factor"))

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.raw.get("mscale") and fields.raw.get("mscale_all_dim"):
        return scale(fields.number("mscale")) / scale(fields.number("mscale_all_dim"))
    return scale(1.0)
