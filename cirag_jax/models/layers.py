"""Linear and feed-forward layers, layer norm and dropout, with hand-written gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from cirag_jax import sharding
from cirag_jax.models import precision
from cirag_jax.models.activations import Activation, activate
from cirag_jax.models.precision import Weight


def drop_units(x: Any, rate: float, key: jax.Array | None) -> jax.Array:
    """Applies inverted dropout; without a key, returns ``x`` unchanged."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, eps: float
) -> jax.Array:
    """Layer norm in fp32 over the last axis, returned in the dtype of ``x_BTD``.

    The hand-written backward pass stores only the normalized values and one number per row. JAX's
    automatic gradient would also store the broadcast scale.
    """
    return _layer_norm_forward(x_BTD, scale_D, bias_D, eps)[0]


def _layer_norm_forward(x_BTD, scale_D, bias_D, eps):
    x32_BTD = x_BTD.astype(jnp.float32)
    centred_BTD = x32_BTD - x32_BTD.mean(-1, keepdims=True)
    rstd_BT1 = jax.lax.rsqrt(jnp.square(centred_BTD).mean(-1, keepdims=True) + eps)
    normed_BTD = centred_BTD * rstd_BT1
    y_BTD = normed_BTD * scale_D
    y_BTD = (y_BTD if bias_D is None else y_BTD + bias_D).astype(x_BTD.dtype)
    return y_BTD, (normed_BTD.astype(x_BTD.dtype), rstd_BT1, scale_D, _presence(bias_D))


def _layer_norm_backward(eps, residuals, dy_BTD):
    del eps
    normed_BTD, rstd_BT1, scale_D, bias = residuals
    normed32_BTD, dy32_BTD = normed_BTD.astype(jnp.float32), dy_BTD.astype(jnp.float32)
    dnormed_BTD = dy32_BTD * scale_D
    along_BT1 = (dnormed_BTD * normed32_BTD).mean(-1, keepdims=True)
    dx_BTD = rstd_BT1 * (
        dnormed_BTD - dnormed_BTD.mean(-1, keepdims=True) - normed32_BTD * along_BT1
    )
    dscale_D = (dy32_BTD * normed32_BTD).sum((0, 1))
    dbias_D = None if bias is None else dy32_BTD.sum((0, 1))
    return dx_BTD.astype(dy_BTD.dtype), dscale_D, dbias_D


def _presence(bias: Weight | None) -> tuple[()] | None:
    """Returns a residual without arrays: None if there is no bias."""
    return None if bias is None else ()


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@jax.custom_vjp
def linear(x: jax.Array, kernel: Weight, bias: Weight | None) -> jax.Array:
    """Returns ``x @ kernel + bias`` in the dtype of ``x``; the bias may be None.

    ``x`` is ``[B, T, *I]``, the kernel ``[*I, *O]``; kernel and bias are fp32, or both `Rounded`.
    Heads remain a separate axis, because merging axes would gather an axis that is split over
    devices.

    The backward pass is hand-written for two reasons. It accumulates the parameters' gradients in
    fp32 in any compute dtype. It also computes them as `x^T dy`, which XLA on a CPU runs three
    times as fast as the `dy^T x` of JAX's automatic gradient.
    """
    contracted = (range(2, x.ndim), range(x.ndim - 2))
    y = precision.multiply(x, precision.weight_value(kernel).astype(x.dtype), contracted)
    return y if bias is None else y + precision.weight_value(bias).astype(x.dtype)


def _linear_forward(x, kernel, bias):
    return linear(x, kernel, bias), (x, precision.residual_of(kernel), _presence(bias))


def _linear_backward(residuals, dy):
    x, weight, bias = residuals
    return _input_gradient(weight, dy), *_kernel_gradient(weight, bias, x, dy)


def _input_gradient(weight: Weight, dy: jax.Array) -> jax.Array:
    """Returns the gradient of the input of `linear`."""
    kernel = precision.weight_value(weight)
    outer = range(2, dy.ndim)
    contracted = (outer, range(kernel.ndim - len(outer), kernel.ndim))
    return precision.multiply(dy, kernel.astype(dy.dtype), contracted)


