"""LoRA adapters compared with PEFT: forward, gradient, merging, dropout, sharding, targets."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import decoder, decoder_layer, decoder_params, lora, low_rank
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import LoraOptions
from cirag_jax.models.io import pretrained_decoder
from cirag_jax.models.lora import LoraConfig
from tests import tiny_adapter, tiny_decoder

ATOL = 1e-5  # fp32, on logits of up to 7; the largest difference measured is 4e-6
LORA = LoraConfig(rank=4, alpha=6.0)
FUSED_LORA = LoraConfig(4, 3.0, targets=("qkv_proj", "gate_up_proj", "o_proj", "down_proj"))

CASES = {
    "llama": ("llama", {}, LORA),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, LORA),
    "qwen2, some layers": ("qwen2", {}, LoraConfig(3, 5.0, targets=("q_proj", "down_proj"))),
    "qwen3_moe": (
        "qwen3_moe",
        {"mlp_only_layers": [1]},
        LoraConfig(4, 6.0, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
    ),
    "gemma2, rank-stabilised": ("gemma2", {}, LoraConfig(4, 6.0, rank_stabilised=True)),
    "gemma3": ("gemma3_text", {}, LORA),
    "smollm3": ("smollm3", {"num_hidden_layers": 2, "no_rope_layer_interval": 2}, LORA),
    "phi3": ("phi3", {"original_max_position_embeddings": 8}, FUSED_LORA),
}


def tokens(rows: int = 2, length: int = 11) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 320, (rows, length)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def our_logits(config, params, adapter, tokens_BT, options, key=None):
    hidden_BTD = decoder.forward(
        config, params, tokens_BT, adapter=adapter, lora=options, dropout_key=key
    )
    return decoder.logits(config, params, hidden_BTD)


def torch_logits(model, tokens_BT):
    return model(input_ids=torch.tensor(tokens_BT, dtype=torch.int64)).logits


@pytest.mark.parametrize("case", CASES)
def test_lora_forward_and_gradient_equal_peft(case, tmp_path):
    family, fields, config = CASES[case]
    model, ours, state = tiny_adapter.both(tmp_path / "base", config, family, **fields)
    params, tokens_BT = decoder_params.to_params(ours.state), tokens()
    options = lora.lora_options(config, train=True)
    weights_BTV = np.random.default_rng(1).normal(size=(*tokens_BT.shape, 320)).astype(np.float32)

    theirs = torch_logits(model, tokens_BT)
    (theirs * torch.tensor(weights_BTV)).sum().backward()
    wanted = tiny_adapter.stacked(model, config.names, 2, gradient=True)

    def weighted(adapter):
        logits = our_logits(ours.config, params, adapter, tokens_BT, options)
        return (logits * weights_BTV).sum(), logits

    (_, logits), gradient = jax.value_and_grad(weighted, has_aux=True)(lora.to_adapter(state))
    assert len(jax.tree.leaves(gradient)) == 2 * len(config.names)
    np.testing.assert_allclose(logits, theirs.detach().numpy(), rtol=0, atol=ATOL)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max()),
        gradient,
        wanted,
    )


@pytest.mark.parametrize("remat", ["projections", "full"])
def test_lora_remat_keeps_value_and_gradient(remat, tmp_path):
    _, ours, state = tiny_adapter.both(tmp_path / "base", LORA)
    params, tokens_BT = decoder_params.to_params(ours.state), tokens()
    options = lora.lora_options(LORA, train=True)

    def loss(adapter, config):
        return jnp.square(our_logits(config, params, adapter, tokens_BT, options)).sum()

    adapter = lora.to_adapter(state)
    wanted = jax.value_and_grad(loss)(adapter, ours.config)
    found = jax.value_and_grad(loss)(adapter, dataclasses.replace(ours.config, remat=remat))
    jax.tree.map(
        lambda f, w: np.testing.assert_allclose(f, w, rtol=0, atol=2e-6 * np.abs(w).max()),
        found,
        wanted,
    )


@pytest.mark.parametrize(
    ("family", "unstacked"), [("llama", False), ("llama", True), ("phi3", True)]
)
def test_merge_equals_base_with_adapter(family, unstacked, tmp_path):
    config = FUSED_LORA if family == "phi3" else LORA
    _, ours, state = tiny_adapter.both(tmp_path / "base", config, family)
    params, adapter = decoder_params.to_params(ours.state), lora.to_adapter(state)
    before = jax.tree.map(np.array, params)
    wanted = our_logits(
        ours.config, params, adapter, tokens(), lora.lora_options(config, train=False)
    )
    if unstacked:
        params, adapter = (
            decoder_params.unstack_layers(params),
            decoder_params.unstack_layers(adapter),
        )
    merged = lora.merge(params, adapter, config.scale)
    plain = our_logits(ours.config, params, None, tokens(), LoraOptions())
    if unstacked:  # as in the engine on an accelerator
        merged = decoder_params.fuse_kernels(merged)
        fused = decoder_params.fuse_kernels(params)
        options = lora.lora_options(config, train=False)
        applied = our_logits(ours.config, fused, adapter, tokens(), options)
        np.testing.assert_allclose(applied, wanted, rtol=0, atol=ATOL)
    found = our_logits(ours.config, merged, None, tokens(), LoraOptions())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=ATOL)
    assert np.abs(np.asarray(plain) - wanted).max() > 0.1  # the adapter has an effect
    jax.tree.map(np.testing.assert_array_equal, decoder_params.to_params(ours.state), before)


def test_merge_consume_frees_each_kernel(tmp_path, monkeypatch):
    _, ours, state = tiny_adapter.both(tmp_path / "base", LORA)
    params = decoder_params.unstack_layers(decoder_params.to_params(ours.state))
    adapter = decoder_params.unstack_layers(lora.to_adapter(state))
    wanted = lora.merge(params, adapter, LORA.scale)
    both = zip(params["layers"], adapter["layers"], strict=True)
    kernels = [own[name] for own, pairs in both for name in pairs]
    real, gone = lora._merge_kernel, []

    def noted(*arguments):
        gone.append(sum(kernel.is_deleted() for kernel in kernels))
        return real(*arguments)

    monkeypatch.setattr(lora, "_merge_kernel", noted)
    merged = lora.merge(params, adapter, LORA.scale, consume=True)
    assert gone == list(range(len(kernels)))
    jax.tree.map(np.testing.assert_array_equal, merged, wanted)


def test_init_adapter_is_neutral_and_distributed_like_peft(tmp_path):
    _, ours, _ = tiny_adapter.both(tmp_path / "base", LORA)
    params = decoder_params.to_params(ours.state)
    adapter = lora.to_adapter(lora.init_adapter(ours.config, LORA, seed=3))
    options = lora.lora_options(LORA, train=False)
    np.testing.assert_array_equal(
        our_logits(ours.config, params, adapter, tokens(), options),
        our_logits(ours.config, params, None, tokens(), options),
    )
    for name, pair in adapter["layers"].items():
        assert pair["a"].dtype == pair["b"].dtype == jnp.float32
        bound = pair["a"].shape[1] ** -0.5
        assert not pair["b"].any()
        assert 0.9 * bound < np.abs(pair["a"]).max() <= bound, name
        np.testing.assert_allclose(np.std(pair["a"]), bound / 3**0.5, rtol=0.15)
    again = lora.to_adapter(lora.init_adapter(ours.config, LORA, seed=4))
    assert not np.array_equal(again["layers"]["q_proj"]["a"], adapter["layers"]["q_proj"]["a"])


def test_lora_dropout_needs_training_and_key(tmp_path):
    config = dataclasses.replace(LORA, dropout=0.5)
    _, ours, state = tiny_adapter.both(tmp_path / "base", config)
    params, adapter, key = (
        decoder_params.to_params(ours.state),
        lora.to_adapter(state),
        jax.random.key(0),
    )

    def run(train, key):
        options = lora.lora_options(config, train)
        return np.asarray(our_logits(ours.config, params, adapter, tokens(), options, key))

    plain = run(False, None)
    np.testing.assert_array_equal(run(False, key), plain)
    np.testing.assert_array_equal(run(False, jax.random.key(1)), plain)
    np.testing.assert_array_equal(run(True, None), plain)
    np.testing.assert_array_equal(run(True, key), run(True, key))
    assert np.abs(run(True, key) - plain).max() > 0.01
    assert np.abs(run(True, key) - run(True, jax.random.key(1))).max() > 0.01


def test_low_rank_pairs_equal_separate_products_in_one_product():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x, pairs = normal(2, 5, 8), [(normal(8, r), normal(r, o)) for r, o in ((3, 6), (2, 4), (3, 7))]
    weights = [normal(2, 5, b.shape[1]) for _, b in pairs]

    def merged(x, pairs):
        ys = low_rank.low_rank(0.5, x, pairs)
        return sum((y * w).sum() for y, w in zip(ys, weights, strict=True))

    def separate(x, pairs):
        return sum((0.5 * (x @ a @ b) * w).sum() for (a, b), w in zip(pairs, weights, strict=True))

    actual, expected = (jax.value_and_grad(f, (0, 1))(x, pairs) for f in (merged, separate))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected
    )
    products = str(jax.make_jaxpr(jax.grad(merged, (0, 1)))(x, pairs)).count("dot_general")
    # One product with A, its two gradients, and three of each B: 1 + 2 + 3 * 3 instead of 18.
    assert products == 12


def test_dropout_zeroes_rate_and_scales_rest():
    x, eye = jnp.ones((100, 100)), jnp.eye(100)
    outputs: Any = low_rank.low_rank(2.0, low_rank.dropout(x, 0.2, jax.random.key(0)), [(eye, eye)])
    y = np.asarray(outputs[0])
    assert np.unique(y).tolist() == [0.0, 2.5]
    assert 0.18 < (y == 0).mean() < 0.22


@pytest.mark.parametrize("width", [1, 255, 256])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_dropout_elements_are_independent(rate, width):
    rows, deviations = 4000, 5.0
    x = jnp.full((2, rows // 2, width), 3.0, jnp.bfloat16)
    y = low_rank.dropout(x, rate, jax.random.key(7))
    assert y.shape == x.shape and y.dtype == x.dtype
    gone = np.asarray(y == 0).reshape(rows, width)
    kept = np.asarray(y, np.float32).reshape(rows, width)[~gone]
    np.testing.assert_array_equal(kept, np.float32(jnp.bfloat16(3.0 / (1 - rate))))
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(gone.mean() - rate) < deviations * spread / gone.size**0.5
    assert np.abs(gone.mean(0) - rate).max() < deviations * spread / rows**0.5
    # One random word decides for two neighbors. These must agree as often as other pairs.
    away = gone - rate
    for distance in {1, 2, width // 2} & {*range(1, width)}:
        pairs = (away[:, distance:] * away[:, :-distance]).ravel()
        assert abs(pairs.mean()) < deviations * spread**2 / pairs.size**0.5, distance


def test_lora_dropout_mask_is_drawn_once_per_input(monkeypatch):
    """Keys and values share a mask, as do gate and up. Layers without an adapter draw none."""
    config = DecoderConfig(7, 32, 2, 2, 2, 16, 32, param_dtype="float32")
    targets = ("k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    lora_config = LoraConfig(rank=32, alpha=32.0, dropout=0.5, targets=targets)
    params = tiny_decoder.random_params(config)
    adapter = lora.to_adapter(lora.init_adapter(config, lora_config))
    seen = []

    def spy(x, rate, key):
        seen.append((rate, *jax.random.key_data(key).tolist()))
        return low_rank.dropout(x, rate, key)

    monkeypatch.setattr(decoder_layer, "dropout", spy)
    decoder.forward(
        config,
        decoder_params.unstack_layers(params),  # not traced, so that keys have values
        jnp.zeros((1, 4), jnp.int32),
        adapter=decoder_params.unstack_layers(adapter),
        lora=lora.lora_options(lora_config, train=True),
        dropout_key=jax.random.key(0),
    )
    assert len(seen) == len(set(seen)) == 2 * 3


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 8)])
def test_lora_sharded_equals_unsharded(sizes, tmp_path):
    _, ours, state = tiny_adapter.both(tmp_path / "base", LORA)
    tokens_BT, options = tokens(8), lora.lora_options(LORA, train=False)
    wanted = our_logits(
        ours.config,
        decoder_params.to_params(ours.state),
        lora.to_adapter(state),
        tokens_BT,
        options,
    )
    mesh = sharding.make_mesh(*sizes)
    params = decoder_params.to_params(sharding.shard_state(ours.state, mesh))
    placed = sharding.shard_state(state, mesh)
    pair = lora.to_adapter(placed)["layers"]["up_proj"]  # [2, 32, 4] and [2, 4, 48]
    assert pair["a"].addressable_shards[0].data.shape == (2, 32, 4)  # on every device
    assert pair["b"].addressable_shards[0].data.shape == (2, 4, 48 // sizes[2])
    with jax.set_mesh(mesh):
        found = our_logits(ours.config, params, lora.to_adapter(placed), tokens_BT, options)
    # Both sides have rounding errors: on an AMD EPYC each differs by up to 9.2e-6 from logits in
    # fp64 (torch's fp32: 6.6e-6), and they differ by 1.2e-5 from each other.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2 * ATOL)


def test_lora_config_targets_select_layers():
    assert LoraConfig(targets=("all-linear",)).names == decoder_params.PROJECTIONS
    assert LoraConfig(targets=("v_proj", "q_proj", "v_proj")).names == ("q_proj", "v_proj")
    with pytest.raises(UserError, match="query_key_value.*known: q_proj.*down_proj.*all-linear"):
        LoraConfig(targets=("q_proj", "query_key_value"))
    with pytest.raises(UserError, match="rank is 0"):
        LoraConfig(rank=0)
    with pytest.raises(UserError, match=r"dropout is 1\.0"):
        LoraConfig(dropout=1.0)


def test_lora_config_for_model_with_experts_selects_attention(tmp_path):
    folder = tiny_decoder.folder(tmp_path, "qwen3_moe")
    config, _ = pretrained_decoder.read_decoder_config(folder)
    assert LoraConfig().for_model(config).names == decoder_params.PROJECTIONS[:4]
    assert list(lora.to_adapter(lora.init_adapter(config, LoraConfig()))["layers"]) == [
        *("k_proj", "o_proj", "q_proj", "v_proj")
    ]
    message = "LoRA targets gate_proj are feed-forward layers of a mixture of experts"
    with pytest.raises(UserError, match=message):
        LoraConfig(targets=("q_proj", "gate_proj")).for_model(config)


def test_lora_config_scale():
    assert LoraConfig(rank=16, alpha=32).scale == 2.0
    assert LoraConfig(rank=16, alpha=32, rank_stabilised=True).scale == 8.0
