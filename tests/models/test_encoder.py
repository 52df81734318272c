"""The encoder compared with transformers, and its hand-written gradients with JAX's."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from cirag_jax.errors import UserError
from cirag_jax.models import layers
from cirag_jax.models.encoder import Encoder
from cirag_jax.models.encoder_config import EncoderConfig, choose_attention
from cirag_jax.models.io import tensor_files, weights
from cirag_jax.models.io.pretrained import load_encoder, read_config
from cirag_jax.models.pooling import embed, pool_tokens, unit_length
from cirag_jax.models.precision import Rounded
from tests.tiny import random_encoder

TINY = EncoderConfig(101, 32, 2, 4, 64, max_positions=40, attention="transposed")
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}


def hf_model(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    if kind == "mpnet":
        return transformers.MPNetModel(transformers.MPNetConfig(**SIZES)).eval()
    config = transformers.XLMRobertaConfig(
        **SIZES, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5
    )
    return transformers.XLMRobertaModel(config).eval()


def batch(pad_id: int = 0, rows: int = 5, length: int = 17) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(5, 101, (rows, length)).astype(np.int32)
    mask_BT = np.arange(length) < rng.integers(2, length + 1, rows)[:, None]
    return np.where(mask_BT, tokens_BT, pad_id).astype(np.int32), mask_BT


def torch_hidden(model, tokens_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model(
            input_ids=torch.tensor(tokens_BT, dtype=torch.int64),
            attention_mask=torch.tensor(mask_BT, dtype=torch.int64),
        ).last_hidden_state.numpy()


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(graphdef, state, tokens_BT, mask_BT):
    return nnx.merge(graphdef, state)(tokens_BT, mask_BT)


embed_jit = jax.jit(embed, static_argnums=0)


def difference(a, b, mask_BT) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b))[mask_BT].max())


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("attention", ["transposed", "xla"])
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_encoder_hidden_states_equal_transformers(tmp_path, kind, attention, scan_layers):
    model = hf_model(kind)
    model.save_pretrained(tmp_path)
    config, raw = read_config(tmp_path)
    config = dataclasses.replace(config, attention=attention, scan_layers=scan_layers)
    graphdef, state = weights.load_state(tmp_path, config, raw["model_type"])
    tokens_BT, mask_BT = batch(config.pad_id)
    ours_BTD = hidden_states(graphdef, state, tokens_BT, mask_BT)
    assert difference(ours_BTD, torch_hidden(model, tokens_BT, mask_BT), mask_BT) < 5e-6


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("attention", ["transposed", "xla"])
def test_mpnet_outputs_and_gradient_equal_transformers(tmp_path, attention, scan_layers):
    """Distances reach every bucket of the relative bias; the last one begins at 91 tokens."""
    torch.manual_seed(0)
    changes = {"max_position_embeddings": 160, "initializer_range": 0.2}
    sizes = transformers.MPNetConfig(**{**SIZES, **changes})
    model = transformers.MPNetModel(sizes, add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    config, raw = read_config(tmp_path)
    config = dataclasses.replace(config, attention=attention, scan_layers=scan_layers, remat=True)
    assert (config.position_offset, config.max_length, config.type_vocab_size) == (2, 158, 0)
    graphdef, state = weights.load_state(tmp_path, config, raw["model_type"])
    tokens_BT, mask_BT = batch(config.pad_id, rows=3, length=140)
    mask_BT[0] = True
    tokens_BT[0] = 5 + np.arange(140) % 96
    weight_BTD = np.random.default_rng(1).normal(size=(*mask_BT.shape, 32)).astype(np.float32)
    weight_BTD *= mask_BT[..., None] / mask_BT.sum()
    hidden_BTD = model(
        input_ids=torch.tensor(tokens_BT, dtype=torch.int64),
        attention_mask=torch.tensor(mask_BT, dtype=torch.int64),
    ).last_hidden_state
    (hidden_BTD * torch.tensor(weight_BTD)).sum().backward()

    def loss(state):
        ours_BTD = nnx.merge(graphdef, state)(tokens_BT, mask_BT)
        return (ours_BTD * weight_BTD).sum(), ours_BTD

    gradient, ours_BTD = jax.jit(jax.grad(loss, has_aux=True))(state)
    assert difference(ours_BTD, hidden_BTD.detach().numpy(), mask_BT) < 5e-6
    ours = weights.to_tensors(gradient, config, raw["model_type"])
    theirs = {name: p.grad for name, p in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6, err_msg=name)
    moved = np.abs(ours["encoder.relative_attention_bias.weight"]).max(1) > 1e-4
    assert moved.sum() == 31 and not moved[16]  # no key is 0 tokens after its query


def test_encoder_relative_bias_is_computed_once():
    def lookups(config):
        graphdef, state = random_encoder(config)
        tokens_BT, mask_BT = batch()
        forward = jax.make_jaxpr(lambda state: embed(graphdef, state, tokens_BT, mask_BT))(state)
        return str(forward).count(" gather[")

    plain = dataclasses.replace(TINY, num_layers=5)
    assert lookups(dataclasses.replace(plain, relative_bias=True)) == lookups(plain) + 2


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "mpnet"])
def test_to_tensors_transformers_gives_same_hidden_states(tmp_path, kind):
    model = hf_model(kind)
    model.save_pretrained(tmp_path / "random")
    config, raw = read_config(tmp_path / "random")
    # A bias as large as BERT's kernels would sharpen attention until rounding errors dominate.
    large = 0.2 if kind == "mpnet" else 0.3
    config = dataclasses.replace(config, attention="transposed", initializer_range=large)
    graphdef, state = random_encoder(config, 3)
    tensors = weights.to_tensors(state, config, raw["model_type"])
    tensor_files.save_tensors(tensors, tmp_path / "random" / "model.safetensors")
    again = type(model).from_pretrained(tmp_path / "random", add_pooling_layer=False).eval()
    tokens_BT, mask_BT = batch(config.pad_id)
    theirs_BTD = torch_hidden(again, tokens_BT, mask_BT)
    ours_BTD = hidden_states(graphdef, state, tokens_BT, mask_BT)
    assert difference(ours_BTD, theirs_BTD, mask_BT) < 5e-6


def test_minilm_embeddings_equal_transformers(minilm):
    encoder = load_encoder(str(minilm))
    tokens_BT, mask_BT = batch(0, rows=3, length=24)
    tokens_BT = tokens_BT + 1000 * mask_BT.astype(np.int32)
    ours_BTD = hidden_states(encoder.graphdef, encoder.state, tokens_BT, mask_BT)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    theirs_BTD = torch_hidden(model, tokens_BT, mask_BT)
    assert difference(ours_BTD, theirs_BTD, mask_BT) < 5e-6


def test_minilm_weights_round_trip_is_exact(minilm):
    encoder = load_encoder(str(minilm))
    tensors = weights.to_tensors(encoder.state, encoder.config)
    original = {name: array for name, _, array in tensor_files.read_tensors(minilm)}
    assert set(original) - set(tensors) <= {
        "embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    }
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, original[name], err_msg=name)


def test_pool_equals_torch_and_empty_row_is_zero():
    rng = np.random.default_rng(1)
    hidden_BTD = rng.normal(size=(4, 6, 8)).astype(np.float32)
    mask_BT = np.arange(6) < np.array([6, 3, 1, 0])[:, None]
    for kind in ("mean", "cls", "lasttoken"):
        pooled_BD = pool_tokens(jnp.asarray(hidden_BTD), jnp.asarray(mask_BT), kind)
        emb_BD = np.asarray(unit_length(pooled_BD))
        for row, count in enumerate([6, 3, 1]):
            real = hidden_BTD[row, :count]
            expected = {"mean": real.mean(0), "cls": real[0], "lasttoken": real[-1]}[kind]
            expected = expected / np.linalg.norm(expected)
            np.testing.assert_allclose(emb_BD[row], expected, atol=1e-6)
        assert not emb_BD[3].any()


def test_embed_fully_masked_row_has_finite_gradient():
    graphdef, state = random_encoder(TINY, 0)
    tokens_BT, mask_BT = batch()
    mask_BT[2] = False
    gradient = jax.jit(jax.grad(lambda s: embed(graphdef, s, tokens_BT, mask_BT).sum()))(state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_linear_and_feed_forward_gradients_equal_autodiff():
    rng = np.random.default_rng(2)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x, up, up_bias, down, down_bias = (
        normal(3, 5, 8),
        normal(8, 12),
        normal(12),
        normal(12, 8),
        normal(8),
    )
    weight = normal(3, 5, 8)

    def plain(x, up, up_bias, down, down_bias):
        return (jax.nn.gelu(x @ up + up_bias, approximate=False) @ down + down_bias) * weight

    def ours(*args) -> jax.Array:
        return layers.feed_forward("gelu", *args) * weight

    def linear(x, up, up_bias, down, down_bias):
        hidden = jax.nn.gelu(layers.linear(x, up, up_bias), approximate=False)
        return layers.linear(hidden, down, down_bias) * weight

    arguments = (x, up, up_bias, down, down_bias)
    expected = jax.jit(jax.grad(lambda *a: plain(*a).sum(), range(5)))(*arguments)
    for function in (ours, linear):
        actual = jax.jit(jax.grad(lambda *a, f=function: f(*a).sum(), range(5)))(*arguments)
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rounded", [False, True])
def test_linear_parts_equal_split_of_linear(rounded):
    rng = np.random.default_rng(4)
    x, kernel, bias, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 3, 8), (8, 3, 2, 4), (3, 2, 4), (3, 2, 3, 2, 4))
    )

    def split(*arguments):
        return jnp.unstack(layers.linear(*arguments), axis=2)

    def total(function, x, kernel, bias):
        if rounded:  # The gradient of the buffers.
            x = x.astype(jnp.bfloat16)
            kernel, bias = (Rounded(y.astype(x.dtype), y) for y in (kernel, bias))
        return (jnp.stack(function(x, kernel, bias)).astype(jnp.float32) * weight).sum()

    def differentiate(function):
        return jax.jit(jax.value_and_grad(functools.partial(total, function), range(3)))(
            x, kernel, bias
        )

    (value, actual), (wanted, expected) = map(differentiate, (layers.linear_parts, split))
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for a, b in zip(actual, expected, strict=True):
        # In bfloat16, the gradient of the input is a rounded sum of rounded parts.
        np.testing.assert_allclose(a, b, atol=0.05 if rounded and a is actual[0] else 1e-5)
        assert a.any()


def test_encoder_queries_keys_and_values_are_not_split_copies():
    """No array has all three; `transposed` attention shows that they would be seen."""
    tokens_BT, mask_BT = batch(rows=3, length=7)
    count = 3 * 3 * 7 * TINY.d_model  # differs from the size of every other array

    def arrays_of_all_three(attention):
        config = dataclasses.replace(TINY, num_layers=1, attention=attention)
        graphdef, state = random_encoder(config, 0)
        loss = jax.value_and_grad(lambda s: embed(graphdef, s, tokens_BT, mask_BT).sum())
        options: Any = {"xla_backend_optimization_level": "0"}
        text = jax.jit(loss).lower(state).compile(compiler_options=options).as_text()
        shapes = re.findall(r"f32\[([\d,]+)\]", text)
        return [dims for dims in shapes if math.prod(map(int, dims.split(","))) == count]

    assert arrays_of_all_three("transposed") and not arrays_of_all_three("xla")


def test_layer_norm_gradient_equals_autodiff():
    rng = np.random.default_rng(3)
    x, scale, bias, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 8), 8, 8, (2, 3, 8))
    )

    def plain(x, scale, bias):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (((x - mean) / jnp.sqrt(variance + 1e-5)) * scale + bias) * weight

    def ours(x, scale, bias):
        return layers.layer_norm(x, scale, bias, 1e-5) * weight

    expected = jax.jit(jax.grad(lambda *a: plain(*a).sum(), range(3)))(x, scale, bias)
    actual = jax.jit(jax.grad(lambda *a: ours(*a).sum(), range(3)))(x, scale, bias)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_encoder_remat_and_scan_keep_value_and_gradient(kind):
    tokens_BT, mask_BT = batch()
    tiny = TINY
    if kind == "mpnet":
        tiny = dataclasses.replace(TINY, type_vocab_size=0, relative_bias=True, position_offset=2)
    tensors = weights.to_tensors(random_encoder(tiny)[1], tiny, kind)

    def value_and_gradient(config):
        places = weights._places(config, kind)
        graphdef, state = random_encoder(config, 1)
        host = {path: np.array(v.get_value()) for path, v in nnx.to_flat_state(state)}
        for name, place in places.items():
            array = tensors[name].T if place.transpose else tensors[name]
            target = host[place.path][place.index]
            host[place.path][place.index] = array.reshape(target.shape)
        state = nnx.from_flat_state(
            [(path, v.replace(jnp.asarray(host[path]))) for path, v in nnx.to_flat_state(state)]
        )

        def loss(state):
            return embed(graphdef, state, tokens_BT, mask_BT, jax.random.key(0))[:, :3].sum()

        value, gradient = jax.jit(jax.value_and_grad(loss))(state)
        return value, weights.to_tensors(gradient, config, kind)

    dropping = dataclasses.replace(tiny, hidden_dropout=0.2, attention_dropout=0.1)
    value, gradient = value_and_gradient(dropping)
    scan = {"remat": True, "scan_layers": True}
    for change in ({"remat": True}, scan, {**scan, "unroll": 2}):
        other, other_gradient = value_and_gradient(dataclasses.replace(dropping, **change))
        assert abs(float(value - other)) < 1e-5
        for name in gradient:
            np.testing.assert_allclose(gradient[name], other_gradient[name], atol=2e-5)


def test_encoder_dropout_depends_only_on_key():
    config = dataclasses.replace(TINY, hidden_dropout=0.3, attention_dropout=0.3)
    graphdef, state = random_encoder(config, 0)
    tokens_BT, mask_BT = batch()
    one, same, other, none = (
        np.asarray(embed_jit(graphdef, state, tokens_BT, mask_BT, key))
        for key in (jax.random.key(1), jax.random.key(1), jax.random.key(2), None)
    )
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-3
    assert np.abs(one - none).max() > 1e-3


@pytest.mark.parametrize("relative_bias", [False, True])
def test_encoder_bfloat16_keeps_fp32_parameters_and_is_close(relative_bias):
    single = TINY
    if relative_bias:  # weights large enough for the bias to matter
        single = dataclasses.replace(TINY, relative_bias=True, initializer_range=0.4)
    config = dataclasses.replace(single, dtype="bfloat16")
    graphdef, state = random_encoder(config, 0)
    exact, _ = random_encoder(single, 0)
    tokens_BT, mask_BT = batch()
    emb_BD = embed_jit(graphdef, state, tokens_BT, mask_BT)
    assert emb_BD.dtype == jnp.float32
    assert np.abs(emb_BD - embed_jit(exact, state, tokens_BT, mask_BT)).max() < 0.05
    gradient = jax.jit(jax.grad(lambda s: embed(graphdef, s, tokens_BT, mask_BT)[:, 0].sum()))(
        state
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


def test_encoder_batch_longer_than_positions_raises():
    tokens_BT = np.zeros((1, 41), np.int32)
    with pytest.raises(UserError, match="41 tokens is longer than the 40 positions"):
        Encoder(TINY, rngs=nnx.Rngs(0))(tokens_BT, tokens_BT == 0)


def test_choose_attention_depends_on_platform_and_options():
    choose = choose_attention
    assert choose("float32", 32, platform="cpu") == "transposed"
    assert choose("bfloat16", 64, platform="gpu") == "cudnn"
    assert choose("float32", 64, platform="gpu") == "xla"
    assert choose("bfloat16", 64, platform="gpu", dropout=0.1) == "transposed"
    assert choose("bfloat16", 64, platform="gpu", relative_bias=True) == "xla"
    cudnn = dataclasses.replace(TINY, relative_bias=True, attention="cudnn")
    with pytest.raises(ValueError, match="'cudnn' does not support relative_bias"):
        Encoder(cudnn, rngs=nnx.Rngs(0))
