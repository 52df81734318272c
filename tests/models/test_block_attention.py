"""Attention in blocks, compared with full attention: outputs, gradients, skipped blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cirag_jax.models import attention, block_attention, decoder
from cirag_jax.models.attention import Scoring
from cirag_jax.models.block_attention import attend_visible, make_visibility
from cirag_jax.models.io.pretrained_decoder import parse_decoder_config
from tests import tiny_decoder

pytestmark = pytest.mark.slow

LENGTH = 75  # two whole blocks and a partial one
NO_WINDOW = 1 << 30


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Sets small block sizes, so that short rows have several blocks."""
    monkeypatch.setattr(block_attention, "BLOCK", 32)


def operands(rows=2, heads=4, kv_heads=2, size=8, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(rows, LENGTH, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def make_packed(*rows, shared=None):
    """Returns segments and positions of packed rows, and their mask from its definition."""
    segments = np.zeros((len(rows), LENGTH), np.int32)
    positions = np.zeros((len(rows), LENGTH), np.int32)
    for row, lengths in enumerate(rows):
        common, start = (shared or [0] * len(rows))[row], 0
        for segment, length in enumerate(lengths, 1):
            segments[row, start : start + length] = segment
            first = 0 if start == 0 else common
            positions[row, start : start + length] = np.arange(first, first + length)
            start += length
    mask = np.zeros((len(rows), LENGTH, LENGTH), bool)
    for row in range(len(rows)):
        for t in range(LENGTH):
            for s in range(t + 1):
                common = shared is not None and s < shared[row]
                mask[row, t, s] = segments[row, t] == segments[row, s] or common
    mask &= (segments > 0)[:, :, None]  # padding
    return segments, positions, mask


CASES = {
    "whole rows": ([(75,), (75,)], None),
    "packed rows, padding": ([(40, 20, 15), (9, 50)], None),
    "a shared beginning": ([(40, 20, 15), (60, 15)], [35, 7]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("window", "cap"), [(NO_WINDOW, None), (20, None), (NO_WINDOW, 2.0)])
def test_attend_visible_outputs_and_gradients_equal_full_attention(case, window, cap):
    """In fp32, differences are up to 1.2e-6 for outputs, and 4e-6 for gradients up to 12."""
    rows, shared = CASES[case]
    segments, positions, mask = make_packed(*rows, shared=shared)
    mask &= positions[:, :, None] - positions[:, None, :] < window
    scoring = Scoring(8**-0.5, cap)
    q, k, v, slope = operands()
    shared_B = None if shared is None else jnp.asarray(shared, jnp.int32)
    real = (segments > 0)[:, :, None, None].astype(np.float32)

    def full(q, k, v):
        keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        return attention.attend(scoring, q, keys, values, jnp.asarray(mask))

    def blockwise(q, k, v):
        visible = make_visibility(jnp.asarray(segments), jnp.asarray(positions), shared_B)
        return attend_visible(scoring, q, k, v, visible, window)

    found, wanted = jax.jit(blockwise)(q, k, v), full(q, k, v)
    np.testing.assert_allclose(found * real, wanted * real, rtol=0, atol=3e-6)

    def gradients(function):
        loss = jax.jit(jax.grad(lambda *x: (function(*x) * slope * real).sum(), (0, 1, 2)))
        return loss(q, k, v)

    for a, b in zip(gradients(blockwise), gradients(full), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_attend_visible_skips_masked_blocks():
    """NaN keys in one segment, which fills a block, do not reach the other segments."""
    segments = np.repeat(np.arange(1, 4, dtype=np.int32), 32)[None]
    positions = np.tile(np.arange(32, dtype=np.int32), 3)[None]
    visible = make_visibility(jnp.asarray(segments), jnp.asarray(positions))
    assert int(visible.count) == 3 and visible.pairs_P.tolist() == [0, 4, 8, 0, 0, 0]
    q, k, v, _ = (x[:1, :1].repeat(96, 1) for x in operands())
    spoiled = k.at[:, 32:64].set(jnp.nan), v.at[:, 32:64].set(jnp.nan)
    found = np.asarray(attend_visible(Scoring(1.0), q, *spoiled, visible, NO_WINDOW))
    assert np.isfinite(found[:, :32]).all() and np.isfinite(found[:, 64:]).all()
    assert not np.isfinite(found[:, 32:64]).any()
    whole = make_visibility(jnp.ones_like(segments), jnp.arange(96, dtype=jnp.int32)[None])
    assert whole.pairs_P.tolist() == [0, 3, 4, 6, 7, 8] and int(whole.count) == 6


def test_attend_visible_padding_is_masked_and_skipped():
    """Padding attends to nothing, not even the prefix; its outputs and gradients are finite."""
    segments, positions, mask = make_packed((20, 10), (12, 5), shared=[8, 4])
    shared_B = jnp.asarray([8, 4], jnp.int32)
    visible = make_visibility(jnp.asarray(segments), jnp.asarray(positions), shared_B)
    np.testing.assert_array_equal(visible.mask(LENGTH, NO_WINDOW), mask)
    assert int(visible.count) == 1  # of six: the first block holds all real tokens

    def loss(*operands):
        mixed = attend_visible(Scoring(1.0), *operands, visible, NO_WINDOW)
        return mixed[segments > 0].sum(), mixed

    q, k, v, _ = operands()
    slopes, mixed = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    assert all(np.isfinite(x).all() for x in (mixed, *slopes))
    assert all(not np.asarray(slope)[segments == 0].any() for slope in slopes)


def test_attend_visible_new_packing_does_not_recompile():
    traces = []

    @jax.jit
    def run(q, k, v, segments, positions):
        traces.append(1)
        return attend_visible(
            Scoring(1.0), q, k, v, make_visibility(segments, positions), NO_WINDOW
        )

    q, k, v, _ = operands()
    for rows in ([(75,), (75,)], [(20, 55), (30, 30)]):
        segments, positions, _ = make_packed(*rows)
        run(q, k, v, segments, positions)
    assert len(traces) == 1


@pytest.mark.parametrize("remat", ["off", "projections"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_decoder_block_attention_equals_full_attention(family, remat):
    """Compares hidden states and their gradient for two rows, one of which is padded."""
    config = parse_decoder_config(tiny_decoder.config(family), "config.json")
    params = tiny_decoder.random_params(config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, tiny_decoder.VOCABULARY, (2, LENGTH))
    lengths = jnp.asarray([LENGTH, LENGTH - 30], jnp.int32)
    real = (np.arange(LENGTH) < np.asarray(lengths)[:, None])[:, :, None].astype(np.float32)
    weight = rng.normal(size=(2, LENGTH, config.d_model)).astype(np.float32)
    found = []
    for kind in ("transposed", "xla"):
        own = dataclasses.replace(config, attention=kind, remat=remat)

        @jax.jit
        def run(embedding, own=own):
            hidden = decoder.forward(
                own, {**params, "embedding": embedding}, jnp.asarray(tokens), lengths_B=lengths
            )
            return (hidden * real * weight).sum(), hidden * real

        found.append(jax.value_and_grad(run, has_aux=True)(params["embedding"]))
    (_, hidden), slope = found[0]
    (_, wanted), expected = found[1]
    # Twice the measured differences: 9e-7, and 4.4e-7 of the largest gradient.
    np.testing.assert_allclose(hidden, wanted, rtol=0, atol=2e-6)
    scale = np.abs(np.asarray(expected)).max()
    np.testing.assert_allclose(slope, expected, rtol=0, atol=1e-6 * scale)
