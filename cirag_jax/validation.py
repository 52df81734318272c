"""Validation of settings against the annotations of their fields.

A field's allowed values are stated once, in its annotation: a `Literal` lists words, and a type
such as `types.PositiveInt`, or another ``Annotated[int, msgspec.Meta(...)]``, gives a range.
Conditions on several fields are checked elsewhere, in code.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from cirag_jax.errors import UserError

# Names of types in error messages.
TYPE_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    types.NoneType: "null",
}


def check_fields(settings: Any, kind: type[Any] | None = None, prefix: str = "") -> None:
    """Raises `UserError` if the value of a field does not fit its annotation.

    Args:
      settings: a dataclass or a block of a config; nested dataclasses are checked, too.
      kind: the dataclass with the annotations; by default the type of ``settings``.
      prefix: precedes field names in messages, such as ``config.retriever.``.
    """
    for name, annotation in _annotations(kind or type(settings)).items():
        value = getattr(settings, name)
        if dataclasses.is_dataclass(annotation):
            check_fields(value, typing.cast(type[Any], annotation), f"{prefix}{name}.")
        else:
            check_value(f"{prefix}{name}", value, annotation)


def check_at_most(settings: Any, limit: str, *names: str) -> None:
    """Raises `UserError` if one of the fields ``names`` is above the field ``limit``."""
    for name in names:
        if getattr(settings, name) > getattr(settings, limit):
            raise UserError(
                f"{name}={getattr(settings, name)} must not exceed "
                f"{limit}={getattr(settings, limit)}."
            )


def check_value(field: str, value: Any, annotation: Any) -> None:
    """Raises `UserError` if the value of ``field`` does not fit ``annotation``."""
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        raise UserError(f"{field}={value!r} {_problem(value, annotation)}.") from None


def parse_object(field: str, text: str) -> dict[str, Any]:
    """Parses a setting that is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{field} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{field} must be a JSON object.")
    return typing.cast(dict[str, Any], value)


@functools.cache
def _annotations(kind: type[Any]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _problem(value: Any, annotation: Any) -> str:
    """Returns the predicate of the error message: "must be above 0", for example."""
    members = list(_members(annotation))
    for member in members:
        if typing.get_origin(member) is Annotated and _has_type(value, member.__origin__):
            return f"must {_range(member.__metadata__[0])}"
    words = [word for member in members for word in _words(member)]
    is_choice = len(words) > 1 or typing.get_origin(members[0]) is Literal
    return f"is not one of {', '.join(words)}" if is_choice else f"must be {words[0]}"


def _members(annotation: Any) -> Iterator[Any]:
    """Yields the members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _has_type(value: Any, kind: type[Any]) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int or isinstance(value, float) if kind is float else is_int and kind is int


def _range(limits: msgspec.Meta) -> str:
    if limits.ge is not None and limits.le is not None:
        return f"lie between {limits.ge} and {limits.le}"
    if limits.ge is not None:
        return f"be at least {limits.ge}" if limits.ge else "not be negative"
    if limits.gt is not None:
        return f"be above {limits.gt}"
    return f"be at most {limits.le}" if limits.le is not None else f"be below {limits.lt}"


def _words(member: Any) -> list[str]:
    """Describes the values that a member of a union allows."""
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if origin is Literal:
        return ["null" if value is None else str(value) for value in arguments]
    if origin is tuple:
        items = [word for item in _members(arguments[0]) for word in _words(item)]
        return [f"a list of {', '.join(items)}"]
    kind = arguments[0] if origin is Annotated else member
    return [TYPE_NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")]
