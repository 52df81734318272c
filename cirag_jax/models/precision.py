"""Weights rounded to the compute dtype once a step, and their gradients, which stay in fp32.

A step runs a layer many times: in every chunk, and again where it is recomputed. Left alone, each
time would read the fp32 weights and round them again. The rounding is the same, and so is every
result, bit for bit.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Rounded(NamedTuple):
    """A weight in the compute dtype, and ``place``: the fp32 array that receives its gradient.

    The gradient of ``value`` itself would be rounded to its dtype in every chunk. ``place`` is None
    in what a backward pass keeps.
    """

    value: jax.Array
    place: jax.Array | None


Weight = jax.Array | Rounded


def is_rounded(path: Sequence[Any]) -> bool:
    """Whether the parameter at ``path`` of an `nnx.State` is computed with in the compute dtype.

    Those of layers are, but for their norms. Embedding tables and scoring heads are not.
    """
    return "layers" in path and "norm" not in str(path[-1])


def rounded(params: nnx.State, dtype: str, run: Callable[..., Any] = operator.call) -> nnx.State:
    """``params``, with a copy in ``dtype`` in place of each that `is_rounded`.

    ``run`` calls what is compiled, see `training.rehearsal`.
    """
    if dtype == "float32":
        return params
    flat: dict[Any, Any] = {tuple(path): node for path, node in nnx.to_flat_state(params)}
    wide = {path: node for path, node in flat.items() if is_rounded(path)}
    narrow = run(_round, list(wide.values()), dtype)
    return nnx.from_flat_state({**flat, **dict(zip(wide, narrow, strict=True))})


@functools.partial(jax.jit, static_argnums=1)
def _round(nodes: list[nnx.Variable], dtype: str) -> list[nnx.Variable]:
    return jax.tree.map(lambda x: x.astype(dtype), nodes)


def differentiated(params: Any, places: Any) -> Any:
    """``params``, whose gradients are those of ``places``: fp32 arrays of the same shapes."""
    return jax.tree.map(_by_place, params, places)


def _by_place(x: jax.Array, place: jax.Array) -> Weight:
    return _send_gradient_to(x, place) if x.dtype == place.dtype else Rounded(x, place)


@jax.custom_vjp
def _send_gradient_to(x: jax.Array, place: jax.Array) -> jax.Array:
    """``x``, whose gradient is that of ``place``."""
    del place
    return x


_send_gradient_to.defvjp(lambda x, place: (x, None), lambda _, dx: (None, dx))


def places_of(params: Any) -> Any:
    """Zeros for `differentiated`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)


# ------------------------------------------------------------------------- within written gradients


def value_of(weight: Weight) -> jax.Array:
    """The array that is computed with."""
    return weight.value if isinstance(weight, Rounded) else weight


def kept(weight: Weight) -> Weight:
    """What a backward pass keeps of a weight."""
    return Rounded(weight.value, None) if isinstance(weight, Rounded) else weight


def gradient_of(weight: Weight, gradient: jax.Array) -> Any:
    """The cotangent of a weight: of its place, where it has one."""
    return Rounded(None, gradient) if isinstance(weight, Rounded) else gradient  # pyright: ignore


def gradient_dtype(weight: Weight) -> Any:
    """Of its gradient."""
    return jnp.float32 if isinstance(weight, Rounded) else weight.dtype
