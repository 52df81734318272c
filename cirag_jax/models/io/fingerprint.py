"""What decides the results of a run, as JSON, and the one check that a run is resumed as it was.

Whatever keeps results between two runs (journals, checkpoints, index folders, the response cache)
keeps such a description beside them.
"""

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.io import is_training_workdir, local_path
from cirag_jax.models import link_head
from cirag_jax.models.io import encoder_adapter, workdir
from cirag_jax.models.io.pretrained import HUB_PATTERNS, hub_revision
from cirag_jax.models.io.pretrained_decoder import resolve_decoder

_PATTERNS = (*HUB_PATTERNS, "*.gguf")
_BLOCK, _BLOCKS = 1 << 12, 1 << 10
_PACKAGE = Path(__file__).resolve().parents[2]

# Any release of these may cut a text, stem a word or forbid a token otherwise, patches included,
# and counts whole: tokenizers, transformers (which reads tokenizers and fills chat templates),
# sentence-transformers, sentencex, bm25s, PyStemmer, llguidance. Patches of these two mend errors
# and holes; what a template writes and how an index is built changes with a minor version.
_SERIES = ("jinja2", "faiss")

START_ANEW = "use another --workdir, or remove it to start anew"

# Those that runs keep; a commit of the hub, which a user can ask for, has 40 digits.
_HASH = re.compile(r"sha256:[0-9a-f]+|([0-9a-f]{16}){1,2}|[0-9a-f]{64}")
# What a hash in such a field stands for.
_PASSAGES = "other passages (documents, or the choice of them, have changed)"
_MEANINGS = {
    "passages": _PASSAGES,
    "corpus": _PASSAGES,
    "triples.content": "other triples of its passages",
    "demonstrations": "other demonstrations (training questions have changed)",
    "encoder.revision": "other weights of the encoder",
    "code": "another version of this program",
    "the training examples": "other training examples",
}


def of_model(spec: str) -> dict[str, Any]:
    """What tells a model, or an adapter, from another one: weights, tokenizer, chat template.

    ``spec`` is a training workdir, a folder, ``shipped:NAME``, a ``.gguf`` file, ``package:NAME``
    or a hub id. Returns ``version`` of a package, ``revision`` of a hub snapshot, ``files`` (name
    -> hash) of a folder or file, or ``checkpoint`` (a hash) of a workdir; and ``base``, the model
    that a workdir or an encoder's adapter changes.
    """
    if is_training_workdir(spec):
        folder, base = workdir.best_folder(spec)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        text = "".join(f"{file.relative_to(folder)} {_hash_file(file)}\n" for file in files)
        head = local_path(spec) / link_head.FILE
        beside = {"head": _hash_file(head)} if head.is_file() else {}
        return {"checkpoint": _hash(text.encode()), "base": of_model(base), **beside}
    path = local_path(spec)
    path = path if path.is_dir() and not any(path.glob("*.gguf")) else resolve_decoder(spec)
    if spec.startswith("package:"):
        return {"version": importlib.metadata.version(spec.removeprefix("package:"))}
    if revision := hub_revision(path):
        return {"revision": revision}
    adapter = encoder_adapter.base_of(spec)
    return {"files": _files(path)} | ({"base": of_model(adapter)} if adapter else {})


def digest(spec: str) -> str:
    """`of_model` in 16 characters."""
    return _hash(json.dumps(of_model(spec), sort_keys=True).encode())


def of_packages(*names: str) -> dict[str, str]:
    """Versions of installed packages that decide results, as far as they count."""
    try:
        return {name: version_that_counts(name, importlib.metadata.version(name)) for name in names}
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"the Python package {error.name!r}, which this config needs, is not installed "
            f"(pip install {error.name})."
        ) from None


def version_that_counts(name: str, version: str) -> str:
    """The whole of it; of a package whose patches change no result, major and minor version."""
    return ".".join(version.split(".")[:2]) if name in _SERIES else version


def small_files(folder: Path) -> dict[str, str]:
    """Hashes of a model folder's files, its weights left out."""
    files = _files(folder)
    return {name: files[name] for name in files if not name.endswith((".safetensors", ".gguf"))}


