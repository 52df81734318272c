"""What config files say of their fields, for ``--help``.

A field's words are the comment of the line that sets it first, behind it or above it; those of a
method's settings stand in the docstring of their dataclass.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

_CLASS = "_described_by"  # an attribute of a block, not a field

Words = Callable[[ConfigDict, str], str]


@contextlib.contextmanager
def recorded() -> Iterator[Words]:
    """Remembers which lines set the fields of configs meanwhile; gives a block's words of a field.

    Where no line has a comment, there are none.
    """
    lines: dict[tuple[int, str], list[tuple[str, int]]] = collections.defaultdict(list)
    blocks: list[ConfigDict] = []  # They live on, so that no other gets their id.
    plain = ConfigDict.__setattr__

    def remember(self: ConfigDict, attribute: str, value: Any) -> None:
        caller = sys._getframe(1)
        lines[id(self), attribute].append((caller.f_code.co_filename, caller.f_lineno))
        blocks.append(self)
        plain(self, attribute, value)

    def words(block: ConfigDict, name: str) -> str:
        found = (_comments(file).get(line, "") for file, line in lines[id(block), name])
        described = _attributes(vars(block)[_CLASS]) if _CLASS in vars(block) else {}
        return next(filter(None, found), described.get(name, ""))

    ConfigDict.__setattr__ = remember
    try:
        yield words
    finally:
        ConfigDict.__setattr__ = plain


def block_of(settings: Any) -> ConfigDict:
    """A block with the fields and values of a dataclass, whose docstring has their words."""
    block = ConfigDict(dataclasses.asdict(settings))
    object.__setattr__(block, _CLASS, type(settings))
    return block


@functools.cache
def _comments(file: str) -> Mapping[int, str]:
    """The comment of every line of code: behind it, or else the lines right above it."""
    behind: dict[int, str] = {}
    alone: dict[int, str] = {}
    with open(file, "rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                bare = token.line.lstrip().startswith("#")
                (alone if bare else behind)[token.start[0]] = token.string.lstrip("# ")
    for line in sorted(alone):
        if line + 1 not in alone:
            first = line
            while first - 1 in alone:
                first -= 1
            text = " ".join(alone[n] for n in range(first, line + 1))
            behind.setdefault(line + 1, text)
    return behind


@functools.cache
def _attributes(described: type) -> Mapping[str, str]:
    """What the section ``Attributes`` of a class's docstring says, by name."""
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, section = (inspect.getdoc(described) or "").partition("Attributes:\n")
    for line in section.splitlines():
        entry = re.match(r"  (\w+(?:, \w+)*): (.*)", line)
        if entry is None and not line.startswith("    "):
            break
        names = entry[1].split(", ") if entry else names
        for name in names:
            found[name] = f"{found[name]} {line.strip()}" if entry is None else entry[2]
    return {name: text.replace("`", "") for name, text in found.items()}
