"""bf16 weights of stacked layers on a CPU are copied, or converted to fp32, layer by layer."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cirag_jax.models import decoder, decoder_params, lora
from cirag_jax.models.decoder_config import DecoderConfig

_QUICK: Any = {"xla_backend_optimization_level": "0"}


def _model(num_layers):
    return DecoderConfig(
        vocab_size=64,
        d_model=64,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        d_ff=256,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )


def test_forward_bf16_on_cpu_copies_one_layer_at_a_time():
    """Some CPUs multiply in fp32; temporary memory never grows with the number of layers."""

    def temporary_bytes(num_layers):
        config = _model(num_layers)
        params = nnx.to_pure_dict(decoder_params.abstract_params(config))
        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        run = jax.jit(functools.partial(decoder.forward, config))
        memory: Any = run.lower(params, tokens).compile().memory_analysis()
        return memory.temp_size_in_bytes

    few, many = temporary_bytes(2), temporary_bytes(6)
    fp32_layer = 4 * sum(
        math.prod(s) for s, _ in decoder_params.layer_parameters(_model(1)).values()
    )
    assert fp32_layer / 2 < few < 1.5 * fp32_layer
    assert many - few < 0.01 * fp32_layer


def test_forward_reading_layers_in_the_scan_keeps_bits():
    """With fp32 arrays, ``param_dtype`` selects only how the scan reads its layers."""
    config = dataclasses.replace(
        _model(3), dtype="float32", param_dtype="float32", windows=(0, 4, 0)
    )
    params = nnx.to_pure_dict(nnx.state(decoder_params.Decoder(config, rngs=nnx.Rngs(0))))
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 60, (2, 8)), jnp.int32)
    shape = lora.LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))
    adapter = nnx.to_pure_dict(nnx.state(lora.Lora(config, shape, rngs=nnx.Rngs(1))))
    adapter = jax.tree.map(lambda x: x + 0.01, adapter)

    def run(config, adapter):
        def loss(adapter):
            hidden = decoder.forward(config, params, tokens, adapter=adapter)
            return jnp.square(hidden).sum(), hidden

        return jax.jit(jax.grad(loss, has_aux=True), compiler_options=_QUICK)(adapter)

    bf16 = dataclasses.replace(config, param_dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, run(config, adapter), run(bf16, adapter))


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(part, "eqns"):
                yield from _equations(part)


@pytest.mark.parametrize(("remat", "runs"), [("off", 1), ("projections", 1), ("full", 2)])
def test_fused_attention_runs_again_only_with_full_remat(monkeypatch, remat, runs):
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{cudnn}.check_cudnn_version", lambda: 91300)
    config = dataclasses.replace(_model(2), attention="cudnn", remat=remat)
    params = decoder_params.to_params(decoder_params.abstract_params(config))
    adapter = lora.to_adapter(lora.abstract_adapter(config, lora.LoraConfig(rank=2)))
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)

    def loss(adapter, params, tokens):
        hidden = decoder.forward(config, params, tokens, adapter=adapter)
        return hidden.astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(adapter, params, tokens)
    names = [equation.primitive.name for equation in _equations(jaxpr)]
    assert sum("dot_product_attention_fwd" in name for name in names) == runs
    assert sum("dot_product_attention_bwd" in name for name in names) == 1
