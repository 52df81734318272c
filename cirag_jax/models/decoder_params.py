"""Parameters of a decoder in Flax NNX: shapes, creation, stacking and FSDP specs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models import nf4
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.nf4 import Nf4
from cirag_jax.models.precision import Packed, pack_kernel
from cirag_jax.sharding import ShapesAndAxes

Params = Any  # the dictionary described in `Decoder`
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DENSE = ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias")
# Projections of one input. Phi-3 stores and adapts them as one matrix; see also `fuse_kernels`.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = ("expert_gate", "expert_up", "expert_down")
_SHARED = ("shared_gate_proj", "shared_up_proj", "shared_down_proj", "shared_score_proj")


def layers_with(config: DecoderConfig, name: str) -> tuple[int, ...]:
    """Returns the layers that have the parameter ``name`` of `layer_parameters`."""
    layers = range(config.num_layers)
    if config.num_experts and name in _DENSE:
        return config.dense_layers
    if name in ("router", *EXPERTS, *_SHARED):
        return tuple(i for i in layers if config.num_experts and i not in config.dense_layers)
    return tuple(layers)


def target_parameter(
    config: DecoderConfig, name: str
) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    """Returns shape and logical axes of a kernel, or of a group of `FUSED` kernels."""
    shapes = layer_parameters(config)
    if name not in FUSED:
        return shapes[name]
    kernels = [shapes[part] for part in FUSED[name]]
    (rows, _), (axis, _) = kernels[0]
    return (rows, sum(columns for (_, columns), _ in kernels)), (axis, None)


def layer_parameters(config: DecoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter of a layer, without the layer axis.

    A layer may lack some of them; see `layers_with`.
    """
    d, f = config.d_model, config.d_ff
    nh, kh = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: ShapesAndAxes = {
        "attention_norm": ((d,), ("norm",)),
        "mlp_norm": ((d,), ("norm",)),
        "q_proj": ((d, nh), ("embed", "heads")),
        "k_proj": ((d, kh), ("embed", "kv_heads")),
        "v_proj": ((d, kh), ("embed", "kv_heads")),
        "o_proj": ((nh, d), ("heads", "embed")),
        "gate_proj": ((d, f), ("embed", "mlp")),
        "up_proj": ((d, f), ("embed", "mlp")),
        "down_proj": ((f, d), ("mlp", "embed")),
    }
    if config.qkv_bias:
        shapes["q_bias"] = ((nh,), ("heads",))
        shapes["k_bias"] = shapes["v_bias"] = ((kh,), ("kv_heads",))
    if config.out_bias:
        shapes["o_bias"] = ((d,), ("norm",))
    if config.mlp_bias:
        shapes["gate_bias"] = shapes["up_bias"] = ((f,), ("mlp",))
        shapes["down_bias"] = ((d,), ("norm",))
    if config.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = ((config.head_dim,), ("norm",))
    if config.post_norms:
        shapes["attention_post_norm"] = shapes["mlp_post_norm"] = ((d,), ("norm",))
    if config.num_experts:
        wide = ((config.num_experts, d, config.d_expert), ("experts", "embed", None))
        shapes["router"] = ((d, config.num_experts), ("embed", None))
        shapes["expert_gate"] = shapes["expert_up"] = wide
        shapes["expert_down"] = (
            (config.num_experts, config.d_expert, d),
            ("experts", None, "embed"),
        )
    if config.num_experts and config.d_shared:
        shapes["shared_gate_proj"] = shapes["shared_up_proj"] = (
            (d, config.d_shared),
            ("embed", "mlp"),
        )
        shapes["shared_down_proj"] = ((config.d_shared, d), ("mlp", "embed"))
        shapes["shared_score_proj"] = ((d, 1), ("embed", None))
    return {name: shape for name, shape in shapes.items() if layers_with(config, name)}


def outer_parameters(config: DecoderConfig) -> ShapesAndAxes:
    """Returns shape and logical axes of each parameter outside the layers."""
    v, d = config.vocab_size, config.d_model
    shapes: ShapesAndAxes = {
        "embedding": ((v, d), ("vocab", "embed")),
        "final_norm": ((d,), ("norm",)),
    }
    if not config.tie_embeddings:
        shapes["lm_head"] = ((d, v), ("embed", "vocab"))
    return shapes


