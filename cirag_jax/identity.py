"""Identity: what decides a result, as JSON, and the one comparison of two of these.

Whatever keeps results between two runs (journals, checkpoints, index folders, the response cache)
keeps the identity of what made them. An object that changes a result has an ``identity``; this
module adds those of code, packages and records, and `check_same` names the first difference.
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

START_ANEW = "use another --workdir, or remove it to start anew"

_PACKAGE = Path(__file__).resolve().parent

# Any release of these may cut a text, stem a word or forbid a token otherwise, patches included,
# and counts whole: tokenizers, transformers (which reads tokenizers and fills chat templates),
# sentence-transformers, sentencex, bm25s, PyStemmer, llguidance. Patches of these two mend errors
# and holes; what a template writes and how an index is built changes with a minor version.
_SERIES = ("jinja2", "faiss")

# The hashes of identities; a commit of the hub, which a user can name, has 40 digits.
_HASH = re.compile(r"sha256:[0-9a-f]+|([0-9a-f]{16}){1,2}|[0-9a-f]{64}")
# What a changed hash means, by field.
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


# --------------------------------------------------------------------------------------- comparison


def check_same(
    place: object,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    remedy: str = START_ANEW,
    *,
    may_differ: Collection[str] = (),
) -> None:
    """Refuses to resume with another identity; the message names the first difference.

    Args:
      place: what holds the results, for the message.
      old: the recorded identity.
      new: the present one; JSON, in which blocks may lie in blocks.
      remedy: what the user can do.
      may_differ: fields that are not compared, see `without`.
    """
    changed = differences(without(old, may_differ), without(new, may_differ))
    if changed:
        name, (was, now) = next(iter(changed.items()))
        raise UserError(f"{place} was started with {_wording(name, was, now)}; {remedy}.")


def _wording(name: str, was: Any, now: Any) -> str:
    """Describes a change of a field; in words where its values are hashes."""
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


def without(fields: Mapping[str, Any], may_differ: Collection[str]) -> dict[str, Any]:
    """Returns ``fields`` without those that may differ when a run is resumed.

    A name is that of a field, of a whole block, or ``block.field``.
    """
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


# ----------------------------------------------------------------------- packages, records and code


def of_packages(*names: str) -> dict[str, str]:
    """Returns the versions of installed packages, as far as they change results."""
    try:
        return {name: version_that_counts(name, importlib.metadata.version(name)) for name in names}
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"the Python package {error.name!r}, which this config needs, is not installed "
            f"(pip install {error.name})."
        ) from None


def version_that_counts(name: str, version: str) -> str:
    """Returns the version; only major and minor of packages whose patches change no result."""
    return ".".join(version.split(".")[:2]) if name in _SERIES else version


def of_records(records: Iterable[Any]) -> str:
    """SHA-256 of records, each a line of JSON, in order."""
    lines = hashlib.sha256()
    for record in records:
        lines.update(json.dumps(record).encode() + b"\n")
    return lines.hexdigest()


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
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:16]


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
