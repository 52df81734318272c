"""Splash attention: the choice, results of the interpreted kernel, and lowering for TPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cirag_jax.models import attention, splash
from cirag_jax.models.attention import Scoring
from cirag_jax.models.block_attention import make_visibility
from cirag_jax.models.decoder_config import DecoderConfig, choose_attention

SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], 40, axis=1)  # 160 tokens, of which 40 padding


def _operands(dtype):
    rng = np.random.default_rng(0)
    shapes = [(*SEGMENTS.shape, heads, 64) for heads in (2, 1, 1)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(("window", "softcap"), [(0, None), (30, 5.0)])
def test_attend_equals_attention_with_a_mask(window, softcap):
    q, k, v = _operands(jnp.float32)
    scoring = Scoring(0.2, softcap)
    index = np.arange(SEGMENTS.shape[1])
    positions = np.stack([index - np.maximum.accumulate(
        np.where(np.diff(row, prepend=0) != 0, index, 0)) for row in SEGMENTS])  # fmt: skip
    visible = make_visibility(jnp.asarray(SEGMENTS), jnp.asarray(positions))
    mask = visible.mask(SEGMENTS.shape[1], window or 1 << 30)
    expected = attention.attend(scoring, q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask)
    actual = splash.attend(scoring, q, k, v, jnp.asarray(SEGMENTS), window, interpret=True)
    real = SEGMENTS > 0
    np.testing.assert_allclose(actual[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [(1, 1, 1), (2, 1, 1)])
def test_gradient_lowers_for_tpus(axes):
    names, count = ("data", "fsdp", "tensor"), int(np.prod(axes))
    mesh = jax.make_mesh(
        axes, names, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:count]
    )

    def loss(q, k, v):
        return splash.attend(Scoring(0.2), q, k, v, jnp.asarray(SEGMENTS)).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        lowered = gradient.trace(*_operands(jnp.bfloat16)).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 3  # forward, and dq, dk and dv


def test_choose_attention_on_a_tpu():
    config = DecoderConfig(
        vocab_size=8, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64, d_ff=8
    )

    def choose(platform="tpu", **changes):
        changed = dataclasses.replace(config, **changes)
        return choose_attention(changed, platform=platform, packed=True)

    assert choose() == choose(attention_softcap=5.0) == choose(windows=(4, 4)) == "splash"
    assert choose(windows=(4, 0)) == choose(causal=False) == "xla"
    assert choose("cpu") == "transposed" and choose("gpu") == "xla"
    assert choose_attention(config, platform="tpu") == "xla"