def is_quantized(config: DecoderConfig, name: str) -> bool:
    """Returns whether a parameter of a layer is `Nf4`."""
    return config.quantization is not None and name in (*PROJECTIONS, *EXPERTS)


def arrange_layers(
    config: DecoderConfig, columns: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Any], ...]:
    """Returns the parameters of each layer; a column has an entry for each layer that has it."""
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    for name, column in columns.items():
        for layer, value in zip(layers_with(config, name), column, strict=True):
            layers[layer][name] = value
    return tuple(layers)


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


class Nf4Kernel(nnx.Module):
    """The parameters of an `Nf4` kernel, which have the logical axes of ``kernel``."""

    def __init__(self, kernel: nnx.Param):
        axes = kernel.get_metadata()["logical_axes"]
        for name, value in nf4.quantize(kernel[...])._asdict().items():
            setattr(self, name, nnx.Param(value, logical_axes=axes))


class Layers(nnx.Module):
    """Parameters of all layers, stacked on a leading axis; see `layers_with`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        parameters = _stacked_parameters(config)
        add_parameters(self, parameters, config, rngs)
        for name in parameters:
            if is_quantized(config, name):
                setattr(self, name, Nf4Kernel(getattr(self, name)))


class Decoder(nnx.Module):
    """The parameters of a decoder, with logical axes.

    They are ``embedding`` [V, D], ``layers`` (`Layers`; see `layer_parameters`), ``final_norm`` [D]
    and, unless embeddings are tied, ``lm_head`` [D, V]. ``more`` are further parameters outside the
    layers.
    """

    def __init__(self, config: DecoderConfig, more: ShapesAndAxes | None = None, *, rngs: nnx.Rngs):
        add_parameters(self, {**outer_parameters(config), **(more or {})}, config, rngs)
        self.layers = Layers(config, rngs=rngs)


def abstract_params(config: DecoderConfig, more: ShapesAndAxes | None = None) -> nnx.State:
    """Returns the `nnx.State` of `Decoder` with shapes and dtypes in place of arrays."""
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, more, rngs=nnx.Rngs(0))))


def to_params(state: nnx.State) -> Params:
    """Returns the arrays of a state as a plain dictionary, the ``params`` of `decoder.forward`."""
    params = nnx.to_pure_dict(state)
    layers = params["layers"].items()
    params["layers"] = {name: Nf4(**x) if isinstance(x, dict) else x for name, x in layers}
    return params


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


def fuse_kernels(params: Params) -> Params:
    """Returns unstacked parameters with one kernel in place of each group of `FUSED`.

    This is for inference on one accelerator, where a product with few columns does not use all of
    the memory bandwidth. XLA on a GPU would join small kernels inside the program (its pass
    ``DotMerger``), which copies them. Biases stay separate. To save memory, the kernels of a group
    are freed after joining them, so ``params`` cannot be used afterwards.
    """

    def fuse(layer: Params) -> Params:
        rest, fused = dict(layer), {}
        for name, parts in FUSED.items():
            if parts[0] in layer:  # a layer of experts has no gate
                kernels = [rest.pop(part) for part in parts]
                fused[name] = jax.block_until_ready(_join_columns(*kernels))
                for kernel in kernels:
                    kernel.delete()
        return {**rest, **fused}

    return {**params, "layers": tuple(map(fuse, params["layers"]))}


@jax.jit
def _join_columns(*kernels: jax.Array) -> jax.Array:
    return jnp.concatenate(kernels, axis=-1)


def pack_kernels(config: DecoderConfig, params: Params, int8: bool) -> Params:
    """Returns unstacked parameters with `precision.Packed` projections and output layer.

    This is for inference on a CPU. To save memory, each kernel is freed after packing it, so
    ``params`` cannot be used afterwards.
    """

    def pack(kernel: jax.Array) -> Packed:
        packed = jax.block_until_ready(pack_kernel(kernel, int8))
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

    def spec(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
        if is_quantized(config, name):
            return Nf4(*(sharding.fsdp_spec(axes, each) for each in nf4.shapes(shape)))
        return sharding.fsdp_spec(axes, shape)

    def specs(parameters: ShapesAndAxes) -> Params:
        return {name: spec(name, *shape) for name, shape in parameters.items()}

    return {**specs(outer_parameters(config)), "layers": specs(_stacked_parameters(config))}
