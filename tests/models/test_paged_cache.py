"""Attention over pages of keys and values, which equals attention over contiguous rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from cirag_jax.models import attention, paged_cache


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize(("window", "cap"), [(1 << 30, None), (100, 2.0)])
def test_attend_pages_equals_attend(window, cap, new):
    """Rows are at different positions; garbage after them, or in unused pages, has no effect."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((8, new, 4, 8), (8, 2, 8, 384), (8, 2, 384, 8))
    )
    last_B = np.asarray([5, 100, 127, 128, 200, 250, 300, 379])
    positions = (last_B[:, None] + np.arange(new)).astype(np.int32)
    for row, last in enumerate(positions[:, -1]):
        k[row, :, :, last + 1 :] = v[row, :, last + 1 :] = 1e4
    distance = positions[:, :, None] - np.arange(384)
    mask = (distance >= 0) & (distance < window)
    scoring = attention.Scoring(8**-0.5, cap)
    tables = rng.permutation(24).astype(np.int32).reshape(8, 3)
    k_pages, v_pages = np.empty((24, 2, 8, 128), np.float32), np.empty((24, 2, 128, 8), np.float32)
    k_pages[tables] = k.reshape(8, 2, 8, 3, 128).transpose(0, 3, 1, 2, 4)
    v_pages[tables] = v.reshape(8, 2, 3, 128, 8).transpose(0, 2, 1, 3, 4)

    def attend(k_pages, v_pages, rows=slice(8)):
        own = jnp.asarray(tables[rows]), jnp.asarray(positions[rows])
        return np.asarray(
            paged_cache.attend_pages(scoring, q[rows], k_pages, v_pages, *own, window)
        )

    k_pages, v_pages = jnp.asarray(k_pages), jnp.asarray(v_pages)
    held = paged_cache.read_pages(k_pages, v_pages, jnp.asarray(tables))
    np.testing.assert_array_equal(held[0], k)
    np.testing.assert_array_equal(held[1], v)
    paged = attend(k_pages, v_pages)
    whole = np.asarray(attention.attend(scoring, q, k, v, jnp.asarray(mask)))
    np.testing.assert_allclose(paged, whole, rtol=0, atol=1e-6)
    # A row's output is exactly equal if it is computed without the longer rows.
    np.testing.assert_array_equal(attend(k_pages, v_pages, slice(4)), paged[:4])
    # The keys and values are stored as the bits of bf16.
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k_pages, v_pages)]
    bits = [paged_cache.pack(x, jnp.uint16) for x in (k_pages, v_pages)]
    found = attend(*bits)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, attend(*rounded))
