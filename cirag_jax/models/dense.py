"""Dense layers after pooling, as in the module ``Dense`` of sentence-transformers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cirag_jax.models.activations import Activation, activate


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """Hyper-parameters of one dense layer; hashable, so usable as a static argument.

    Attributes:
      d_in, d_out: widths of input and output.
      bias: whether a bias is added.
      activation: applied to the output.
      folder: subfolder of the model's folder with the weights, such as ``2_Dense``.
    """

    d_in: int
    d_out: int
    bias: bool = True
    activation: Activation = "tanh"
    folder: str = "2_Dense"


class Dense(nnx.Module):
    """The fp32 parameters of a dense layer: ``kernel`` [in, out] and ``bias`` [out]."""

    def __init__(self, config: DenseConfig, *, rngs: nnx.Rngs):
        noise = jax.random.normal(rngs.params(), (config.d_in, config.d_out), jnp.float32)
        self.kernel = nnx.Param(config.d_in**-0.5 * noise, logical_axes=("embed", None))
        if config.bias:
            self.bias = nnx.Param(jnp.zeros(config.d_out, jnp.float32), logical_axes=("norm",))


def add_dense(module: Any, configs: Sequence[DenseConfig], rngs: nnx.Rngs) -> None:
    """Sets ``module.dense`` to the layers of ``configs``, if there are any."""
    if configs:
        module.dense = nnx.List([Dense(config, rngs=rngs) for config in configs])


def apply_dense(configs: Sequence[DenseConfig], layers: Any, x_BD: jax.Array) -> jax.Array:
    """Applies ``layers``, a list of `Dense`, to fp32 vectors."""
    for config, layer in zip(configs, layers, strict=True):
        x_BD = x_BD @ layer.kernel[...]
        if config.bias:
            x_BD = x_BD + layer.bias[...]
        x_BD = activate(x_BD, config.activation)
    return x_BD


def output_width(configs: Sequence[DenseConfig], width: int) -> int:
    """Returns the width after the layers, for inputs of ``width``."""
    return configs[-1].d_out if configs else width
