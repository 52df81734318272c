"""The device mesh, and the table that maps logical axes to mesh axes.

Parameters carry logical axis names in the metadata ``logical_axes`` of their ``nnx.Param``;
activations are annotated with `constrain`. Both are resolved only in this module, so that changing
the layout means changing one table. Every mesh axis is ``AxisType.Auto``. With Explicit axes, JAX
raises errors for the in-batch product of two sharded batches and for lookups in a sharded table.
"""

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cirag_jax.errors import UserError

log = logging.getLogger(__name__)

MESH_AXES = ("data", "fsdp", "tensor")
_REPLICATED = PartitionSpec()

# Name of a parameter -> its shape and logical axes.
ShapesAndAxes = dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]

# Logical axis -> mesh axes. Parameters are split over fsdp by their model dimension, and over
# tensor by heads, feed-forward and vocabulary. Activations are split over data and fsdp by batch.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "batch_of_lookup": ("data",),  # while "embed" still occupies fsdp
    "length": (),
    "act_embed": (),
    "act_heads": ("tensor",),
    "act_mlp": ("tensor",),
    "vocab": ("tensor",),
    "position": (),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    # An adapter is small: replicating it is cheaper than gathering it in every layer.
    "lora_embed": (),
    "lora_rank": (),
    "mlp": ("tensor",),
    "experts": ("tensor",),
    "norm": (),
    "layers": (),
}


