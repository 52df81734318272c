"""Chunked cross-entropy, compared with the plain formula."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.models import decoder
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.training import cross_entropy as ce
from cirag_jax.training.rehearsal import collectives

ROWS, LENGTH, WORDS, WIDTH = 3, 17, 104, 32
# For fp32 sums of twenty losses of about 20, and gradients up to 5. The largest measured difference
# is 6e-6.
RTOL, ATOL = 5e-7, 1e-5


def problem(tied=False, softcap=None):
    config = DecoderConfig(WORDS, WIDTH, 1, 4, 2, 8, 64, tie_embeddings=tied, final_softcap=softcap)
    rng = np.random.default_rng(0)
    shape = (WORDS, WIDTH) if tied else (WIDTH, WORDS)
    head = {"embedding" if tied else "lm_head": rng.normal(size=shape).astype(np.float32)}
    hidden_BTD = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    targets_BT = rng.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)
    mask_BT = rng.random((ROWS, LENGTH)) < 0.4
    mask_BT[1] = False
    return config, head, hidden_BTD, targets_BT, mask_BT


def plain_logprobs(config, head, hidden_BTD, targets_BT):
    logprobs_BTV = jax.nn.log_softmax(decoder.logits(config, head, hidden_BTD))
    return jnp.take_along_axis(logprobs_BTV, targets_BT[..., None], -1)[..., 0]


CASES = [(False, None), (True, None), (False, 3.0), (True, 3.0)]


@pytest.mark.parametrize("chunk", [1, 12, 1000])
@pytest.mark.parametrize(("tied", "softcap"), CASES)
def test_cross_entropy_equals_plain_formula(tied, softcap, chunk):
    config, head, hidden_BTD, targets_BT, mask_BT = problem(tied, softcap)

    def expected(hidden_BTD, head):
        logprobs_BT = plain_logprobs(config, head, hidden_BTD, targets_BT)
        return -2.0 * jnp.where(mask_BT, logprobs_BT, 0.0).sum()

    @jax.jit
    def chunked(hidden_BTD, head):
        total, count = ce.cross_entropy(
            config, head, hidden_BTD, targets_BT, mask_BT, chunk=chunk, train_head=True
        )
        return 2.0 * total, count

    both = (0, 1)
    (value, count), gradients = jax.value_and_grad(chunked, both, has_aux=True)(hidden_BTD, head)
    value_2, gradients_2 = jax.value_and_grad(expected, both)(hidden_BTD, head)
    assert int(count) == mask_BT.sum() and count.dtype == value.dtype == jnp.float32
    np.testing.assert_allclose(value, value_2, rtol=RTOL)
    # Without a gradient.
    np.testing.assert_allclose(chunked(hidden_BTD, head)[0], value_2, rtol=RTOL)
    for a, b in zip(*map(jax.tree.leaves, (gradients, gradients_2)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL)


def test_cross_entropy_weights_scale_sum_and_count():
    config, head, hidden_BTD, targets_BT, mask_BT = problem()
    weights_BT = np.where(mask_BT, 0.25, 0.0).astype(np.float32)
    total, count = ce.cross_entropy(config, head, hidden_BTD, targets_BT, weights_BT)
    total_2, count_2 = ce.cross_entropy(config, head, hidden_BTD, targets_BT, mask_BT)
    np.testing.assert_allclose(total, 0.25 * total_2, rtol=1e-6)
    assert count == 0.25 * count_2


def test_cross_entropy_masked_tokens_have_no_effect():
    config, head, hidden_BTD, targets_BT, mask_BT = problem()
    spoilt_BTD = np.where(mask_BT[..., None], hidden_BTD, np.nan)
    spoilt_BT = np.where(mask_BT, targets_BT, -100)

    def chunked(hidden_BTD, targets_BT, head):
        return ce.cross_entropy(
            config, head, hidden_BTD, targets_BT, mask_BT, chunk=12, train_head=True
        )[0]

    value_and_grad = jax.value_and_grad(chunked, (0, 2))
    value, (gradient, head_gradient) = value_and_grad(hidden_BTD, targets_BT, head)
    value_2, (gradient_2, head_gradient_2) = value_and_grad(spoilt_BTD, spoilt_BT, head)
    assert value == value_2
    np.testing.assert_array_equal(head_gradient["lm_head"], head_gradient_2["lm_head"])
    np.testing.assert_array_equal(gradient[mask_BT], gradient_2[mask_BT])
    assert not np.asarray(gradient)[~mask_BT].any() and not np.asarray(gradient_2)[~mask_BT].any()
    nothing = ce.cross_entropy(config, head, hidden_BTD, targets_BT, np.zeros_like(mask_BT))
    assert nothing == (0.0, 0.0)


def test_cross_entropy_output_layer_has_no_gradient():
    config, head, hidden_BTD, targets_BT, mask_BT = problem()
    gradient = jax.grad(
        lambda head: ce.cross_entropy(config, head, hidden_BTD, targets_BT, mask_BT)[0]
    )(head)
    assert not gradient["lm_head"].any()


def test_cross_entropy_never_stores_all_logits():
    config = DecoderConfig(4096, 16, 1, 2, 2, 8, 16)
    rows, length, chunk = 2, 512, 64
    shapes = (
        jax.ShapeDtypeStruct((16, 4096), jnp.float32),
        jax.ShapeDtypeStruct((rows, length, 16), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
    )

    def loss(head, hidden_BTD, targets_BT):
        mask_BT = targets_BT > 0
        head = {"lm_head": head}
        return ce.cross_entropy(config, head, hidden_BTD, targets_BT, mask_BT, chunk=chunk)[0]

    compiled = jax.jit(jax.grad(loss, argnums=1)).lower(*shapes).compile()
    sizes = [
        int(np.prod([int(n) for n in dims.split(",")]))
        for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    ]
    assert max(sizes) == chunk * 4096  # The logits of one chunk are 1/16 of all logits.
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < rows * length * 4096 * 4 / 2


@pytest.mark.parametrize("tied", [False, True])
def test_cross_entropy_sharded_vocabulary_equals_unsharded(tied):
    config, head, hidden_BTD, targets_BT, mask_BT = problem(tied)
    hidden_BTD, targets_BT, mask_BT = (
        np.concatenate([x, x[:1]]) for x in (hidden_BTD, targets_BT, mask_BT)
    )

    def run(head, hidden_BTD, targets_BT, mask_BT):
        def total(hidden_BTD):
            return ce.cross_entropy(config, head, hidden_BTD, targets_BT, mask_BT, chunk=12)[0]

        return jax.value_and_grad(total)(hidden_BTD)

    expected = run(head, hidden_BTD, targets_BT, mask_BT)
    mesh = sharding.make_mesh(1, 2, 4)
    axes = {"embedding": ("vocab", "embed"), "lm_head": ("embed", "vocab")}
    placed = {
        name: sharding.place(
            x, jax.NamedSharding(mesh, sharding.logical_to_spec(axes[name], x.shape, mesh))
        )
        for name, x in head.items()
    }
    rows = [
        sharding.place(x, sharding.batch_sharding(mesh, x.ndim, x.shape))
        for x in (hidden_BTD, targets_BT, mask_BT)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(placed, *rows).compile()
        actual = compiled(placed, *rows)
    for f, w in zip(actual, expected, strict=True):
        np.testing.assert_allclose(f, w, rtol=1e-6, atol=5e-6)
    # The logits of a chunk are never gathered: each device has a quarter of the vocabulary.
    text = compiled.as_text() or ""
    assert "f32[2,6,26]" in text and "f32[2,6,104]" not in text
    # The other half of the weight is gathered once, independent of the number of chunks.
    gathered = collectives(text, loops=100)["all-gather"].bytes
    assert 0 <= gathered - WORDS * WIDTH < 0.1 * WORDS * WIDTH


@pytest.mark.parametrize(("tied", "softcap"), CASES)
def test_token_losses_equal_plain_formula_in_any_function(tied, softcap):
    config, head, hidden_BTD, targets_BT, mask_BT = problem(tied, softcap)

    def chunked(hidden_BTD, head):
        losses_BT = ce.token_losses(
            config, head, hidden_BTD, targets_BT, mask_BT, chunk=12, train_head=True
        )
        return 0.05 * jnp.square(losses_BT).sum(), losses_BT

    def expected(hidden_BTD, head):
        logprobs_BT = plain_logprobs(config, head, hidden_BTD, targets_BT)
        losses_BT = jnp.where(mask_BT, -logprobs_BT, 0.0)
        return 0.05 * jnp.square(losses_BT).sum(), losses_BT

    both = (0, 1)
    (_, losses_BT), gradients = jax.value_and_grad(chunked, both, has_aux=True)(hidden_BTD, head)
    (_, losses_2), gradients_2 = jax.value_and_grad(expected, both, has_aux=True)(hidden_BTD, head)
    np.testing.assert_allclose(losses_BT, losses_2, rtol=1e-6, atol=ATOL)
    assert not np.asarray(losses_BT)[~mask_BT].any()
    for a, b in zip(*map(jax.tree.leaves, (gradients, gradients_2)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL)