def _kernel_gradient(weight: Weight, bias: Any, x: jax.Array, dy: jax.Array) -> tuple[Any, Any]:
    """Returns the fp32 gradients of the kernel ``weight`` and of the bias; see `_presence`."""
    rows = x.shape[0] * x.shape[1]
    x_RI, dy = x.reshape(rows, -1), dy.reshape(rows, *dy.shape[2:])
    dkernel = precision.multiply_transposed(x_RI, dy)
    dkernel = dkernel.reshape(*x.shape[2:], *dy.shape[1:])
    dkernel = precision.cotangent_of(weight, dkernel)
    if bias is None:
        return dkernel, None
    return dkernel, precision.cotangent_of(weight, dy.sum(0, dtype=jnp.float32))


linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def linear_parts(x: jax.Array, kernel: Weight, bias: Weight | None) -> tuple[jax.Array, ...]:
    """Returns P outputs of `linear`, for a kernel ``[D, P, *O]`` and a bias ``[P, *O]``.

    Each output has its own products, forward and backward, so it is contiguous. Splitting the
    output of one product would copy all outputs, and all their gradients in the backward pass.
    """
    return _linear_parts_forward(x, kernel, bias)[0]


def _linear_parts_forward(x, kernel, bias):
    residuals = (x, precision.residual_of(kernel), _presence(bias))
    kernel = precision.weight_value(kernel)
    bias = None if bias is None else precision.weight_value(bias)
    outputs = tuple(
        linear(x, kernel[:, part], None if bias is None else bias[part])
        for part in range(kernel.shape[1])
    )
    return outputs, residuals


def _linear_parts_backward(residuals, dys):
    x, weight, bias = residuals
    kernel = precision.weight_value(weight)
    dx = sum(_input_gradient(kernel[:, part], dy) for part, dy in enumerate(dys))
    parts = [_kernel_gradient(kernel[:, part], bias, x, dy) for part, dy in enumerate(dys)]
    dkernels, dbiases = zip(*parts, strict=True)
    dkernel = precision.cotangent_of(weight, jnp.stack(dkernels, axis=1))
    if bias is None:
        return dx, dkernel, None
    return dx, dkernel, precision.cotangent_of(weight, jnp.stack(dbiases))


linear_parts.defvjp(_linear_parts_forward, _linear_parts_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def feed_forward(act, x_BTD, up_DF, up_bias_F, down_FD, down_bias_D):
    """Two linear layers with an activation between them; biases may be None.

    Only the input and the pre-activation are stored; the backward pass recomputes the activation.
    This costs less than storing and reading two more arrays of width F. In gated layers, the first
    kernel is ``[D, 2, F]``.
    """
    return _feed_forward_forward(act, x_BTD, up_DF, up_bias_F, down_FD, down_bias_D)[0]


def _feed_forward_forward(act, x_BTD, up_DF, up_bias_F, down_FD, down_bias_D):
    pre_BTF = split_features(linear(x_BTD, up_DF, up_bias_F))
    y_BTD = linear(activate_gated(pre_BTF, act), down_FD, down_bias_D)
    weights = (precision.residual_of(up_DF), precision.residual_of(down_FD))
    biases = (_presence(up_bias_F), _presence(down_bias_D))
    return y_BTD, (x_BTD, pre_BTF, weights, biases)


def _feed_forward_backward(act, residuals, dy_BTD):
    x_BTD, pre_BTF, (up, down), (up_bias, down_bias) = residuals
    # Without the barrier, XLA would store the activation of the forward pass instead.
    pre_BTF, dy_BTD = jax.lax.optimization_barrier((pre_BTF, dy_BTD))
    hidden_BTF, pull = jax.vjp(lambda pre_BTF: activate_gated(pre_BTF, act), pre_BTF)
    (dpre_BTF,) = pull(_input_gradient(down, dy_BTD))
    dup = _kernel_gradient(up, up_bias, x_BTD, dpre_BTF)
    ddown = _kernel_gradient(down, down_bias, hidden_BTF, dy_BTD)
    return _input_gradient(up, dpre_BTF), *dup, *ddown


feed_forward.defvjp(_feed_forward_forward, _feed_forward_backward)


def split_features(pre: jax.Array) -> jax.Array:
    """Constrains the sharding of pre-activations, ``BTF`` or gated ``BT2F``."""
    axes = ("batch", "length", *(None,) * (pre.ndim - 3), "act_mlp")
    return sharding.constrain(pre, *axes)


def activate_gated(pre: jax.Array, kind: Activation) -> jax.Array:
    """Returns the activation ``BTF``; pre-activations ``BT2F`` are a gate and its factor."""
    if pre.ndim < 4:
        return activate(pre, kind)
    gate_BTF, factor_BTF = (part.squeeze(2) for part in jnp.split(pre, 2, axis=2))
    return activate(gate_BTF, kind) * factor_BTF
