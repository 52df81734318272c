"""Descriptions of config fields for ``--help``, read from source code.

A field is described by the comment next to the statement that first sets it, or else by the comment
above that statement. Fields of a settings dataclass are described by its docstring and annotations.
"""

import ast
import dataclasses
import fnmatch
import functools
import inspect
import pathlib
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax import config_files

_CLASS = "_described_by"  # attribute of a block that holds its settings dataclass


def block_of(settings: Any) -> ConfigDict:
    """Returns a block with the fields, values and descriptions of a settings dataclass."""
    values = dataclasses.asdict(settings)
    for name in [name for name, value in values.items() if value is None]:
        kind, *_ = typing.get_args(typing.get_type_hints(type(settings))[name])
        values[name] = placeholder(kind if isinstance(kind, type) else str)  # or words
    block = ConfigDict(values)
    object.__setattr__(block, _CLASS, type(settings))
    return block


def describe_fields(config: ConfigDict, functions: Iterable[Callable[..., Any]]) -> dict[str, str]:
    """Returns the description of each field of a config; empty if there is no comment.

    Args:
      config: the config.
      functions: the functions that set the fields. Functions that they refer to are also read, if
        defined in the same folders or in `config_files.CONFIGS`.
    """
    functions = [function for function in functions if inspect.isfunction(function)]
    folders = {config_files.CONFIGS, *(_source_file(function).parent for function in functions)}
    comments = [
        comment for function in functions for comment in _described_fields(function, folders)
    ]
    descriptions = {}
    for key, _ in config_files.leaves(config):
        block, name = config_files.find_block(config, key)
        attributes = _attributes(vars(block)[_CLASS]) if _CLASS in vars(block) else {}
        texts = (text for pattern, text in comments if text and _matches(f".{key}", pattern))
        descriptions[key] = attributes.get(name) or next(texts, "")
    return descriptions


def _matches(key: str, pattern: str) -> bool:
    return key.count(".") == pattern.count(".") and fnmatch.fnmatchcase(key, pattern)


def _source_file(function: types.FunctionType) -> pathlib.Path:
    return pathlib.Path(function.__code__.co_filename).resolve()


def _described_fields(
    function: types.FunctionType,
    folders: set[pathlib.Path],
    prefix: str = "",
    callers: tuple[types.FunctionType, ...] = (),
) -> Iterator[tuple[str, str]]:
    """Yields the name and comment of each field that a function sets, in source order.

    Names are dotted and start with ``prefix``; "*" stands for a computed part. If the value of a
    field refers to another function, that function sets the fields of the block of that name.
    """
    if function in callers or not any(map(_source_file(function).is_relative_to, folders)):
        return
    source = textwrap.dedent(inspect.getsource(function))
    lines = source.splitlines()
    assigned_to: dict[ast.AST, str] = {}  # parts of a value -> its field
    for node in sorted(ast.walk(ast.parse(source)), key=_source_order):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in getattr(target, "elts", [target]):
                    if name := _field_name(part):
                        yield prefix + name, _comment(lines, node)
                        assigned_to |= dict.fromkeys(ast.walk(node.value), name)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            other = _referenced(node, function.__globals__)
            if inspect.isfunction(other):
                block = prefix + assigned_to.get(node, "")
                yield from _described_fields(other, folders, block, (*callers, function))


def _source_order(node: ast.AST) -> tuple[int, bool, int]:
    """Sorts by line; within a line, assignments first, then inner before outer calls."""
    is_assignment = isinstance(node, ast.Assign)
    return getattr(node, "lineno", 0), not is_assignment, -getattr(node, "col_offset", 0)


def _field_name(target: ast.expr) -> str:
    """Returns ".a.*.c" for ``config.a[b].c``."""
    if isinstance(target, ast.Attribute):
        return f"{_field_name(target.value)}.{target.attr}"
    return f"{_field_name(target.value)}.*" if isinstance(target, ast.Subscript) else ""


def _referenced(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Looks up ``name`` or ``module.name``."""
    if isinstance(node, ast.Attribute):
        return getattr(_referenced(node.value, names), node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _comment(lines: list[str], statement: ast.stmt) -> str:
    """Returns the comment that ends a statement or its first line, else the one above it."""
    first, last = statement.lineno - 1, (statement.end_lineno or 0) - 1
    after = lines[last].encode()[statement.end_col_offset :].decode().strip()
    if not after and last > first:
        after = "#".join(lines[first].partition("  #")[1:]).strip()
    if after.startswith("#"):
        return after.lstrip("# ")
    above: list[str] = []
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
        above.insert(0, lines[first].strip().lstrip("# "))
    return " ".join(above)


@functools.cache
def _attributes(settings: type) -> Mapping[str, str]:
    """Returns the entries of the section ``Attributes`` of a class's docstring, by name.

    The options of a `Literal` annotation are appended unless the text already lists them all.
    """
    texts: dict[str, str] = {}
    names: list[str] = []
    _, _, section = (inspect.getdoc(settings) or "").partition("Attributes:\n")
    for line in section.replace("`", "").splitlines():
        entry = re.match(r"  (\w+(?:, \w+)*): (.*)", line)
        if entry is None and not line.startswith("    "):
            break
        names = entry[1].split(", ") if entry else names
        for name in names:
            texts[name] = f"{texts[name]} {line.strip()}" if entry is None else entry[2]
    for name, annotation in typing.get_type_hints(settings).items():
        words, text = list(_words(annotation)), texts.get(name, "")
        if not set(words) <= set(re.findall(r"\w+", text)):
            texts[name] = f"{text} ({' | '.join(words)})".strip()
    return texts


def _words(annotation: Any) -> Iterator[str]:
    """Yields the options of every `Literal` in an annotation."""
    for part in typing.get_args(annotation):
        if typing.get_origin(annotation) is typing.Literal:
            yield str(part)
        else:
            yield from _words(part)
