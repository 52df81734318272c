"""Kernels in 4 bits, compared with a table, and in decoders."""

import dataclasses
import statistics
from typing import Any

import jax
import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.models import decoder, decoder_params, lora, nf4
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.models.lora import LoraConfig
from tests import tiny_decoder


def test_levels_are_quantiles_of_a_normal_distribution():
    """As in the appendix of Dettmers et al. (2023), with the tail probability of their code."""
    quantile, tail = statistics.NormalDist().inv_cdf, 0.9677083
    above = [quantile(x) for x in np.linspace(tail, 0.5, 9)[:-1]]
    below = [-quantile(x) for x in np.linspace(tail, 0.5, 8)[:-1]]
    expected = np.sort([*above, 0.0, *below]) / max(above)
    np.testing.assert_allclose(nf4.LEVELS, expected, atol=1e-6)


@pytest.mark.parametrize("inputs", [128, 96])
def test_quantize_rounds_to_nearest_value_of_block(inputs):
    kernel = np.random.default_rng(0).normal(size=(2, inputs, 5)).astype(np.float32)
    kernel[0, :64, 3] = 0.0
    packed = nf4.quantize(jax.numpy.asarray(kernel))
    assert packed.shape == kernel.shape
    actual = np.asarray(nf4.dequantize(packed, "float32"))
    block = 64 if inputs == 128 else 32
    for layer, start, column in np.ndindex(2, inputs // block, 5):
        index = layer, slice(start * block, (start + 1) * block), column
        levels = np.asarray(nf4.LEVELS, np.float32) * np.abs(kernel[index]).max()
        nearest = np.abs(kernel[index][:, None] - levels).argmin(1)
        np.testing.assert_array_equal(actual[index], levels[nearest])


def test_quantize_odd_inputs_is_refused():
    with pytest.raises(UserError, match="even number of inputs, not 33"):
        nf4.quantize(jax.numpy.zeros((33, 2)))


SIZES: Any = {"d_model": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "d_ff": 256}
CONFIG = DecoderConfig(vocab_size=64, num_layers=3, **SIZES, quantization="nf4")


def test_kernels_take_four_and_a_half_bits():
    state = decoder_params.abstract_params(CONFIG)
    kernels = [x for x in decoder_params.to_params(state)["layers"].values() if len(x.shape) == 3]
    weights = sum(np.prod(x.shape) for x in kernels)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kernels))
    assert stored * 8 == 4.5 * weights


@pytest.mark.parametrize("remat", ["off", "projections", "full"])
def test_no_dense_kernel_is_stored_for_the_backward_pass(remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    params = decoder_params.to_params(decoder_params.abstract_params(config))
    adapter = lora.to_adapter(lora.abstract_adapter(config, LoraConfig(rank=2)))
    tokens = jax.ShapeDtypeStruct((1, 7), "int32")

    def backward(adapter, params, tokens):
        run = lambda adapter: decoder.forward(config, params, tokens, adapter=adapter)  # noqa: E731
        return jax.vjp(run, adapter)[1]

    stored = jax.tree.leaves(jax.eval_shape(backward, adapter, params, tokens))
    dense = [x for x in stored if x.shape[-2:] in ((64, 256), (256, 64), (64, 64), (64, 32))]
    assert stored and not dense


def test_load_decoder_quantizes_the_layers_of_a_checkpoint(tmp_path):
    tiny_decoder.folder(tmp_path / "base", "qwen3_moe", mlp_only_layers=[1])
    dense, packed = (
        decoder_params.to_params(load_decoder(str(tmp_path / "base"), quantization=each).state)
        for each in (None, "nf4")
    )
    layers = packed["layers"]
    kernels = {name for name, x in layers.items() if isinstance(x, nf4.Nf4)}
    assert kernels == {*decoder_params.PROJECTIONS, *decoder_params.EXPERTS}
    for name in kernels:
        expected = nf4.quantize(dense["layers"].pop(name))
        jax.tree.map(np.testing.assert_array_equal, layers.pop(name), expected)
    jax.tree.map(np.testing.assert_array_equal, packed, dense)
