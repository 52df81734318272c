"""Adam whose state takes a quarter (``int8``) or an eighth (``factored``) of the memory.

Moments are stored in 8 bits with a scale for each block of `BLOCK` elements (Dettmers et al., 2022,
8-bit optimizers via block-wise quantization). A number between 0 and the scale is stored as the
fourth root of its share, so that small numbers keep their relative precision, like the dynamic
codes of that paper. Rounding is random and unbiased: the mean squared gradient changes by a
thousandth per step, which rounding to the nearest code would discard.

``factored`` stores the mean squared gradient of a matrix as means over its rows and columns
(Shazeer and Stern, 2018, Adafactor), and the mean gradient in 8 bits. optax's
`scale_by_factored_rms` would also factor over stacked layers, and has no mean gradient.

All arrays have as many axes as their parameter, so that they are sharded by its logical axes.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

BLOCK = 256  # Elements with the same scale; fewer if that does not divide the longest axis.
_SIGNED, _UNSIGNED = 127, 255  # The largest codes.


class CompactAdamState(NamedTuple):
    """Number of updates, and trees like the parameters.

    Attributes:
      count: number of updates, which is also the seed of the rounding.
      mean, mean_scale: int8 codes and fp32 scales of the mean gradient.
      square, square_scale: uint8 codes and fp32 scales of the root of the mean squared gradient; or
        its fp32 means over two axes, which keep the size 1.
    """

    count: jax.Array
    mean: Any
    mean_scale: Any
    square: Any
    square_scale: Any


def scale_by_compact_adam(
    b1: float, b2: float, eps: float, *, factored: bool
) -> optax.GradientTransformation:
    """Returns `optax.scale_by_adam` with a smaller state; see the module.

    An update uses fp32 moments, of which only the earlier ones were rounded.
    """

    def init_leaf(path: Any, x: jax.Array) -> tuple[jax.Array, ...]:
        mean = jnp.zeros(x.shape, jnp.int8), jnp.zeros(_scale_shape(x.shape), jnp.float32)
        axes = _factored_axes(path, x.shape) if factored else None
        if axes is not None:
            square = tuple(jnp.zeros(_without(x.shape, axis), jnp.float32) for axis in axes)
        elif factored:
            square = jnp.zeros(x.shape, jnp.float32), jnp.zeros((1,) * x.ndim, jnp.float32)
        else:
            square = jnp.zeros(x.shape, jnp.uint8), mean[1]
        return *mean, *square

    def init(params: Any) -> CompactAdamState:
        leaves, structure = jax.tree.flatten_with_path(params)
        columns = _columns([init_leaf(*leaf) for leaf in leaves], 4)
        return CompactAdamState(jnp.zeros((), jnp.int32), *map(structure.unflatten, columns))

    def update_leaf(
        path: Any, g: jax.Array, state: tuple[jax.Array, ...], count: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, ...]:
        *codes, square, square_scale = state
        g, draws = g.astype(jnp.float32), jax.random.uniform(key, g.shape)
        mean = b1 * _decode(*codes) + (1 - b1) * g
        axes = _factored_axes(path, g.shape) if factored else None
        if axes is not None:
            first, second = (
                b2 * old + (1 - b2) * jnp.square(g).mean(axis, keepdims=True)
                for old, axis in zip((square, square_scale), axes, strict=True)
            )
            total = first.mean(axes[1], keepdims=True)
            root = jnp.sqrt(first * (second / jnp.where(total > 0, total, 1.0)))
            stored = first, second
        elif factored:
            square = b2 * square + (1 - b2) * jnp.square(g)
            root, stored = jnp.sqrt(square), (square, square_scale)
        else:
            old = jnp.square(_decode(square, square_scale))
            root = jnp.sqrt(b2 * old + (1 - b2) * jnp.square(g))
            stored = _encode(root, _UNSIGNED, draws)
        steps = count.astype(jnp.float32)
        corrected = root / jnp.sqrt(1 - b2**steps)
        step = mean / (1 - b1**steps) / (corrected + eps)
        return step, *_encode(mean, _SIGNED, draws), *stored

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, CompactAdamState]:
        del params
        count = state.count + 1
        leaves, structure = jax.tree.flatten_with_path(updates)
        key = jax.random.fold_in(jax.random.key(0), count)
        states = zip(*map(jax.tree.leaves, state[1:]), strict=True)
        rows = [
            update_leaf(path, g, old, count, jax.random.fold_in(key, index))
            for index, ((path, g), old) in enumerate(zip(leaves, states, strict=True))
        ]
        steps, *columns = map(structure.unflatten, _columns(rows, 5))
        return steps, CompactAdamState(count, *columns)

    return optax.GradientTransformation(init, update)


def _columns(rows: list[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [[row[i] for row in rows] for i in range(width)]


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _factored_axes(path: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the two longest axes, without that of stacked layers; None if there is only one."""
    first = int("layers" in jax.tree_util.keystr(path))
    axes = sorted(range(first, len(shape)), key=lambda axis: -shape[axis])[:2]
    return (axes[0], axes[1]) if len(axes) == 2 and shape[axes[1]] > 1 else None


def _blocked(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Returns the longest axis, and the shape with this axis split into blocks."""
    axis = max(range(len(shape)), key=shape.__getitem__)
    block = math.gcd(shape[axis], BLOCK)
    block = block if block >= 32 else shape[axis]
    return axis, (*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not shape:
        return ()
    axis, blocked = _blocked(shape)
    return (*blocked[: axis + 1], *blocked[axis + 2 :])


def _encode(x: jax.Array, top: int, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes up to ``top`` and scales of fp32 ``x``; ``draws`` are uniform in [0, 1)."""
    axis, blocked = _blocked(x.shape) if x.ndim else (0, (1,))
    blocks = jnp.abs(x).reshape(blocked)
    scale = blocks.max(axis + 1 if x.ndim else 0, keepdims=True)
    share = (blocks / jnp.where(scale > 0, scale, 1.0)).reshape(x.shape)
    code = jnp.floor(top * jnp.sqrt(jnp.sqrt(share)))
    low, high = _power(code / top), _power((code + 1) / top)
    rounds_up = draws < (share - low) / (high - low)
    code = jnp.minimum(jnp.where(rounds_up, code + 1, code), top)
    kind = jnp.int8 if top == _SIGNED else jnp.uint8
    return (jnp.sign(x) * code).astype(kind), scale.reshape(_scale_shape(x.shape))


def _decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the numbers that codes stand for, fp32."""
    top = _SIGNED if codes.dtype == jnp.int8 else _UNSIGNED
    share = codes.astype(jnp.float32) / top
    share = jnp.sign(share) * _power(share)
    if not codes.ndim:
        return share * scale
    axis, blocked = _blocked(codes.shape)
    return (share.reshape(blocked) * jnp.expand_dims(scale, axis + 1)).reshape(codes.shape)


def _power(x: jax.Array) -> jax.Array:
    return jnp.square(jnp.square(x))
