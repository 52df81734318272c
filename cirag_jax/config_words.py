"""Descriptions of config fields for ``--help``, read from the sources that set the fields.

A field is described by the comment behind the statement that sets it first, or by the comment lines
right above. Fields of a settings dataclass are described by its docstring and its annotations.
"""

import ast
import dataclasses
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

from cirag_jax import config_files

_CLASS = "_described_by"  # an attribute of a block, not a field


def block_of(settings: Any) -> ConfigDict:
    """Returns a block with the fields and values of a dataclass, which describes them."""
    block = ConfigDict(dataclasses.asdict(settings))
    object.__setattr__(block, _CLASS, type(settings))
    return block


def describe_fields(config: ConfigDict, functions: Iterable[Callable[..., Any]]) -> dict[str, str]:
    """Returns the description of each field of a config; empty where its sources have none.

    Args:
      config: what the functions made.
      functions: what set the fields. The functions that they name are read, too, where those are
        defined in the same folders or in `config_files.CONFIGS`.
    """
    functions = [function for function in functions if inspect.isfunction(function)]
    folders = {config_files.CONFIGS, *(_source_file(function).parent for function in functions)}
    comments = [comment for function in functions for comment in _comments(function, folders)]
    described = {}
    for key, _ in config_files.leaves(config):
        block, name = config_files.find_block(config, key)
        attributes = _attributes(vars(block)[_CLASS]) if _CLASS in vars(block) else {}
        parts = key.split(".")
        texts = (text for pattern, text in comments if text and _matches(pattern, parts))
        described[key] = attributes.get(name) or next(texts, "")
    return described


def _matches(pattern: tuple[str, ...], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(
        wanted in ("*", part) for wanted, part in zip(pattern, parts, strict=True)
    )


def _source_file(function: types.FunctionType) -> pathlib.Path:
    return pathlib.Path(function.__code__.co_filename).resolve()


def _comments(
    function: types.FunctionType,
    folders: set[pathlib.Path],
    prefix: tuple[str, ...] = (),
    callers: tuple[types.FunctionType, ...] = (),
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the fields that a function sets, in the order of its text, and their comments.

    A field is its name in parts, "*" for one that is computed; ``prefix`` stands before it. Another
    function that is named in the value of a field sets fields of that one.
    """
    if function in callers or not any(map(_source_file(function).is_relative_to, folders)):
        return
    lines = textwrap.dedent("".join(inspect.getsourcelines(function)[0])).splitlines()
    inside: dict[ast.AST, tuple[str, ...]] = {}  # of a value: the field that it is given to
    for node in sorted(ast.walk(ast.parse("\n".join(lines))), key=_source_order):
        if isinstance(node, ast.Assign):
            for target in (part for one in node.targets for part in getattr(one, "elts", [one])):
                if name := _field_name(target):
                    yield (*prefix, *name), _comment(lines, node)
                    inside |= dict.fromkeys(ast.walk(node.value), name)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            other = _referenced(node, function.__globals__)
            if inspect.isfunction(other):
                within = (*prefix, *inside.get(node, ()))
                yield from _comments(other, folders, within, (*callers, function))


def _source_order(node: ast.AST) -> tuple[int, bool, int]:
    """In a line the assignment is first, and the inner call before the outer one."""
    is_assignment = isinstance(node, ast.Assign)
    return getattr(node, "lineno", 0), not is_assignment, -getattr(node, "col_offset", 0)


def _field_name(target: ast.expr) -> tuple[str, ...]:
    """The parts of ``config.a[b].c`` behind the variable: a, *, c."""
    if isinstance(target, ast.Attribute):
        return (*_field_name(target.value), target.attr)
    return (*_field_name(target.value), "*") if isinstance(target, ast.Subscript) else ()


def _referenced(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What ``name`` or ``module.name`` stands for."""
    if isinstance(node, ast.Attribute):
        return getattr(_referenced(node.value, names), node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _comment(lines: list[str], statement: ast.stmt) -> str:
    """The comment behind a statement or its first line, or else the lines right above."""
    first, last = statement.lineno - 1, (statement.end_lineno or 0) - 1
    behind = lines[last].encode()[statement.end_col_offset :].decode().strip()
    if not behind and last > first:
        behind = "#".join(lines[first].partition("  #")[1:]).strip()
    if behind.startswith("#"):
        return behind.lstrip("# ")
    above: list[str] = []
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
        above.insert(0, lines[first].strip().lstrip("# "))
    return " ".join(above)


@functools.cache
def _attributes(described: type) -> Mapping[str, str]:
    """What the section ``Attributes`` of a class's docstring says, by name.

    Words that the annotation of an attribute allows follow, if the text does not have them all.
    """
    texts: dict[str, str] = {}
    names: list[str] = []
    _, _, section = (inspect.getdoc(described) or "").partition("Attributes:\n")
    for line in section.replace("`", "").splitlines():
        entry = re.match(r"  (\w+(?:, \w+)*): (.*)", line)
        if entry is None and not line.startswith("    "):
            break
        names = entry[1].split(", ") if entry else names
        for name in names:
            texts[name] = f"{texts[name]} {line.strip()}" if entry is None else entry[2]
    for name, annotation in typing.get_type_hints(described).items():
        words, text = list(_words(annotation)), texts.get(name, "")
        if not set(words) <= set(re.findall(r"\w+", text)):
            texts[name] = f"{text} ({' | '.join(words)})".strip()
    return texts


def _words(annotation: Any) -> Iterator[str]:
    """Yields the words that an annotation allows, those of its parts included."""
    for part in typing.get_args(annotation):
        if typing.get_origin(annotation) is typing.Literal:
            yield str(part)
        else:
            yield from _words(part)
