"""Identities: JSON descriptions of everything that determines a result.

Journals, checkpoints, index folders and the response cache store the identity of the run that
produced them. Objects that affect a result have an attribute ``identity``. This module computes
identities of code, packages and records. `check_same` reports the first difference between two.
"""

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cirag_jax.errors import UserError

START_OVER = "use another --workdir, or remove it to start over"

_PACKAGE = Path(__file__).resolve().parent

# Packages whose patch releases change no result: rendered templates and built indexes change only
# with a minor version. Patch releases of tokenizers, transformers, sentence-transformers,
# sentencex, bm25s, PyStemmer and llguidance may change results.
_STABLE_PATCHES = ("jinja2", "faiss")

# Hashes in identities. A Hugging Face commit, which users may set, has 40 digits.
_HASH = re.compile(r"sha256:[0-9a-f]+|([0-9a-f]{16}){1,2}|[0-9a-f]{64}")
# Descriptions of changed hashes, by field.
_PASSAGES = "other passages (the documents, or their selection, have changed)"
_MEANINGS = {
    "passages": _PASSAGES,
    "corpus": _PASSAGES,
    "triples.content": "other triples of its passages",
    "demonstrations": "other demonstrations (the training questions have changed)",
    "prompt_file": "other prompts (config.prompt_file has changed)",
    "encoder.revision": "other weights of the encoder",
    "code": "another version of this program",
    "the training examples": "other training examples",
}


def check_same(
    place: object,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    remedy: str = START_OVER,
    *,
    may_differ: Collection[str] = (),
) -> None:
    """Raises `UserError` if two identities differ; the message names the first difference.

    Args:
      place: the file or folder of the results, for the message.
      old: the recorded identity.
      new: the current identity.
      remedy: advice to the user.
      may_differ: fields to ignore; see `without`.
    """
    changed = differences(without(old, may_differ), without(new, may_differ))
    if changed:
        name, (was, now) = next(iter(changed.items()))
        raise UserError(f"{place} was started with {_wording(name, was, now)}; {remedy}.")


def _wording(name: str, was: Any, now: Any) -> str:
    """Describes the old value of a changed field, in words if the values are hashes."""
    values = [value for value in (was, now) if value is not None]
    if not all(isinstance(value, str) and _HASH.fullmatch(value) for value in values):
        return f"{name}={_short(was)}, not {_short(now)}"
    if was is None:
        return f"no {name}"
    if now is None:
        return f"{name}, which is missing now"
    return _MEANINGS.get(name, f"other content of {name}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns (old value, new value) of each field that differs; None stands for a missing field.

    Fields of blocks are named ``block.field``. Fields that both identities have come first, in the
    order of ``new``.
    """
    # A round trip through JSON turns tuples into lists, as in the recorded identity.
    old, new = (_flat(json.loads(json.dumps(fields))) for fields in (old, new))
    names = dict.fromkeys((*(name for name in new if name in old), *old, *new))
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def without(fields: Mapping[str, Any], may_differ: Collection[str]) -> dict[str, Any]:
    """Returns ``fields`` without ``may_differ``: names of fields or blocks, or ``block.field``."""
    kept = {}
    for name, value in fields.items():
        if name in may_differ:
            continue
        if isinstance(value, Mapping):
            start = f"{name}."
            inner = [other.removeprefix(start) for other in may_differ if other.startswith(start)]
            value = without(value, inner)
        kept[name] = value
    return kept


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


def of_packages(*names: str) -> dict[str, str]:
    """Returns the versions of installed packages, up to the part that affects results."""
    try:
        return {name: version_that_counts(name, importlib.metadata.version(name)) for name in names}
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"the Python package {error.name!r}, which this config needs, is not installed "
            f"(pip install {error.name})."
        ) from None


def version_that_counts(name: str, version: str) -> str:
    """Returns the part of a version that affects results; see `_STABLE_PATCHES`."""
    return ".".join(version.split(".")[:2]) if name in _STABLE_PATCHES else version


def of_records(records: Iterable[Any]) -> str:
    """Returns the SHA-256 of records, in order."""
    lines = hashlib.sha256()
    for record in records:
        lines.update(json.dumps(record).encode() + b"\n")
    return lines.hexdigest()


def of_code(module: str) -> str:
    """Returns a hash of a method's module and of its imports from `methods` and `grade`.

    Comments, docstrings and the version of Python do not affect the hash. For a module outside this
    package, the hash also covers imports from the module's own top-level package.
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
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:16]


def _source(module: str) -> Path | None:
    """Returns the file of a module; None for a folder or a name within a module."""
    if module.startswith("cirag_jax."):
        file = _PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        return file if file.is_file() else None
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _parsed(file: Path) -> ast.Module:
    """Parses a file with garbage collection disabled.

    A finalizer may log an exception, and its traceback parses a line of source. In Python 3.11, a
    nested parse makes the outer parse fail (CPython issue 106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(file.read_bytes())
    finally:
        if was_enabled:
            gc.enable()


def _outline(node: ast.AST, write: Callable[[str], Any]) -> None:
    """Writes the node types and values of a syntax tree, without docstrings and positions.

    Empty fields and empty strings in f-strings are left out, because they depend on the version of
    Python.
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
            elif not _has_no_effect(part, node):
                _outline(part, write)
    write(".")


def _has_no_effect(part: ast.AST, parent: ast.AST) -> bool:
    if isinstance(part, ast.Expr):
        return isinstance(part.value, ast.Constant)  # a docstring
    return isinstance(parent, ast.JoinedStr) and isinstance(part, ast.Constant) and not part.value