def of_code(module: str) -> str:
    """Returns a hash of a method's module and the modules of methods that it imports.

    Comments and docstrings do not count. The hash is the same in every version of Python. A module
    outside of this package brings in the modules of its own package.
    """
    parts = ("cirag_jax.methods.", "cirag_jax.grade.", module.partition(".")[0] + ".")
    if module.startswith("cirag_jax."):
        parts = parts[:2]
    sources: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _source(name)
        if name in sources or file is None:
            continue
        tree, lines = _parsed(file), list[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                waiting += [name for name in names if name.startswith(parts)]
        _outline(tree, lines.append)
        sources[name] = "\n".join(lines)
    return _hash(json.dumps(sources, sort_keys=True).encode())


def _source(module: str) -> Path | None:
    """Returns the file of a module; None if it is a name within one, or a folder."""
    if module.startswith("cirag_jax."):
        file = _PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        return file if file.is_file() else None
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _parsed(file: Path) -> ast.Module:
    """A file's syntax tree, made without a collection of garbage in between.

    What is collected may log an exception, for whose traceback Python parses a line of source; in
    3.11 such a parse within a parse makes the outer one fail (CPython's issue 106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(file.read_bytes())
    finally:
        if was_enabled:
            gc.enable()


def _outline(node: ast.AST, write: Callable[[str], Any]) -> None:
    """Writes a syntax tree a word at a time, without docstrings and positions.

    Fields that are empty are left out, and so are empty texts in f-strings: which of these a tree
    has depends on the version of Python.
    """
    write(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == []:
            continue
        write(name)
        for part in value if isinstance(value, list) else (value,):
            if not isinstance(part, ast.AST):
                write(ascii(part))
            elif not _says_nothing(part, node):
                _outline(part, write)
    write(".")


def _says_nothing(part: ast.AST, whole: ast.AST) -> bool:
    if isinstance(part, ast.Expr):
        return isinstance(part.value, ast.Constant)  # a docstring
    return isinstance(whole, ast.JoinedStr) and isinstance(part, ast.Constant) and not part.value


def _files(path: Path) -> dict[str, str]:
    """Name -> hash of what belongs to a model; of one whose parts have folders, these too."""
    if path.is_file():
        return {path.name: _hash_file(path)}
    patterns = [*_PATTERNS]
    if (path / "modules.json").is_file():
        patterns += [f"*/{pattern}" for pattern in _PATTERNS]
    files = {file for pattern in patterns for file in path.glob(pattern)}
    return {str(file.relative_to(path)): _hash_file(file) for file in sorted(files)}


def _hash_file(path: Path) -> str:
    """Of a file's size and bytes; of a large file's beginning, and of blocks spread all over it.

    Gigabytes of weights are not read whole at every start: another training changes every tensor,
    and the blocks lie closer than the tensors that are trained are large.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size} ".encode())
    with path.open("rb") as file:
        if size <= 4 * _BLOCK * _BLOCKS:
            digest.update(file.read())
        else:
            digest.update(file.read(256 * _BLOCK))
            for index in range(_BLOCKS):
                file.seek(index * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# ---------------------------------------------------------------------------------- the comparison


def check_same(
    place: object, old: Mapping[str, Any], new: Mapping[str, Any], remedy: str = START_ANEW
) -> None:
    """Compares what results were made with, as it was recorded, with what is wanted now.

    ``place`` holds the results; ``new`` is JSON, in which blocks may lie in blocks; ``remedy`` is
    what the user can do.
    """
    changed = differences(old, new)
    if changed:
        name, (was, now) = next(iter(changed.items()))
        raise UserError(f"{place} was started with {_told(name, was, now)}; {remedy}.")


def _told(name: str, was: Any, now: Any) -> str:
    """How a field has changed; in words where a value is a hash, which tells nobody anything."""
    values = [value for value in (was, now) if value is not None]
    if not all(isinstance(value, str) and _HASH.fullmatch(value) for value in values):
        return f"{name}={_short(was)}, not {_short(now)}"
    if was is None:
        return f"no {name}"
    if now is None:
        return f"{name}, which is not there now"
    return _MEANINGS.get(name, f"other content of {name}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field -> (old value, new value) of what differs; None where one has no such field.

    Fields of blocks are named ``block.field``; those that both have come first, in new's order.
    """
    # Through JSON, as it was recorded: tuples became lists.
    old, new = (_flat(json.loads(json.dumps(fields))) for fields in (old, new))
    names = dict.fromkeys((*(name for name in new if name in old), *old, *new))
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= 80 else text[:77] + "..."
