"""Strict reading of JSON records; every error names the file, line and field.

msgspec decodes records into the dataclasses of `types`; this module rewrites msgspec's errors.
"""

import difflib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cirag_jax.errors import UserError
from cirag_jax.io import is_utf8

T = TypeVar("T")

_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "less than"}
_decoder = functools.cache(msgspec.json.Decoder)


def field_error(place: str, field: str, problem: str) -> UserError:
    """Returns the error for a field of the record at ``place`` (``file:line``)."""
    return UserError(f"{place}: field '{field}' {problem}.")


def read_lines(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yields ``file:line`` and the record of each line of a JSON-lines file; skips blank lines.

    ``kind`` is a dataclass or a `msgspec.Struct`. Unknown fields are ignored, unless a Struct
    forbids them.
    """
    return ((place, record) for _, place, record in scan_lines(path, kind))


def scan_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, str, T]]:
    """Yields what `read_lines` yields, after the position of the line in the file, in bytes."""
    count = offset = 0
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    count += 1
                    place = f"{path}:{line}"
                    yield offset, place, decode(place, raw, kind, first=line == 1)
                offset += len(raw)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not count:
        raise UserError(f"{path} is empty.")


def decode(place: str, raw: bytes, kind: type[T], *, first: bool = False) -> T:
    """Decodes one record; the ``first`` line may begin with a byte-order mark (Windows editors)."""
    try:
        # Decoded to text first, because msgspec does not check strings of ignored fields.
        text = raw.decode("utf-8-sig" if first else "utf-8")
        return _decoder(kind).decode(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: byte {error.start + 1} is not valid UTF-8.") from error
    except msgspec.ValidationError as error:
        raise _mismatch(place, str(error), kind) from error
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise UserError(f"{place}: invalid or truncated JSON ({reason}).") from error
    except RecursionError as error:
        raise UserError(f"{place}: unusable JSON (RecursionError).") from error


def convert(place: str, value: Any, kind: type[T]) -> T:
    """Converts a parsed JSON value to ``kind``; errors name ``place``.

    Python's JSON parser accepts half surrogate pairs, which no file can store; they are refused.
    """
    _check_texts(place, value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _mismatch(place, str(error), kind) from error


def _check_texts(place: str, value: Any) -> None:
    fields = [("", value)]
    while fields:
        name, item = fields.pop()
        if isinstance(item, str) and not is_utf8(item):
            problem = f"contains half of a surrogate pair ({ascii(item)[:80]}); replace it"
            raise field_error(place, name, problem) if name else UserError(f"{place}: {problem}.")
        if isinstance(item, dict):
            fields += [(f"{name}.{key}".lstrip("."), text) for key, text in item.items()]
            fields += [(name, key) for key in item]
        elif isinstance(item, (list, tuple)):
            fields += [(f"{name}[{i}]", text) for i, text in enumerate(item)]


def _mismatch(place: str, message: str, kind: Any) -> UserError:
    """Rewrites msgspec's message about a value of the wrong type."""
    text, _, path = message.removesuffix("`").partition(" - at `$")
    field = path.removeprefix(".").replace("[...]", ".*")
    if missing := re.fullmatch(r"Object missing required field `(.+?)`?", text):
        return field_error(place, f"{field}.{missing[1]}".lstrip("."), "is missing")
    if unknown := re.fullmatch(r"Object contains unknown field `(.+?)`?", text):
        close = () if field else difflib.get_close_matches(unknown[1], kind.__struct_fields__, 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        return field_error(place, f"{field}.{unknown[1]}".lstrip("."), f"is unknown{hint}")
    expected = re.match(r"Expected `(\w+)[^`]*`(.*)", text)
    if expected is None:
        return field_error(place, field, f"cannot be used: {text[:1].lower()}{text[1:]}")
    name, rest = expected.groups()
    if rest.startswith(" matching"):
        return field_error(place, field, "is empty")
    if size := re.match(r" of length (\d+)", rest):
        words = {"2": "a pair", "3": "a triple"}.get(size[1], f"a list of {size[1]} values")
        return field_error(place, field, f"must be {words}")
    if re.fullmatch(r" >= 0(\.0)?", rest):
        return field_error(place, field, "must not be negative")
    if bound := re.match(r" ([<>]=?) (\S+)", rest):
        return field_error(place, field, f"must be {_BOUNDS[bound[1]]} {bound[2]}")
    problem = f"must be {_WORDS.get(name, name)}"
    if got := re.match(r", got `(\w+)", rest):
        problem += f", not {_WORDS.get(got[1], got[1])}"
    if not field:
        return UserError(f"{place}: {problem.replace('an object', 'a JSON object')}.")
    return field_error(place, field, problem)
