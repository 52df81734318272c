"""Adam with a compact state: rounding, distance to Adam, memory, sharding and resuming."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.training import compact_adam
from cirag_jax.training.compact_adam import scale_by_compact_adam
from cirag_jax.training.state import apply_gradient, make_state

pytestmark = pytest.mark.usefixtures("standard_promotion")

B1, B2, EPS = 0.9, 0.999, 1e-8


@pytest.mark.parametrize(("top", "sign"), [(127, 1), (127, -1), (255, 1)])
def test_rounding_is_unbiased_and_to_a_neighbor(top, sign):
    x = sign * jnp.logspace(-7, 0, 64, dtype=jnp.float32)

    def stored(draws):
        return compact_adam._decode(*compact_adam._encode(x, top, draws))

    draws = (jnp.arange(4000, dtype=jnp.float32)[:, None] + 0.5) / 4000 * jnp.ones(64)
    values = np.asarray(jax.jit(jax.vmap(stored))(draws), np.float64)
    levels = (np.arange(top + 1) / top) ** 4
    place = np.searchsorted(levels, np.abs(x) * (1 - 1e-6))
    low, high = levels[np.maximum(place - 1, 0)], levels[place]
    assert np.all(np.abs(values) >= low * (1 - 1e-5)) and np.all(np.abs(values) <= high * 1.00001)
    assert np.all(np.abs(values.mean(0) - x) <= 1e-3 * (high - low) + 1e-6 * np.abs(x))


def gradients(steps=40):
    """Gradients of parameters whose elements differ by a factor of 100 within a block."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-2, 0, (96, 8))
    return [jnp.asarray(scale * rng.normal(1.0, 1.0, (96, 8)), jnp.float32) for _ in range(steps)]


def updates_of(tx, gradients):
    update, state = jax.jit(tx.update), tx.init(gradients[0])
    for gradient in gradients:
        step, state = update(gradient, state)
        yield np.asarray(step)


def test_int8_updates_are_within_ten_percent_of_adam():
    pairs = zip(
        updates_of(scale_by_compact_adam(B1, B2, EPS, factored=False), gradients()),
        updates_of(optax.scale_by_adam(B1, B2, EPS), gradients()),
        strict=True,
    )
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]
    assert errors[0] < 1e-6  # The first update uses no stored moment.
    assert 0 < max(errors) < 0.1


def test_factored_updates_equal_adam_if_squares_have_rank_one():
    rng = np.random.default_rng(0)
    vectors = [rng.uniform(0.1, 1.0, (2, 7, 1)), rng.uniform(0.1, 1.0, (2, 1, 5))]
    product = jnp.asarray(vectors[0] * vectors[1], jnp.float32)
    tree = [{"layers": size * product, "bias": size * product[0, 0]} for size in (1.0, -3.0, 0.5)]
    # Without momentum, the mean gradient is not rounded.
    ours = scale_by_compact_adam(0.0, B2, EPS, factored=True)
    expected = optax.scale_by_adam(0.0, B2)
    states: Any = ours.init(tree[0]), expected.init(tree[0])
    for gradient in tree:
        (a, first), (b, second) = (
            tx.update(gradient, state) for tx, state in zip((ours, expected), states, strict=True)
        )
        states = first, second
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), a, b)
    assert states[0].square["layers"].shape == (2, 1, 5)
    assert states[0].square_scale["layers"].shape == (2, 7, 1)


@pytest.mark.parametrize(("factored", "share"), [(False, 1 / 4), (True, 1 / 8)])
@pytest.mark.parametrize("shape", [(28, 3584, 64), (28, 64, 18944), (1024, 4096)])
def test_memory_is_a_share_of_adams(factored, share, shape):
    def size(tx):
        name = "layers" if len(shape) == 3 else "embedding"
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32)}
        leaves = jax.tree.leaves(jax.eval_shape(tx.init, params))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    ours = size(scale_by_compact_adam(B1, B2, EPS, factored=factored))
    assert share < ours / size(optax.scale_by_adam()) < 1.1 * share


@pytest.mark.parametrize("factored", [False, True])
def test_resumed_run_equals_uninterrupted_run_and_is_sharded(tmp_path, factored):
    mesh = sharding.make_mesh(1, 2, 2, devices=jax.devices()[:4])
    tx = optax.chain(scale_by_compact_adam(B1, B2, EPS, factored=factored), optax.scale(-0.01))
    kernel = nnx.Param(jnp.ones((2, 8, 64)), logical_axes=("layers", "embed", "mlp"))
    bias = nnx.Param(jnp.ones(8), logical_axes=("norm",))
    params = nnx.State({"layers": {"w": kernel}, "bias": bias})

    @jax.jit
    def step(state):
        key = jax.random.fold_in(jax.random.key(1), state.step)
        gradient = jax.tree.map(lambda x: jax.random.normal(key, (2, *x.shape)), state.params)
        return apply_gradient(tx, state, gradient, jnp.float32(0))[0]

    with jax.set_mesh(mesh):
        initial_state: Any = make_state(params, tx, 0, mesh)
        state: Any = step(initial_state)
        with Checkpoints(tmp_path / "c") as checkpoints:
            checkpoints.save(1, state, None, {})
            resumed = checkpoints.restore(1, state).state
        finals = [jax.tree.leaves((s.params, s.opt_state)) for s in map(step, (state, resumed))]
    for a, b in zip(*finals, strict=True):
        assert a.sharding == b.sharding or a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a, b)
    codes = initial_state.opt_state[0].mean["layers"]["w"].get_value()
    assert codes.dtype == jnp.int8
    assert codes.sharding.shard_shape(codes.shape) == (2, 4, 32)
