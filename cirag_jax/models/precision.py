"""Weights rounded to the compute dtype once per step, and weights packed for inference.

A training step runs each layer many times: for every chunk of the batch, and again for
rematerialization. Rounding the weights beforehand saves reading and rounding the fp32 weights each
time. The results are the same, bit for bit.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import layout

Dtype = Literal["float32", "bfloat16"]  # dtype of weights or of the computation


class Rounded(NamedTuple):
    """A weight in the compute dtype, and an fp32 array that receives its gradient.

    The gradient of ``value`` itself would be rounded to the compute dtype in every chunk.
    ``buffer`` is None in the residuals of a backward pass.
    """

    value: jax.Array
    buffer: jax.Array | None


Weight = jax.Array | Rounded


def is_rounded(path: Sequence[Any]) -> bool:
    """Returns whether the parameter at ``path`` of an `nnx.State` is used in the compute dtype.

    This applies to all parameters of layers except norms and task adapters. Embedding tables and
    scoring heads are used in fp32.
    """
    name = str(path[-1])
    return "layers" in path and "norm" not in name and "_task_" not in name


def round_weights(
    params: nnx.State, dtype: str, run: Callable[..., Any] = operator.call
) -> nnx.State:
    """Returns ``params`` with the parameters selected by `is_rounded` cast to ``dtype``.

    ``run`` calls the compiled function; see `training.rehearsal`.
    """
    if dtype == "float32":
        return params
    flat: dict[Any, Any] = {tuple(path): node for path, node in nnx.to_flat_state(params)}
    layers = {path: node for path, node in flat.items() if is_rounded(path)}
    rounded_layers = run(_round, list(layers.values()), dtype)
    return nnx.from_flat_state({**flat, **dict(zip(layers, rounded_layers, strict=True))})


@functools.partial(jax.jit, static_argnums=1)
def _round(nodes: list[nnx.Variable], dtype: str) -> list[nnx.Variable]:
    return jax.tree.map(lambda x: x.astype(dtype), nodes)


def redirect_gradients(params: Any, buffers: Any) -> Any:
    """Returns ``params`` with gradients redirected to ``buffers``, fp32 of the same shapes."""
    return jax.tree.map(_redirect, params, buffers)


def _redirect(x: jax.Array, buffer: jax.Array) -> Weight:
    return _send_gradient_to(x, buffer) if x.dtype == buffer.dtype else Rounded(x, buffer)


@jax.custom_vjp
def _send_gradient_to(x: jax.Array, buffer: jax.Array) -> jax.Array:
    """Returns ``x``, but sends its gradient to ``buffer``."""
    del buffer
    return x


_send_gradient_to.defvjp(lambda x, buffer: (x, None), lambda _, dx: (None, dx))


def gradient_buffers(params: Any) -> Any:
    """Returns fp32 zeros in the shapes of ``params``, for `redirect_gradients`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)


def weight_value(weight: Weight) -> jax.Array:
    """Returns the array of a plain or `Rounded` weight."""
    return weight.value if isinstance(weight, Rounded) else weight


def residual_of(weight: Weight) -> Weight:
    """Returns a weight as the backward pass needs it: without the buffer of a `Rounded` weight."""
    return Rounded(weight.value, None) if isinstance(weight, Rounded) else weight


def cotangent_of(weight: Weight, gradient: jax.Array) -> Any:
    """Returns the cotangent of a weight; for a `Rounded` weight, the cotangent of its buffer."""
    return Rounded(None, gradient) if isinstance(weight, Rounded) else gradient  # pyright: ignore


def multiply(x: jax.Array, y: jax.Array, contracted: Any, batch: Any = ((), ())) -> jax.Array:
    """Returns a product of two arrays, summed in fp32, in the dtype of ``x``.

    ``contracted`` and ``batch`` are dimension numbers of `jax.lax.dot_general`. XLA on a CPU has
    fast bf16 products only with fp32 results: three times as fast as fp32 products where the CPU
    has instructions for bf16 matrices (AMX).
    """
    dtype = jnp.float32 if jax.default_backend() == "cpu" else x.dtype
    y = jax.lax.dot_general(x, y, (contracted, batch), preferred_element_type=dtype)
    return y.astype(x.dtype)


