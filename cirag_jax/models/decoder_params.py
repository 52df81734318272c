"""The parameters of a decoder as Flax NNX declares them: made, counted, split over devices."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models.decoder import DecoderConfig, Params, layer_parameters, outer_parameters


def _initial(name: str, shape: tuple[int, ...], config: DecoderConfig, rngs: nnx.Rngs) -> jax.Array:
    dtype = jnp.dtype(config.param_dtype)
    if name.endswith("norm"):
        return jnp.full(shape, 1.0 - config.norm_offset, dtype)
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)
    normal = jax.random.normal(rngs.params(), shape, dtype)
    return normal * jnp.asarray(config.initializer_range, dtype)


class Layers(nnx.Module):
    """Parameters of all layers, stacked on a leading axis."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Random parameters: normal of ``initializer_range``, norms that scale by one."""
        for name, (shape, axes) in layer_parameters(config).items():
            value = _initial(name, (config.num_layers, *shape), config, rngs)
            setattr(self, name, nnx.Param(value, logical_axes=("layers", *axes)))


class Decoder(nnx.Module):
    """The parameters of a decoder, with the logical axes that `sharding` resolves.

    ``embedding`` [V, D], ``layers`` (`Layers`; see `layer_parameters`), ``final_norm`` [D] and,
    unless embeddings are tied, ``lm_head`` [D, V].
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Random parameters drawn from ``rngs.params``."""
        for name, (shape, axes) in outer_parameters(config).items():
            setattr(self, name, nnx.Param(_initial(name, shape, config, rngs), logical_axes=axes))
        self.layers = Layers(config, rngs=rngs)


def abstract_params(config: DecoderConfig) -> nnx.State:
    """The `nnx.State` of `Decoder` with shapes and dtypes in place of arrays."""
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def to_params(state: nnx.State) -> Params:
    """The state's arrays as the plain dictionary that `decoder` takes."""
    return nnx.to_pure_dict(state)


def unstack_layers(tree: Any, *, consume: bool = False) -> Any:
    """``tree`` (parameters or an adapter) with its stacked layers as a tuple, one entry a layer.

    The arrays are new. With ``consume`` each stacked one is freed as soon as it is split, so that
    the layers are never held twice; ``tree`` cannot be used afterwards.
    """
    stacked = tree["layers"]
    leaves, treedef = jax.tree.flatten(stacked)
    if not leaves:
        return tree
    split = jax.jit(lambda x: tuple(x[i] for i in range(x.shape[0])))
    count, columns = leaves[0].shape[0], []
    for leaf in leaves:
        columns.append(jax.block_until_ready(split(leaf)) if consume else split(leaf))
        if consume:
            leaf.delete()
    layers = tuple(
        jax.tree.unflatten(treedef, [column[i] for column in columns]) for i in range(count)
    )
    return {**tree, "layers": layers}


def fsdp_specs(config: DecoderConfig) -> Params:
    """How each stacked parameter is split over fsdp (`sharding.fsdp_spec`)."""
    outer, layer = outer_parameters(config), layer_parameters(config)
    specs = {name: sharding.fsdp_spec(axes, shape) for name, (shape, axes) in outer.items()}
    layers = {
        name: sharding.fsdp_spec(("layers", *axes), (config.num_layers, *shape))
        for name, (shape, axes) in layer.items()
    }
    return {**specs, "layers": layers}
