"""Identities of code, packages and records, and their comparison."""

import ast
import gc
import hashlib
import json
import re

import pytest

from cirag_jax import identity
from cirag_jax.errors import UserError
from cirag_jax.retrieval import faiss_index
from cirag_jax.training import state


def test_of_packages_missing_package_is_named():
    with pytest.raises(UserError, match=r"'no-such', which .* \(pip install no-such\)\.$"):
        identity.of_packages("tokenizers", "no-such")


def test_of_code_ignores_comments(tmp_path, monkeypatch):
    methods = tmp_path / "cirag_jax" / "methods" / "m"
    methods.mkdir(parents=True)
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path / "cirag_jax")
    method = '"""A method."""\nfrom cirag_jax.methods.m import prompts\nX = 1  # one\n'
    (methods / "method.py").write_text(method)
    (methods / "prompts.py").write_text('"""Prompts."""\nTEXT = "Answer."\n')
    (methods / "other.py").write_text('TEXT = "Think."\n')

    def code():
        return identity.of_code("cirag_jax.methods.m.method")

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


def test_of_packages_ignores_harmless_patches(monkeypatch):
    monkeypatch.setattr(identity.importlib.metadata, "version", lambda name: "3.1.6")
    whole = ("tokenizers", "transformers", "sentencex", "bm25s", "PyStemmer", "llguidance")
    assert identity.of_packages(*whole) == dict.fromkeys(whole, "3.1.6")
    assert identity.of_packages("jinja2") == {"jinja2": "3.1"}
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


def test_of_code_is_independent_of_python_version(tmp_path, monkeypatch):
    """The hash must be equal on all Python versions, because the tests run on several."""
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path / "cirag_jax")
    (tmp_path / "cirag_jax").mkdir()
    file = tmp_path / "cirag_jax" / "m.py"
    file.write_text(CODE, "utf-8")
    assert identity.of_code("cirag_jax.m") == "f3b9b8c4031c46db"
    for old, new in (
        ("2}}", "2.}}"), ('f"", ""', 'f""'), ("*, c=None", "*, c"), ("async ", ""), ("é", "e"),
        ("return None", "return"), ("1, *_", "*_, 1"), ("!r", "!s"), ("{**{}, ", "{"),
    ):  # fmt: skip
        assert old in CODE
        file.write_text(CODE.replace(old, new), "utf-8")
        assert identity.of_code("cirag_jax.m") != "f3b9b8c4031c46db", new
    file.write_text(CODE.replace("It.", "It does.").replace("\n    match", "  # so\n    match"))
    assert identity.of_code("cirag_jax.m") == "f3b9b8c4031c46db"


def test_of_code_survives_parsing_finalisers():
    """A finalizer that runs during hashing may log a traceback, which parses source code."""

    def parses(phase: str, info: dict) -> None:
        ast.parse("a = f(1)")

    wanted, thresholds = identity.of_code("cirag_jax.methods.cirag.method"), gc.get_threshold()
    gc.callbacks.append(parses)
    gc.set_threshold(10)
    try:
        assert identity.of_code("cirag_jax.methods.cirag.method") == wanted
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parses)


def test_check_same_names_field_and_both_values():
    old = {"a": 1, "block": {"x": [1, 2], "y": {"z": None}}, "gone": 3}
    identity.check_same("w", old, json.loads(json.dumps(old)))
    identity.check_same("w", {"a": [1]}, {"a": (1,)})
    for new, words in (
        ({**old, "a": 2}, r"^w was started with a=1, not 2; use another --workdir, or remove it"),
        ({**old, "block": {"x": [1], "y": {"z": None}}}, r"with block\.x=\[1,2\], not \[1\];"),
        ({**old, "block": {"x": [1, 2], "y": {"z": "é"}}}, r'with block\.y\.z=null, not "é";'),
        ({k: v for k, v in old.items() if k != "gone"}, "with gone=3, not null;"),
        ({**old, "new": 1, "a": 2}, "with a=1, not 2;"),
    ):
        with pytest.raises(UserError, match=words):
            identity.check_same("w", old, new)
    with pytest.raises(UserError, match="not 2; stay home\\.$"):
        identity.check_same("w", old, {**old, "a": 2}, "stay home")


@pytest.mark.parametrize(
    ("name", "was", "now", "words"),
    [
        ("passages", "a" * 64, "b" * 64, "other passages (the documents, or their selection, have"),
        ("corpus", "a" * 64, "b" * 64, "other passages (the documents, or their selection, have"),
        ("triples.content", "a" * 64, "b" * 64, "other triples of its passages;"),
        ("demonstrations", "a" * 32, "b" * 32, "other demonstrations (the training questions have"),
        ("code", "0123456789abcdef", "b" * 16, "another version of this program;"),
        (state.EXAMPLES, "a" * 64, "b" * 64, "other training examples;"),
        ("m.files.x", "a" * 16, "b" * 16, "other content of m.files.x;"),
        ("encoder.revision", "sha256:ab12", "sha256:cd", "other weights of the encoder;"),
        ("m.files.x", None, "b" * 16, "no m.files.x;"),
        ("m.files.x", "a" * 16, None, "m.files.x, which is missing now;"),
        # Values that users can set are shown: a commit, or a value next to a hash.
        ("revision", "a" * 40, "main", 'revision="' + "a" * 40 + '", not "main";'),
        ("revision", "a" * 40, "b" * 40, 'revision="' + "a" * 40 + '", not "'),
        ("model", "x", "b" * 16, 'model="x", not "bbbb'),
    ],
)
def test_check_same_describes_hashes_in_words(name, was, now, words):
    with pytest.raises(UserError, match=re.escape(f"w was started with {words}")):
        identity.check_same("w", {name: was}, {name: now})


def test_differences_in_order_of_new_settings():
    recorded, wanted = {"code": "a", "method": "x"}, {"more": 1, "method": "y", "code": "b"}
    assert list(identity.differences(recorded, wanted)) == ["method", "code", "more"]


def test_check_same_ignores_fields_that_may_differ():
    old = {"mesh": {"data": 1}, "encoder": {"model": "a", "dtype": "x"}, "seed": 0}
    new = {"mesh": None, "encoder": {"model": "b", "dtype": "x"}, "seed": 0, "follow": True}
    free = ("mesh", "encoder.model", "follow")
    identity.check_same("w", old, new, may_differ=free)
    for name in free:
        with pytest.raises(UserError, match=f"with {name}"):
            identity.check_same("w", old, new, may_differ=[n for n in free if n != name])
    with pytest.raises(UserError, match="with seed=0, not 1;"):
        identity.check_same("w", old, {**new, "seed": 1}, may_differ=free)


def test_without_removes_fields_and_blocks():
    fields = {"a": 1, "block": {"a": 2, "b": {"c": 3, "d": 4}}, "flat.a": 5, "mesh": {"a": 6}}
    kept = identity.without(fields, ("a", "block.b.c", "flat.a", "mesh", "gone.x"))
    assert kept == {"block": {"a": 2, "b": {"d": 4}}}
    assert identity.without(fields, ()) == fields


def test_of_records_any_change_changes_hash():
    records = [["a", None], ["b", [1]]]
    text = b'["a", null]\n["b", [1]]\n'
    assert identity.of_records(records) == hashlib.sha256(text).hexdigest()  # of existing journals
    for other in ([*records, 1], records[::-1], [["a", None, "b", [1]]]):
        assert identity.of_records(other) != identity.of_records(records)
