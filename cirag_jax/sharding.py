"""The mesh, and the one table that maps logical axes to mesh axes.

Parameters carry logical axis names in the metadata ``logical_axes`` of their ``nnx.Param``;
activations are annotated with `constrain`. Both are resolved here and nowhere else, so that
another layout is another table. Every mesh axis is ``AxisType.Auto``: under Explicit axes the
in-batch product of two sharded batches, and lookups into a sharded table, raise.
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
_EVERYWHERE = PartitionSpec()

# Logical axis -> mesh axes. Parameters are split over fsdp by their model dimension and over
# tensor by heads, feed-forward and vocabulary; activations over data and fsdp by batch.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "batch_of_lookup": ("data",),  # While "embed" still takes fsdp.
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
    # An adapter is small: a copy on each device is cheaper than gathering it in every layer.
    "lora_embed": (),
    "lora_rank": (),
    "mlp": ("tensor",),
    "norm": (),
    "layers": (),
}


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A (data, fsdp, tensor) mesh with ``AxisType.Auto`` axes.

    At most one size may be -1: it takes the devices that the other two leave. ``devices`` defaults
    to all devices of all processes.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(
            f"mesh sizes (data, fsdp, tensor) = {tuple(sizes)} must be positive, "
            "with at most one -1."
        )
    if -1 in sizes:
        known = int(np.prod([size for size in sizes if size != -1]))
        sizes[sizes.index(-1)] = max(len(devices) // known, 1)
    if int(np.prod(sizes)) != len(devices):
        raise UserError(
            f"mesh sizes (data, fsdp, tensor) = ({data}, {fsdp}, {tensor}) do not fit "
            f"{len(devices)} devices."
        )
    return jax.make_mesh(tuple(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


@functools.cache
def _note(message: str) -> None:
    """Log ``message`` once per process."""
    log.info(message)


def logical_to_spec(
    axes: Sequence[str | None],
    shape: Sequence[int] | None = None,
    mesh: Any = None,
) -> PartitionSpec:
    """The `PartitionSpec` of an array whose dimensions are named by ``axes``.

    With ``shape`` and ``mesh``, a dimension that the mesh axes do not divide is left replicated
    and this is logged once.

    Raises:
      ValueError: an axis name is not in `RULES`, two dimensions map to the same mesh axis, or
        the lengths of ``axes`` and ``shape`` differ.
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
    """``x`` with logical axes under `jax.set_mesh`; in `by_shard`, those that are left to split."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.auto_axes:
        return x
    left = [axis if axis and {*RULES[axis]} <= {*mesh.auto_axes} else None for axis in axes]
    return jax.lax.with_sharding_constraint(x, logical_to_spec(left, x.shape, mesh))


def rows_on_device(rows: int) -> int:
    """How many of a batch's rows one device has, under `jax.set_mesh`; in `by_shard`, all."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or "data" not in mesh.auto_axes:
        return rows
    return NamedSharding(mesh, logical_to_spec(("batch",), (rows,), mesh)).shard_shape((rows,))[0]


def look_up(table_VD: jax.Array, tokens_BT: jax.Array, width: int) -> jax.Array:
    """Rows of an embedding table of ``width`` columns, with the axes of activations.

    Each device looks up, in its columns, the rows of all that share them; then they exchange what
    each is missing.
    """
    if table_VD.shape[1] == width:
        return looked_up(table_VD[tokens_BT])
    tokens_BT = jax.lax.all_gather(tokens_BT, "fsdp", tiled=True)
    x_BTD = table_VD[tokens_BT]
    return jax.lax.all_to_all(x_BTD, "fsdp", split_axis=0, concat_axis=2, tiled=True)


def looked_up(x_BTD: jax.Array) -> jax.Array:
    """The same outside `by_shard`: left to the compiler, every device would gather the batch."""
    x_BTD = constrain(x_BTD, "batch_of_lookup", "length", "embed")
    return constrain(x_BTD, "batch", "length", "act_embed")


