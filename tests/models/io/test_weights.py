"""Checkpoints that do not fit are rejected with a list of the mismatches."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from cirag_jax.errors import UserError
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io import tensor_files, weights
from tests.tiny import random_encoder

CONFIG = EncoderConfig(31, 16, 2, 2, 24, max_positions=12)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return weights.to_tensors(random_encoder(CONFIG)[1], CONFIG)


def save(tensors, folder) -> None:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def test_load_state_missing_or_wrong_relative_bias_raises(tmp_path):
    config = dataclasses.replace(CONFIG, type_vocab_size=0, relative_bias=True)
    tensors = weights.to_tensors(random_encoder(config)[1], config, "mpnet")
    name = "encoder.relative_attention_bias.weight"
    bias_RN = tensors.pop(name)
    save(tensors, tmp_path)
    with pytest.raises(UserError, match=rf"^{tmp_path}: tensors .* missing: {name}$"):
        weights.load_state(tmp_path, config, "mpnet")
    save(tensors | {name: bias_RN[:16]}, tmp_path)
    with pytest.raises(
        UserError, match=rf"^{tmp_path}: tensor {name} has shape \(16, 2\), .* \(32, 2\)"
    ):
        weights.load_state(tmp_path, config, "mpnet")


@pytest.mark.parametrize("scan_layers", [False, True])
def test_to_tensors_round_trip_is_exact(tmp_path, tensors, scan_layers):
    save(tensors, tmp_path)
    config = dataclasses.replace(CONFIG, scan_layers=scan_layers)
    _, state = weights.load_state(tmp_path, config)
    again = weights.to_tensors(state, config)
    assert again.keys() == tensors.keys()
    for name in tensors:
        np.testing.assert_array_equal(again[name], tensors[name])


def test_load_state_accepts_prefixes_and_ignored_tensors(tmp_path, tensors):
    prefixed = {f"bert.{name}": array for name, array in tensors.items()}
    prefixed["bert.pooler.dense.weight"] = np.zeros((16, 16), np.float32)
    prefixed["bert.embeddings.position_ids"] = np.arange(12)
    prefixed["cls.predictions.bias"] = np.zeros(31, np.float32)
    save(prefixed, tmp_path)
    _, state = weights.load_state(tmp_path, CONFIG)
    assert np.array_equal(
        state["token_embedding"].get_value(), tensors["embeddings.word_embeddings.weight"]
    )
    assert list(weights.pooler_tensors(tmp_path)) == ["pooler.dense.weight"]


def test_load_state_lists_unmapped_and_unfilled_tensors(tmp_path, tensors):
    tensors["encoder.layer.2.output.dense.bias"] = np.zeros(16, np.float32)
    del tensors["encoder.layer.1.output.dense.bias"]
    save(tensors, tmp_path)
    with pytest.raises(UserError) as error:
        weights.load_state(tmp_path, CONFIG)
    assert "unknown: encoder.layer.2.output.dense.bias" in str(error.value)
    assert "missing: encoder.layer.1.output.dense.bias" in str(error.value)


def test_load_state_doubly_mapped_tensor_raises(tmp_path, tensors):
    name = "embeddings.LayerNorm.bias"
    save(tensors | {f"bert.{name}": tensors[name]}, tmp_path)
    with pytest.raises(UserError, match="duplicate: .*embeddings.LayerNorm.bias"):
        weights.load_state(tmp_path, CONFIG)


def test_load_state_wrong_shape_names_both_shapes(tmp_path, tensors):
    name = "encoder.layer.0.intermediate.dense.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    save(tensors, tmp_path)
    with pytest.raises(UserError, match=rf"{name} has shape \(16, 24\), .* \(24, 16\)"):
        weights.load_state(tmp_path, CONFIG)


def test_load_state_reads_each_dtype(tmp_path, tensors):
    name = "embeddings.word_embeddings.weight"
    half = np.asarray(jnp.asarray(tensors[name], jnp.bfloat16))
    save(tensors | {name: half}, tmp_path)
    _, state = weights.load_state(tmp_path, CONFIG)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(state["token_embedding"].get_value(), half.astype(np.float32))
    other = "encoder.layer.0.attention.self.query.weight"
    np.testing.assert_array_equal(weights.to_tensors(state, CONFIG)[other], tensors[other])


def test_load_state_pickle_is_named(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match="pytorch_model.bin is a pickle"):
        weights.load_state(tmp_path, CONFIG)


def test_load_state_truncated_file_raises(tmp_path, tensors):
    save(tensors, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        weights.load_state(tmp_path, CONFIG)


def test_load_state_number_not_finite_names_tensor(tmp_path, tensors):
    name = sorted(tensors)[-1]
    save({**tensors, name: np.full_like(tensors[name], np.nan)}, tmp_path)
    expected = f"tensor {name} has numbers that are not finite"
    with pytest.raises(UserError, match=re.escape(expected)):
        weights.load_state(tmp_path, CONFIG)


def test_load_state_shard_without_index_is_named(tmp_path, tensors):
    save(tensors, tmp_path)
    name = "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(UserError, match=f"has a shard, {name}, but no model.safetensors.index"):
        weights.load_state(tmp_path, CONFIG)


def test_load_state_reads_shards_and_names_missing_one(tmp_path, tensors):
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    index = {}
    for file, part in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in part}, tmp_path / file)
        index.update(dict.fromkeys(part, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    _, state = weights.load_state(tmp_path, CONFIG)
    assert weights.to_tensors(state, CONFIG).keys() == tensors.keys()
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UserError, match="shard 'b.safetensors' is not in the folder"):
        weights.load_state(tmp_path, CONFIG)


def test_save_tensors_failure_leaves_no_file(tmp_path, monkeypatch, tensors):
    def fail(tensors, file, metadata):
        with open(file, "wb") as stream:
            stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be written: disk full"):
        tensor_files.save_tensors(tensors, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
