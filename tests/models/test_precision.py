"""Products of bf16 arrays: values, gradients, and the form that XLA on a CPU multiplies fast."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cirag_jax.models import precision
from cirag_jax.models.layers import linear


def _random(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16)


def _loss(x, kernel, axis):
    y: jax.Array = precision.multiply_kernel(x, kernel, axis)
    return jnp.sin(y.astype(jnp.float32)).sum()


def _reference(x, kernel, axis):
    kernel = kernel.T if axis else kernel
    return jnp.sin((x @ kernel).astype(jnp.bfloat16).astype(jnp.float32)).sum()


@pytest.mark.parametrize("axis", [0, 1])
def test_multiply_kernel_has_gradients_of_fp32_product(axis):
    x, kernel = _random(2, 3, 8), _random(8, 5) if axis == 0 else _random(5, 8)
    found = jax.grad(_loss, argnums=(0, 1))(x, kernel, axis)
    exact = jax.grad(_reference, argnums=(0, 1))(
        x.astype(jnp.float32), kernel.astype(jnp.float32), axis
    )
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        # bf16 has 8 bits: the gradient of the output and the result are each rounded once.
        scale = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(np.float32(ours), theirs, rtol=2**-7, atol=2**-7 * scale)


def _linear(x, kernel):
    return linear(x, kernel, None).astype(jnp.float32).sum()


@pytest.mark.parametrize(
    ("loss", "x"),
    [
        (lambda x, kernel: _loss(x, kernel.astype(x.dtype), 0), (6, 8)),
        (lambda x, kernel: _loss(x, kernel.T.astype(x.dtype), 1), (6, 8)),
        (_linear, (2, 3, 8)),
    ],
)
def test_bf16_products_have_bf16_operands_and_fp32_results(loss, x):
    gradient = jax.grad(lambda x, kernel: loss(x, kernel).astype(jnp.float32), argnums=(0, 1))
    text = jax.jit(gradient).lower(_random(*x), _random(8, 5).astype(jnp.float32)).as_text()
    products = re.findall(r"stablehlo\.dot_general.*: \((.*), (.*)\) -> (.*)", text)
    assert len(products) >= 2
    for *operands, result in products:
        assert all(each.endswith("bf16>") for each in operands)
        assert result.endswith("f32>")
