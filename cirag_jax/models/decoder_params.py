"""Parameters of a decoder in Flax NNX: creation, stacking and FSDP specs."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models.decoder import (
    EXPERTS,
    PROJECTIONS,
    DecoderConfig,
    Params,
    arrange_layers,
    layer_parameters,
    layers_with,
    outer_parameters,
)
from cirag_jax.models.precision import Packed, pack_kernel
from cirag_jax.sharding import ShapesAndAxes


def _stacked_parameters(config: DecoderConfig) -> ShapesAndAxes:
    """Returns shape and axes of each parameter, stacked over the layers that have it."""
    return {
        name: ((len(layers_with(config, name)), *shape), ("layers", *axes))
        for name, (shape, axes) in layer_parameters(config).items()
    }


def add_parameters(
    module: nnx.Module, parameters: ShapesAndAxes, config: DecoderConfig, rngs: nnx.Rngs
) -> None:
    """Sets parameters on ``module``: norms to one, biases to zero, others to random normal."""
    dtype = jnp.dtype(config.param_dtype)
    for name, (shape, axes) in parameters.items():
        if name.endswith("norm"):
            value = jnp.full(shape, 1.0 - config.norm_offset, dtype)
        elif name.endswith("bias"):
            value = jnp.zeros(shape, dtype)
        else:
            noise = jax.random.normal(rngs.params(), shape, dtype)
            value = noise * jnp.asarray(config.initializer_range, dtype)
        setattr(module, name, nnx.Param(value, logical_axes=axes))


class Layers(nnx.Module):
    """Parameters of all layers, stacked on a leading axis; see `decoder.layers_with`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        add_parameters(self, _stacked_parameters(config), config, rngs)


class Decoder(nnx.Module):
    """The parameters of a decoder, with logical axes.

    They are ``embedding`` [V, D], ``layers`` (`Layers`; see `layer_parameters`), ``final_norm`` [D]
    and, unless embeddings are tied, ``lm_head`` [D, V]. ``more`` are further parameters outside the
    layers.
    """

    def __init__(self, config: DecoderConfig, more: ShapesAndAxes | None = None, *, rngs: nnx.Rngs):
        """Creates random parameters from ``rngs.params``."""
        add_parameters(self, {**outer_parameters(config), **(more or {})}, config, rngs)
        self.layers = Layers(config, rngs=rngs)


def abstract_params(config: DecoderConfig, more: ShapesAndAxes | None = None) -> nnx.State:
    """Returns the `nnx.State` of `Decoder` with shapes and dtypes in place of arrays."""
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, more, rngs=nnx.Rngs(0))))


def to_params(state: nnx.State) -> Params:
    """Returns the arrays of a state as a plain dictionary, the ``params`` of `decoder.forward`."""
    return nnx.to_pure_dict(state)


def unstack_layers(tree: Any, config: DecoderConfig | None = None, *, consume: bool = False) -> Any:
    """Returns ``tree`` (parameters or an adapter) with its stacked layers as a tuple.

    The arrays are copies. ``consume`` frees each stacked array after splitting it, which saves
    memory; ``tree`` cannot be used afterwards. ``config`` is needed only if layers differ.
    """
    split = jax.jit(lambda x: tuple(x[i] for i in range(x.shape[0])))
    columns: dict[str, list[Any]] = {}
    for name, stacked in tree["layers"].items():
        leaves, treedef = jax.tree.flatten(stacked)
        parts = []
        for leaf in leaves:
            parts.append(jax.block_until_ready(split(leaf)) if consume else split(leaf))
            if consume:
                leaf.delete()
        columns[name] = [jax.tree.unflatten(treedef, row) for row in zip(*parts, strict=True)]
    if not columns:
        return tree
    if config is not None:
        return {**tree, "layers": arrange_layers(config, columns)}
    rows = zip(*columns.values(), strict=True)
    return {**tree, "layers": tuple(dict(zip(columns, row, strict=True)) for row in rows)}


def pack_kernels(
    config: DecoderConfig, params: Params, *, int8: bool = False, consume: bool = False
) -> Params:
    """Returns unstacked parameters with `precision.Packed` projections and output layer.

    This is for inference on a CPU. ``consume`` frees each kernel after packing it, which saves
    memory; ``params`` cannot be used afterwards.
    """

    def pack(kernel: jax.Array) -> Packed:
        packed = jax.block_until_ready(pack_kernel(kernel, int8))
        if consume:
            kernel.delete()
        return packed

    def pack_layer(layer: Params) -> Params:
        return {
            name: pack(x) if name in PROJECTIONS or name in EXPERTS else x
            for name, x in layer.items()
        }

    outer = {}
    if not config.tie_embeddings:
        outer["lm_head"] = pack(params["lm_head"])
    elif int8:  # the embedding stays, because tokens are looked up in it
        outer["lm_head"] = pack_kernel(params["embedding"], int8, True)
    return {**params, **outer, "layers": tuple(map(pack_layer, params["layers"]))}


def fsdp_specs(config: DecoderConfig) -> Params:
    """Returns the FSDP sharding of each stacked parameter; see `sharding.fsdp_spec`."""

    def specs(parameters: ShapesAndAxes) -> Params:
        return {name: sharding.fsdp_spec(axes, shape) for name, (shape, axes) in parameters.items()}

    return {**specs(outer_parameters(config)), "layers": specs(_stacked_parameters(config))}
