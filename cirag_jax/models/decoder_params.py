"""Parameters of a decoder in Flax NNX: initialization, layout and sharding."""

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
        """Draws kernels from a normal of ``initializer_range``; norms scale by one."""
        for name, (shape, axes) in layer_parameters(config).items():
            value = _initial(name, (config.num_layers, *shape), config, rngs)
            setattr(self, name, nnx.Param(value, logical_axes=("layers", *axes)))


class Decoder(nnx.Module):
    """The parameters of a decoder, with the logical axes that `sharding` resolves.

    ``embedding`` [V, D], ``layers`` (`Layers`; see `layer_parameters`), ``final_norm`` [D] and,
    unless embeddings are tied, ``lm_head`` [D, V].
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Draws random parameters from ``rngs.params``."""
        for name, (shape, axes) in outer_parameters(config).items():
            setattr(self, name, nnx.Param(_initial(name, shape, config, rngs), logical_axes=axes))
        self.layers = Layers(config, rngs=rngs)


def abstract_params(config: DecoderConfig) -> nnx.State:
    """Returns the `nnx.State` of `Decoder` with shapes and dtypes in place of arrays."""
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def to_params(state: nnx.State) -> Params:
    """Converts a state to the dictionary of arrays that `decoder` takes."""
    return nnx.to_pure_dict(state)


def unstack_layers(tree: Any, *, consume: bool = False) -> Any:
    """Returns ``tree`` (parameters or an adapter) with a tuple of layers instead of stacked ones.

    The arrays are copies. With ``consume`` each stacked array is freed once it is split, which
    saves memory; ``tree`` cannot be used afterwards.
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
    """Returns the fsdp partition of each stacked parameter (`sharding.fsdp_spec`)."""
    outer, layer = outer_parameters(config), layer_parameters(config)
    specs = {name: sharding.fsdp_spec(axes, shape) for name, (shape, axes) in outer.items()}
    layers = {
        name: sharding.fsdp_spec(("layers", *axes), (config.num_layers, *shape))
        for name, (shape, axes) in layer.items()
    }
    return {**specs, "layers": layers}
