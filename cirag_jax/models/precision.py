"""Weights that are rounded to the compute dtype once per step, with gradients in fp32.

A step runs each layer many times, for every chunk and for recomputation. Without this module, each
run would read and round the fp32 weights again. The results are bitwise the same.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Rounded(NamedTuple):
    """A weight in the compute dtype, and ``place``, the fp32 array that receives its gradient.

    The gradient of ``value`` itself would be rounded in every chunk. ``place`` is None in the
    residuals of a backward pass.
    """

    value: jax.Array
    place: jax.Array | None


Weight = jax.Array | Rounded


def is_rounded(path: Sequence[Any]) -> bool:
    """Returns whether the parameter at ``path`` of an `nnx.State` is used in the compute dtype.

    This holds for layers except their norms, not for embedding tables and scoring heads.
    """
    return "layers" in path and "norm" not in str(path[-1])


def rounded(params: nnx.State, dtype: str, run: Callable[..., Any] = operator.call) -> nnx.State:
    """Returns ``params`` with a ``dtype`` copy of each parameter that `is_rounded`.

    ``run`` calls compiled functions, see `training.rehearsal`.
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
    """Returns ``params`` whose gradients go to ``places``, fp32 arrays of the same shapes."""
    return jax.tree.map(_by_place, params, places)


def _by_place(x: jax.Array, place: jax.Array) -> Weight:
    return _send_gradient_to(x, place) if x.dtype == place.dtype else Rounded(x, place)


@jax.custom_vjp
def _send_gradient_to(x: jax.Array, place: jax.Array) -> jax.Array:
    """Returns ``x`` with its gradient sent to ``place``."""
    del place
    return x


_send_gradient_to.defvjp(lambda x, place: (x, None), lambda _, dx: (None, dx))


def places_of(params: Any) -> Any:
    """Returns the zeros that `differentiated` takes as ``places``."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)


# ------------------------------------------------------------------------- within written gradients


def value_of(weight: Weight) -> jax.Array:
    """Returns the array of a weight."""
    return weight.value if isinstance(weight, Rounded) else weight


def kept(weight: Weight) -> Weight:
    """Returns the part of a weight that a backward pass keeps."""
    return Rounded(weight.value, None) if isinstance(weight, Rounded) else weight


def gradient_of(weight: Weight, gradient: jax.Array) -> Any:
    """Returns the cotangent of a weight, at its place if it has one."""
    return Rounded(None, gradient) if isinstance(weight, Rounded) else gradient  # pyright: ignore


def gradient_dtype(weight: Weight) -> Any:
    """Returns the dtype of a weight's gradient."""
    return jnp.float32 if isinstance(weight, Rounded) else weight.dtype