def by_column(
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    kernels: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """``x`` times each kernel; where a tensor group splits the columns of several, explicitly.

    The gradient of ``x`` is then summed over the kernels before it is over the devices. Left to the
    compiler, it would be exchanged for each kernel.
    """

    def products(x: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(multiply(x, kernel) for kernel in kernels)

    mesh = jax.sharding.get_abstract_mesh()
    ways = mesh.shape["tensor"] if "tensor" in mesh.auto_axes else 1
    if ways > 1 and len(kernels) > 1 and not any(k.shape[-1] % ways for k in kernels):
        columns = [PartitionSpec(*(None,) * (each.ndim - 1), "tensor") for each in (x, *kernels)]
        products = jax.shard_map(
            products,
            in_specs=(_EVERYWHERE, *columns[1:]),
            out_specs=(columns[0],) * len(kernels),
            axis_names={"tensor"},
            check_vma=False,
        )
    return products(x, *kernels)


def variable_sharding(variable: nnx.Variable, mesh: Mesh) -> NamedSharding:
    """Sharding of one variable by its ``logical_axes`` metadata (absent: replicated)."""
    axes = variable.get_metadata().get("logical_axes")
    # On one device a computation's outputs have the empty spec; inputs with another would be
    # compiled for a second time.
    if axes is None or mesh.size == 1:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, logical_to_spec(axes, variable.shape, mesh))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def state_sharding(tree: Any, mesh: Mesh) -> Any:
    """The `NamedSharding` tree of ``tree``, in the same structure.

    ``tree`` is any pytree with `nnx.Variable` nodes: an `nnx.State`, or an optax state over one
    (its moments keep the variables' metadata). Plain leaves are replicated.
    """

    def leaf(node: Any) -> Any:
        if _is_variable(node):
            return node.replace(variable_sharding(node, mesh))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(leaf, tree, is_leaf=_is_variable)


def place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts a host array, the same on every process, on the mesh."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def shard_state(tree: Any, mesh: Mesh) -> Any:
    """Places every leaf of ``tree`` on ``mesh`` by its logical axes (see `state_sharding`)."""
    return jax.tree.map(place, tree, state_sharding(tree, mesh))


def batch_sharding(mesh: Mesh, ndim: int, shape: Sequence[int] | None = None) -> NamedSharding:
    """Sharding of a batch whose first of ``ndim`` dimensions is the batch."""
    axes = ("batch", *([None] * (ndim - 1)))
    return NamedSharding(mesh, logical_to_spec(axes, shape, mesh))


# ------------------------------------------------------------------------------ gradients by shard
#
# Left to the compiler, a gradient of parameters is reduced over the devices wherever one is
# computed: in every chunk of a step. A shard is what has rows of its own (the devices of a tensor
# group together). Each therefore adds to a gradient of its own, of whole parameters, until the
# step ends with one sum.


def num_shards() -> int:
    """How many shards the mesh under `jax.set_mesh` has."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1)


def by_shard(
    function: Callable[[Any, Any, jax.Array | None], Any], specs: Any = _EVERYWHERE
) -> Callable[..., Any]:
    """``function(whole, split, key)``, computed by each shard from its own rows.

    ``whole`` is the same for all, or each has a part of it by ``specs`` (`fsdp_spec`) and calls
    `gathered`. Everything in ``split`` and in the result is split by its first dimension. Each
    draws from a key of its own. With one shard it is ``function`` itself.
    """
    if num_shards() == 1:
        return function

    def of_shard(whole: Any, split: Any, key: jax.Array | None) -> Any:
        if key is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(RULES["batch"]))
        return function(whole, split, key)

    # What a tensor group splits is left to the compiler.
    grouped = jax.sharding.get_abstract_mesh().shape["tensor"] > 1
    axes = RULES["batch"] if grouped else MESH_AXES
    rows = PartitionSpec(axes)
    return jax.shard_map(
        of_shard,
        in_specs=(specs, rows, _EVERYWHERE),
        out_specs=rows,
        axis_names={*axes},
        check_vma=False,
    )


def fsdp_spec(axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """How an array with logical axes is split over fsdp, under `jax.set_mesh`."""
    found = logical_to_spec(axes, shape, jax.sharding.get_abstract_mesh())
    return PartitionSpec(*("fsdp" if axis == "fsdp" else None for axis in found))


def gathered(x: jax.Array, shape: Sequence[int], axes: Sequence[str | None]) -> jax.Array:
    """A parameter of ``shape`` with logical axes, of which a shard may have its part, whole."""
    split = [dim for dim, size in enumerate(shape) if x.shape[dim] != size]
    if not split:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", axis=split[0], tiled=True)
    if "tensor" in mesh.auto_axes:  # The compiler would gather what a tensor group splits as well.
        spec = logical_to_spec(_of_tensor(axes), x.shape, mesh)
        gather = jax.shard_map(
            gather, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False
        )
    return gather(x)


def zeros_by_shard(params: Any) -> Any:
    """fp32 zeros like ``params``, an `nnx.State`, with a first dimension more: of the shards."""
    zeros = jax.tree.map(lambda x: jnp.zeros((num_shards(), *x.shape), jnp.float32), params)
    return constrain_by_shard(zeros)


def constrain_by_shard(tree: Any) -> Any:
    """Annotates what is like `zeros_by_shard`: each shard's part lies there, whole."""
    return jax.tree.map(lambda node: _annotate(node, "batch"), tree, is_leaf=_is_variable)


def whole(params: Any, run: Callable[..., Any] = operator.call) -> Any:
    """``params``, an `nnx.State`, with no parameter split over fsdp: gathered once a step.

    ``run`` calls what is compiled, see `training.rehearsal`.
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
    # By its bits, split before and whole after: XLA's CPU compiler would exchange it in fp32.
    bits = constrain(jax.lax.bitcast_convert_type(x, jnp.uint16), *_axes(node, x.ndim))
    bits = _annotate(node.replace(bits)).get_value()
    return node.replace(jax.lax.bitcast_convert_type(bits, jnp.bfloat16))


def _annotate(node: nnx.Variable, *first: str | None) -> Any:
    """A variable split over nothing but ``first``, of its first dimension, and tensor."""
    x = node.get_value()
    return node.replace(constrain(x, *first, *_of_tensor(_axes(node, x.ndim - len(first)))))


def _axes(node: nnx.Variable, ndim: int) -> Sequence[str | None]:
    return node.get_metadata().get("logical_axes") or (None,) * ndim


def _of_tensor(axes: Sequence[str | None]) -> list[str | None]:
    return [axis if axis and RULES[axis] == ("tensor",) else None for axis in axes]


def sum_shards(tree: Any) -> Any:
    """The sum over the shards of what is like `zeros_by_shard`, by the logical axes.

    Of a parameter that is split over fsdp each device receives its own part, and nothing else.
    """
    if num_shards() == 1:
        return jax.tree.map(lambda x: x.sum(0), tree)
    mesh = jax.sharding.get_abstract_mesh()
    leaves, structure = jax.tree.flatten(tree)
    before, after = [], []
    for node in jax.tree.leaves(tree, is_leaf=_is_variable):
        axes, shape = _axes(node, node.ndim - 1), node.shape[1:]
        unscattered = logical_to_spec(_of_tensor(axes), shape, mesh)
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
