"""Activation functions, and their names in transformers."""

import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

Activation = Literal["identity", "gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh"]

# Names of ``hidden_act`` and similar fields of a transformers config.
TRANSFORMERS_NAMES: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def activate(x: jax.Array, name: Activation) -> jax.Array:
    """Returns the activation of ``x``, in its dtype; ``gelu`` is computed in fp32."""
    if name == "identity":
        return x
    if name == "gelu_tanh":
        return jax.nn.gelu(x, approximate=True)
    if name == "gelu":
        y = x.astype(jnp.float32)
        return (0.5 * y * (1.0 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)
    return getattr(jax.nn, name)(x)
