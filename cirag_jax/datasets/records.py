"""JSON records read strictly: every complaint names file, line and field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cirag_jax.errors import UserError

_JSON_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class Record:
    """A JSON object with its place, and typed access to its fields.

    ``place`` is ``file:line``; ``prefix`` the path to an object within another, such as
    ``decomposition[1].``. Every accessor raises `UserError` where the field does not fit.
    """

    __slots__ = ("place", "prefix", "value")

    def __init__(self, place: str, value: dict[str, Any], prefix: str = ""):
        self.place, self.value, self.prefix = place, value, prefix

    def error(self, field: str, problem: str) -> UserError:
        """The exception to raise about ``field``."""
        return UserError(f"{self.place}: field '{self.prefix}{field}' {problem}.")

    def check(self, field: str, value: object, kind: type) -> Any:
        """Returns ``value`` if it is of ``kind``."""
        # A JSON boolean is a Python int, but never a count or an index.
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        if kind is float and type(value) is int:  # JSON has one kind of number.
            if abs(value) > 2**53:
                raise self.error(field, "is an integer too large for a floating-point number")
            return float(value)
        name = _JSON_NAMES.get(type(value), "something else")
        raise self.error(field, f"must be {_JSON_NAMES[kind]}, not {name}")

    def check_index(self, field: str, value: object) -> int:
        """Returns ``value`` if it is an integer of at least zero."""
        index = self.check(field, value, int)
        if index < 0:
            raise self.error(field, f"must not be negative, but is {index}")
        return index

    def check_each(self, field: str, values: list[Any], kind: type) -> tuple[Any, ...]:
        """Returns ``values`` as a tuple if each is of ``kind``."""
        if all(type(value) is kind for value in values):  # the fast path needs no messages
            return tuple(values)
        return tuple(self.check(f"{field}[{i}]", value, kind) for i, value in enumerate(values))

    def required(self, field: str, kind: type) -> Any:
        """A field that must be there and be of ``kind``."""
        if field not in self.value:
            raise self.error(field, "is missing")
        return self.check(field, self.value[field], kind)

    def maybe(self, field: str, kind: type) -> Any:
        """A field of ``kind``, or None where it is absent or null."""
        value = self.value.get(field)
        return None if value is None else self.check(field, value, kind)

    def text(self, field: str, *, filled: bool = False) -> str:
        """A required string; with ``filled`` one that is not blank."""
        value = self.required(field, str)
        if filled and not value.strip():
            raise self.error(field, "is empty")
        return value

    def maybe_text(self, field: str) -> str | None:
        """An optional string."""
        return self.maybe(field, str)

    def maybe_count(self, field: str) -> int | None:
        """An optional integer of at least zero."""
        value = self.value.get(field)
        return None if value is None else self.check_index(field, value)

    def texts(self, field: str, *, required: bool = False) -> tuple[str, ...] | None:
        """A list of strings; None only where it is not ``required``."""
        values = self.required(field, list) if required else self.maybe(field, list)
        return None if values is None else self.check_each(field, values, str)

    def text_index_pairs(self, field: str) -> tuple[tuple[str, int], ...] | None:
        """An optional list of ``[string, index]`` pairs."""
        values = self.maybe(field, list)
        if values is None:
            return None
        pairs = []
        for i, value in enumerate(values):
            if len(self.check(f"{field}[{i}]", value, list)) != 2:
                raise self.error(f"{field}[{i}]", "must be a pair of a string and an index")
            text = self.check(f"{field}[{i}][0]", value[0], str)
            pairs.append((text, self.check_index(f"{field}[{i}][1]", value[1])))
        return tuple(pairs)

    def triples(self, field: str) -> tuple[tuple[str, str, str], ...] | None:
        """An optional list of ``[head, relation, tail]``."""
        values = self.maybe(field, list)
        if values is None:
            return None
        triples = []
        for i, value in enumerate(values):
            if len(self.check(f"{field}[{i}]", value, list)) != 3:
                raise self.error(f"{field}[{i}]", "must be a triple of head, relation and tail")
            head, relation, tail = self.check_each(f"{field}[{i}]", value, str)
            triples.append((head, relation, tail))
        return tuple(triples)

    def parts(self, field: str, *, required: bool = False) -> "list[Record] | None":
        """A list of objects, each a record of its own; None only where not ``required``."""
        values = self.required(field, list) if required else self.maybe(field, list)
        if values is None:
            return None
        return [
            Record(
                self.place,
                self.check(f"{field}[{i}]", value, dict),
                prefix=f"{self.prefix}{field}[{i}].",
            )
            for i, value in enumerate(values)
        ]


def read_lines(path: Path) -> Iterator[Record]:
    """The records of a JSON-lines file, in order; blank lines are skipped.

    Raises:
        UserError: The file cannot be read or has no record, or a line is not a JSON object in
            UTF-8.
    """
    count = 0
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    count += 1
                    yield _record(f"{path}:{line}", raw, first=line == 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not count:
        raise UserError(f"{path} is empty.")


def _record(place: str, raw: bytes, *, first: bool) -> Record:
    try:
        # The first line may begin with the byte-order mark that some Windows editors write.
        text = raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: byte {error.start + 1} is not valid UTF-8.") from error
    try:
        value = json.loads(text)
        if "\\u" in text:  # an escaped half of a surrogate pair parses, but is no text
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
        raise UserError(f"{place}: invalid or truncated JSON ({reason}).") from error
    except (UnicodeEncodeError, ValueError, RecursionError) as error:
        raise UserError(f"{place}: unusable JSON ({type(error).__name__}).") from error
    if not isinstance(value, dict):
        kind = _JSON_NAMES.get(type(value), "something else")
        raise UserError(f"{place}: must be a JSON object, not {kind}.")
    return Record(place, value)
