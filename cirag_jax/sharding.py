"""The mesh, and the one table that maps logical axes to mesh axes.

Parameters carry logical axis names in the metadata ``logical_axes`` of their ``nnx.Param``;
activations are annotated with `constrain`. Both are resolved here and nowhere else, so that
another layout is another table. Every mesh axis is ``AxisType.Auto``: under Explicit axes the
in-batch product of two sharded batches, and lookups into a sharded table, raise.
"""

import functools
import logging
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

    Raises:
      UserError: the sizes do not multiply to the number of devices.
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
    """``x`` with logical axes under `jax.set_mesh`; elsewhere and in `by_shard`: ``x`` as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.auto_axes:
        return x
    return jax.lax.with_sharding_constraint(x, logical_to_spec(axes, x.shape, mesh))


def rows_on_device(rows: int) -> int:
    """How many of a batch's rows one device has, under `jax.set_mesh`; in `by_shard`, all."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.auto_axes:
        return rows
    return NamedSharding(mesh, logical_to_spec(("batch",), (rows,), mesh)).shard_shape((rows,))[0]


def looked_up(x_BTD: jax.Array) -> jax.Array:
    """Rows of an embedding table, with the axes of activations.

    Each device looks up, in its columns, the rows of all that share them; then they exchange what
    each is missing. Left to the compiler, every device would gather the whole batch.
    """
    x_BTD = constrain(x_BTD, "batch_of_lookup", "length", "embed")
    return constrain(x_BTD, "batch", "length", "act_embed")


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
# computed: in every chunk of a step. On a mesh that splits nothing but the batch each device, a
# shard, therefore computes from its own rows and adds to a gradient of its own, until the step ends
# with one sum. On another mesh all devices are one shard, and the compiler sees to the exchange.


def num_shards() -> int:
    """How many shards the mesh under `jax.set_mesh` has."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size if mesh.size == mesh.shape.get("data") else 1


def by_shard(function: Callable[[Any, Any, jax.Array | None], Any]) -> Callable[..., Any]:
    """``function(whole, split, key)``, computed by each shard from its own rows.

    ``whole`` is the same for all; everything in ``split`` and in the result is split by its first
    dimension. Each draws from a key of its own. With one shard it is ``function`` itself.
    """
    if num_shards() == 1:
        return function

    def of_shard(whole: Any, split: Any, key: jax.Array | None) -> Any:
        if key is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return function(whole, split, key)

    everywhere, rows = PartitionSpec(), PartitionSpec(MESH_AXES)
    return jax.shard_map(
        of_shard, in_specs=(everywhere, rows, everywhere), out_specs=rows, check_vma=False
    )


def zeros_by_shard(params: Any) -> Any:
    """Zeros like ``params``, an `nnx.State`, with a first dimension more: of the shards."""
    zeros = jax.tree.map(lambda x: jnp.zeros((num_shards(), *x.shape), x.dtype), params)
    return constrain_by_shard(zeros)


def constrain_by_shard(tree: Any) -> Any:
    """Annotates what is like `zeros_by_shard`: each shard's lies on it, one's as the parameters."""

    def leaf(node: Any) -> Any:
        x = node.get_value()
        unsplit = (None,) * (x.ndim - 1)
        if num_shards() > 1:
            return node.replace(constrain(x, "batch", *unsplit))
        return node.replace(constrain(x, None, *node.get_metadata().get("logical_axes", unsplit)))

    return jax.tree.map(leaf, tree, is_leaf=_is_variable)