def multiply_transposed(x_RI: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns ``x^T dy`` in fp32, the gradient of a kernel; ``dy`` is ``[R, *O]``."""
    contracted = ((0,), (0,))
    if jax.default_backend() == "cpu" and x_RI.dtype == jnp.bfloat16:
        # The fast products also need rows of the first array to be contiguous.
        x_RI = layout.with_layout_constraint(x_RI.T, layout.Layout((0, 1)))
        contracted = ((1,), (0,))
    return jax.lax.dot_general(x_RI, dy, (contracted, ((), ())), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def multiply_kernel(x: jax.Array, kernel: jax.Array, axis: int) -> jax.Array:
    """Returns ``x`` times ``kernel``, contracting its ``axis`` (0 or 1), like `multiply`.

    JAX's automatic gradient would multiply an fp32 gradient by a bf16 kernel, in fp32.
    """
    return multiply(x, kernel, ((x.ndim - 1,), (axis,)))


def _multiply_kernel_backward(axis, residuals, dy):
    x, kernel = residuals
    dx = multiply(dy, kernel, ((dy.ndim - 1,), (1 - axis,)))
    sides = [each.reshape(-1, each.shape[-1]) for each in (x, dy)]
    return dx, multiply_transposed(*sides[:: 1 - 2 * axis]).astype(kernel.dtype)


multiply_kernel.defvjp(
    lambda x, kernel, axis: (multiply_kernel(x, kernel, axis), (x, kernel)),
    _multiply_kernel_backward,
)


class Packed(NamedTuple):
    """A kernel for inference on a CPU, which has no gradient.

    XLA reads the transposed kernel in order, which is up to 1.4 times as fast for a few tokens. An
    int8 kernel takes half as long as a bf16 kernel again, because memory bandwidth is the limit.

    Attributes:
      values_OI: the transposed kernel, int8 or a floating-point type. Kernels of experts have a
        leading axis.
      scale_O: fp32 factor of each output of an int8 kernel, otherwise None.
    """

    values_OI: jax.Array
    scale_O: jax.Array | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel, ``(..., inputs, outputs)``."""
        *leading, outputs, inputs = self.values_OI.shape
        return (*leading, inputs, outputs)


@functools.partial(jax.jit, static_argnums=(1, 2))
def pack_kernel(kernel: jax.Array, int8: bool, is_transposed: bool = False) -> Packed:
    """Returns a kernel ``(..., inputs, outputs)``, or one that is transposed already, as `Packed`.

    int8 rounds each output's weights to 255 levels, up to the largest of them.
    """
    values_OI = kernel if is_transposed else kernel.swapaxes(-1, -2)
    if not int8:
        return Packed(values_OI, None)
    return Packed(*_round_rows(values_OI.astype(jnp.float32)))


def _round_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns fp32 ``x`` as int8 times an fp32 scale for each row (the last axis)."""
    scale = jnp.maximum(jnp.abs(x).max(-1), jnp.finfo(jnp.float32).tiny) / 127
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


def multiply_int8(x: jax.Array, values_OI: jax.Array, scale_O: jax.Array) -> jax.Array:
    """Returns ``x`` times an int8 kernel (see `Packed`), fp32.

    Each token's numbers are rounded to 255 levels, and products of int8 are summed exactly in
    int32. Source: Yao et al. (2022), ZeroQuant (token-wise dynamic quantization).
    """
    rounded, scale = _round_rows(x.astype(jnp.float32))
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(rounded, values_OI, contracted, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * scale[..., None] * scale_O


def gradient_dtype(weight: Weight) -> Any:
    """Returns the dtype in which the gradient of a weight is accumulated."""
    return jnp.float32 if isinstance(weight, Rounded) else weight.dtype