def stack_layers(parameters: ShapesAndAxes, num_layers: int) -> ShapesAndAxes:
    """Adds a leading axis for layers to each parameter."""
    return {n: ((num_layers, *shape), ("layers", *axes)) for n, (shape, axes) in parameters.items()}


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Returns a (data, fsdp, tensor) mesh with ``AxisType.Auto`` axes.

    At most one size may be -1, which means all remaining devices. ``devices`` defaults to all
    devices of all processes.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(
            f"mesh sizes (data, fsdp, tensor) = {tuple(sizes)} must be positive, "
            "with at most one -1"
        )
    if -1 in sizes:
        given = int(np.prod([size for size in sizes if size != -1]))
        sizes[sizes.index(-1)] = max(len(devices) // given, 1)
    if int(np.prod(sizes)) != len(devices):
        raise UserError(
            f"mesh sizes (data, fsdp, tensor) = ({data}, {fsdp}, {tensor}) do not fit "
            f"{len(devices)} devices"
        )
    return jax.make_mesh(tuple(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


@functools.cache
def _note(message: str) -> None:
    """Logs ``message`` once per process."""
    log.info(message)


def logical_to_spec(
    axes: Sequence[str | None], shape: Sequence[int] | None = None, mesh: Any = None
) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array whose dimensions are named by ``axes``.

    With ``shape`` and ``mesh``, a dimension is replicated if the mesh axes do not divide its size;
    this is logged once.

    Raises:
      ValueError: an axis name is not in `RULES`, two dimensions map to the same mesh axis, or the
        lengths of ``axes`` and ``shape`` differ.
    """
    if shape is not None and len(shape) != len(axes):
        raise ValueError(f"logical axes {tuple(axes)} do not name the dimensions of {tuple(shape)}")
    used: dict[str, str] = {}
    spec: list[Any] = []
    for dim, name in enumerate(axes):
        if name is None:
            spec.append(None)
            continue
        if name not in RULES:
            raise ValueError(f"logical axis {name!r} is not in the table of sharding rules")
        mesh_axes = RULES[name]
        for axis in mesh_axes:
            if axis in used:
                raise ValueError(
                    f"logical axes {used[axis]!r} and {name!r} of {tuple(axes)} both map to mesh "
                    f"axis {axis!r}"
                )
            used[axis] = name
        if mesh is not None and shape is not None and mesh_axes:
            ways = int(np.prod([mesh.shape[axis] for axis in mesh_axes]))
            if shape[dim] % ways:
                _note(
                    f"axis {name!r} of size {shape[dim]} is not divisible by {ways} "
                    f"({'*'.join(mesh_axes)}): replicated"
                )
                mesh_axes = ()
        spec.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*spec)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of ``x`` to its logical axes; needs `jax.set_mesh`.

    Inside `map_shards`, only axes that are left to the compiler are constrained.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.auto_axes:
        return x
    auto = [axis if axis and {*RULES[axis]} <= {*mesh.auto_axes} else None for axis in axes]
    return jax.lax.with_sharding_constraint(x, logical_to_spec(auto, x.shape, mesh))


def rows_per_device(rows: int) -> int:
    """Returns a batch's number of rows on each device; inside `map_shards`, ``rows`` itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or "data" not in mesh.auto_axes:
        return rows
    return NamedSharding(mesh, logical_to_spec(("batch",), (rows,), mesh)).shard_shape((rows,))[0]


def lookup_embedding(table_VD: jax.Array, tokens_BT: jax.Array, width: int) -> jax.Array:
    """Returns the embeddings of tokens, sharded like activations; the table has ``width`` columns.

    If the columns are split over fsdp, each device looks up its columns for the rows of all devices
    in its group, and the group then exchanges the parts.
    """
    if table_VD.shape[1] == width:
        return constrain_lookup(table_VD[tokens_BT])
    tokens_BT = jax.lax.all_gather(tokens_BT, "fsdp", tiled=True)
    x_BTD = table_VD[tokens_BT]
    return jax.lax.all_to_all(x_BTD, "fsdp", split_axis=0, concat_axis=2, tiled=True)


def constrain_lookup(x_BTD: jax.Array) -> jax.Array:
    """Constrains the result of an embedding lookup outside `map_shards`.

    Without this constraint, the compiler would gather the batch on every device.
    """
    x_BTD = constrain(x_BTD, "batch_of_lookup", "length", "embed")
    return constrain(x_BTD, "batch", "length", "act_embed")


def tensor_ways() -> int:
    """Returns the number of devices over which the compiler splits heads and features."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape["tensor"] if "tensor" in mesh.auto_axes else 1


def multiply_columns(
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    kernels: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Multiplies ``x`` by each kernel, in a `jax.shard_map` if kernels are split over tensor.

    This way, the gradient of ``x`` is summed over the kernels first and exchanged between devices
    once. The compiler would exchange it once per kernel.
    """

    def products(x: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(multiply(x, kernel) for kernel in kernels)

    ways = tensor_ways()
    if ways > 1 and len(kernels) > 1 and not any(k.shape[-1] % ways for k in kernels):
        shapes = [each.shape for each in (x, *kernels)]
        columns = [PartitionSpec(*(None,) * (len(shape) - 1), "tensor") for shape in shapes]
        products = jax.shard_map(
            products,
            in_specs=(_REPLICATED, *columns[1:]),
            out_specs=(columns[0],) * len(kernels),
            axis_names={"tensor"},
            check_vma=False,
        )
    return products(x, *kernels)


def map_experts(
    function: Callable[..., jax.Array], tokens: Sequence[jax.Array], kernels: Sequence[jax.Array]
) -> jax.Array:
    """Returns ``function(*tokens, first, *kernels)``, with experts split over tensor.

    Each device runs its rows of ``tokens``, with its experts; ``first`` is the number of its first
    expert. The results of a tensor group are summed. Without a `jax.shard_map`, the compiler would
    sort the tokens of all devices together.

    Args:
      function: see above; its result has the shape of the first tokens.
      tokens: arrays ``[B, T, ...]``.
      kernels: arrays ``[E, ...]``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.auto_axes:
        return function(*tokens, 0, *kernels)
    auto = {*mesh.auto_axes}
    batch = "batch" if {*RULES["batch"]} <= auto else None
    rows = logical_to_spec((batch, None, None), tokens[0].shape, mesh)
    split = logical_to_spec(("experts", None, None), kernels[0].shape, mesh)

    def run(*arguments: jax.Array) -> jax.Array:
        tokens_, kernels_ = arguments[: len(tokens)], arguments[len(tokens) :]
        first = jax.lax.axis_index("tensor") * kernels_[0].shape[0] if split[0] else 0
        return function(*tokens_, first, *kernels_)[None]

    parts = jax.shard_map(
        run,
        in_specs=(*[rows] * len(tokens), *[split] * len(kernels)),
        out_specs=PartitionSpec(split[0], *rows),
        axis_names=auto,
        check_vma=False,
    )(*tokens, *kernels)
    return constrain(parts.sum(0), "batch", "length", "act_embed")


def variable_sharding(variable: nnx.Variable, mesh: Mesh) -> NamedSharding:
    """Returns a variable's sharding by its metadata ``logical_axes``; replicated without them."""
    axes = variable.get_metadata().get("logical_axes")
    # On one device, outputs have the empty spec; inputs with another spec would compile again.
    if axes is None or mesh.size == 1:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, logical_to_spec(axes, variable.shape, mesh))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def state_sharding(tree: Any, mesh: Mesh) -> Any:
    """Returns the `NamedSharding` of each leaf of ``tree``, in the same structure.

    ``tree`` is any pytree with `nnx.Variable` nodes, such as an `nnx.State` or its optax state,
    whose moments have the metadata of the variables. Plain leaves are replicated.
    """

    def leaf(node: Any) -> Any:
        if _is_variable(node):
            return node.replace(variable_sharding(node, mesh))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(leaf, tree, is_leaf=_is_variable)


def place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places a host array, which is equal in all processes, on the devices of ``sharding``."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_variable(variable: nnx.Variable, x: Any, mesh: Mesh | None) -> nnx.Variable:
    """Returns ``variable`` with the value ``x``, placed on ``mesh`` or the default device."""
    if mesh is None:
        return variable.replace(jnp.asarray(x))
    return variable.replace(place(x, variable_sharding(variable, mesh)))


def shard_state(tree: Any, mesh: Mesh) -> Any:
    """Places every leaf of ``tree`` on ``mesh`` by its logical axes; see `state_sharding`."""
    return jax.tree.map(place, tree, state_sharding(tree, mesh))


def batch_sharding(mesh: Mesh, ndim: int, shape: Sequence[int] | None = None) -> NamedSharding:
    """Returns the sharding of an array with ``ndim`` dimensions; the first is the batch."""
    axes = ("batch", *([None] * (ndim - 1)))
    return NamedSharding(mesh, logical_to_spec(axes, shape, mesh))


# ------------------------------------------------------------------------------ gradients by shard
#
# The compiler would sum gradients over the devices in every chunk of a step. Here each shard
# accumulates its gradient of the full parameters, and the shards are summed once, at the end of the
# step. Each shard has separate rows of the batch; the devices of a tensor group form one shard.


def num_shards() -> int:
    """Returns the number of shards of the mesh under `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1)


def map_shards(
    function: Callable[[Any, Any, jax.Array | None], Any], specs: Any = _REPLICATED
) -> Callable[..., Any]:
    """Returns a function that runs ``function(whole, split, key)`` in each shard, on its rows.

    Every shard gets all of ``whole``, or its part according to ``specs`` (see `fsdp_spec`); then
    ``function`` gathers the parts with `gather_parameter`. ``split`` and the result are split along
    their first dimension. Each shard has a separate key. With one shard, returns ``function``.
    """
    if num_shards() == 1:
        return function

    def run_shard(whole: Any, split: Any, key: jax.Array | None) -> Any:
        if key is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(RULES["batch"]))
        return function(whole, split, key)

    # The compiler handles arrays that are split over a tensor group.
    has_tensor_groups = jax.sharding.get_abstract_mesh().shape["tensor"] > 1
    axes = RULES["batch"] if has_tensor_groups else MESH_AXES
    rows = PartitionSpec(axes)
    return jax.shard_map(
        run_shard,
        in_specs=(specs, rows, _REPLICATED),
        out_specs=rows,
        axis_names={*axes},
        check_vma=False,
    )


def fsdp_spec(axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array over fsdp only; needs `jax.set_mesh`."""
    spec = logical_to_spec(axes, shape, jax.sharding.get_abstract_mesh())
    return PartitionSpec(*("fsdp" if axis == "fsdp" else None for axis in spec))


def fsdp_specs(tree: Any) -> Any:
    """Returns the `fsdp_spec` of each variable of an `nnx.State`, in the same structure."""

    def spec(node: nnx.Variable) -> nnx.Variable:
        return node.replace(fsdp_spec(_axes(node, node.ndim), node.shape))

    return jax.tree.map(spec, tree, is_leaf=_is_variable)


def gather_parameter(x: jax.Array, shape: Sequence[int], axes: Sequence[str | None]) -> jax.Array:
    """Gathers the full parameter of ``shape`` from the parts of all shards."""
    split = [dim for dim, size in enumerate(shape) if x.shape[dim] != size]
    if not split:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", axis=split[0], tiled=True)
    if "tensor" in mesh.auto_axes:  # The compiler would also gather over the tensor group.
        spec = logical_to_spec(_tensor_axes(axes), x.shape, mesh)
        gather = jax.shard_map(
            gather, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False
        )
    return gather(x)


def zeros_per_shard(params: Any) -> Any:
    """Returns fp32 zeros like ``params``, an `nnx.State`, with a leading axis for the shards."""
    zeros = jax.tree.map(lambda x: jnp.zeros((num_shards(), *x.shape), jnp.float32), params)
    return constrain_per_shard(zeros)


def constrain_per_shard(tree: Any) -> Any:
    """Constrains arrays with a leading axis for the shards: each shard stores its full entry."""
    return jax.tree.map(lambda node: _annotate(node, "batch"), tree, is_leaf=_is_variable)


def gather_fsdp(params: Any, run: Callable[..., Any] = operator.call) -> Any:
    """Gathers the parameters ``params``, an `nnx.State`, over fsdp; called once per step.

    ``run`` calls the compiled function; see `training.rehearsal`.
    """
    split = jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) > 1
    return run(_whole, params) if split else params


@jax.jit
def _whole(params: Any) -> Any:
    return jax.tree.map(_gathered_whole, params, is_leaf=_is_variable)


def _gathered_whole(node: nnx.Variable) -> Any:
    x = node.get_value()
    if x.dtype != jnp.bfloat16:
        return _annotate(node)
    # XLA's CPU compiler would exchange bf16 as fp32, so its bits are gathered as integers.
    bits = constrain(jax.lax.bitcast_convert_type(x, jnp.uint16), *_axes(node, x.ndim))
    bits = _annotate(node.replace(bits)).get_value()
    return node.replace(jax.lax.bitcast_convert_type(bits, jnp.bfloat16))


def _annotate(node: nnx.Variable, *first: str | None) -> Any:
    """Constrains a variable: its leading axes to ``first``, the others to tensor or replicated."""
    x = node.get_value()
    return node.replace(constrain(x, *first, *_tensor_axes(_axes(node, x.ndim - len(first)))))


def _axes(node: nnx.Variable, ndim: int) -> Sequence[str | None]:
    return node.get_metadata().get("logical_axes") or (None,) * ndim


def _tensor_axes(axes: Sequence[str | None]) -> list[str | None]:
    return [axis if axis and RULES[axis] == ("tensor",) else None for axis in axes]


def sum_shards(tree: Any) -> Any:
    """Sums arrays over their leading axis, the shards; see `zeros_per_shard`.

    If a parameter is split over fsdp, each device receives only its part of the sum.
    """
    if num_shards() == 1:
        return jax.tree.map(lambda x: x.sum(0), tree)
    mesh = jax.sharding.get_abstract_mesh()
    leaves, structure = jax.tree.flatten(tree)
    before, after = [], []
    for node in jax.tree.leaves(tree, is_leaf=_is_variable):
        axes, shape = _axes(node, node.ndim - 1), node.shape[1:]
        unscattered = logical_to_spec(_tensor_axes(axes), shape, mesh)
        before.append(PartitionSpec(RULES["batch"], *unscattered))
        after.append(logical_to_spec(axes, shape, mesh))

    def total(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if "fsdp" not in spec or mesh.shape["fsdp"] == 1:
            return jax.lax.psum(x[0], RULES["batch"])
        part = jax.lax.psum_scatter(x[0], "fsdp", scatter_dimension=spec.index("fsdp"), tiled=True)
        return jax.lax.psum(part, "data")

    summed = jax.shard_map(
        lambda leaves: [total(*pair) for pair in zip(leaves, after, strict=True)],
        in_specs=(before,),
        out_specs=after,
        check_vma=False,
    )(leaves)
    return jax.tree.unflatten(structure, summed)
