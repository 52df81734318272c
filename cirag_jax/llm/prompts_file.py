"""The prompts file: one conversation a line, read strictly (docs/generation.md)."""

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cirag_jax.datasets.records import Record, read_lines
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generate, Message

ROLES = ("system", "user", "assistant")
_REQUEST_FIELDS = (
    "id",
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "json_schema",
    "continue_final",
)
_MESSAGE_FIELDS = ("role", "content", "observation")


def read_prompts(
    path: Path, defaults: Mapping[str, Any], *, check_schemas: bool = True
) -> dict[str, Generate]:
    """The requests of a file by id, in order.

    Args:
      path: JSON lines.
      defaults: fields of `Generate` for lines that do not set them.
      check_schemas: also try every ``json_schema`` with the grammar library, for local backends.

    Raises:
      UserError: naming file, line and field: a field is missing, unknown, of the wrong type or out
        of range, an id occurs twice, or a schema cannot be enforced.
    """
    check_defaults(defaults)
    requests: dict[str, Generate] = {}
    checked: set[str] = set()
    for row in read_lines(path):
        name, request = row.text("id", filled=True), _request(row, defaults)
        if name in requests:
            raise row.error("id", f"repeats the id {name!r} of an earlier line")
        if check_schemas and request.json_schema is not None:
            _check_schema(row, request.json_schema, checked)
        requests[name] = request
    return requests


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Raises `UserError` where a field of the config is out of range."""
    record = Record("config", dict(defaults))
    _sampling(record)
    if record.check_index("top_logprobs", defaults.get("top_logprobs", 0)) > 20:
        raise record.error("top_logprobs", "must be at most 20")


def _request(row: Record, defaults: Mapping[str, Any]) -> Generate:
    _refuse_unknown(row, _REQUEST_FIELDS)
    messages = tuple(_message(part) for part in row.parts("messages", required=True) or ())
    if not messages:
        raise row.error("messages", "is empty")
    own = {"messages": messages, **_sampling(row)}
    schema = row.maybe("json_schema", dict)
    if schema is not None:
        own["json_schema"] = schema
    own["continue_final"] = bool(row.maybe("continue_final", bool))
    if own["continue_final"] and messages[-1].role != "assistant":
        raise row.error("continue_final", "needs a last message with the role 'assistant'")
    return Generate(**{**defaults, **own})


def _message(part: Record) -> Message:
    _refuse_unknown(part, _MESSAGE_FIELDS)
    role = part.text("role")
    if role not in ROLES:
        raise part.error("role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    return Message(role, part.text("content"), part.maybe_text("observation") or "")


def _sampling(row: Record) -> dict[str, Any]:
    """The fields about decoding that are there, checked."""
    found: dict[str, Any] = {}
    if (count := row.maybe_count("max_tokens")) is not None:
        if not count:
            raise row.error("max_tokens", "must be at least 1")
        found["max_tokens"] = count
    if (seed := row.maybe_count("seed")) is not None:
        if seed >= 1 << 32:
            raise row.error("seed", "must be less than 2**32")
        found["seed"] = seed
    if (temperature := _number(row, "temperature")) is not None:
        if not 0 <= temperature <= 100:
            raise row.error("temperature", f"must be from 0 to 100, but is {temperature}")
        found["temperature"] = temperature
    if (top_p := _number(row, "top_p")) is not None:
        if not 0 < top_p <= 1:
            raise row.error("top_p", f"must be above 0 and at most 1, but is {top_p}")
        found["top_p"] = top_p
    stop = row.value.get("stop")
    if stop is not None:
        stop = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, tuple) else stop
        found["stop"] = row.check_each("stop", row.check("stop", stop, list), str)
        if not all(found["stop"]):
            raise row.error("stop", "must not hold an empty string")
    return found


def _number(row: Record, field: str) -> float | None:
    value = row.value.get(field)
    if value is None:
        return None
    if type(value) is not int:
        value = row.check(field, value, float)
    if not math.isfinite(value):
        raise row.error(field, "must be finite")
    return float(value)


def _refuse_unknown(row: Record, fields: tuple[str, ...]) -> None:
    for name in row.value:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean '{close[0]}'?" if close else f": there are {', '.join(fields)}"
            raise UserError(f"{row.place}: field '{row.prefix}{name}' is unknown{hint}")


def _check_schema(row: Record, schema: Mapping[str, Any], checked: set[str]) -> None:
    from cirag_jax.llm.grammar import check_schema

    key = json.dumps(schema)
    if key not in checked:
        try:
            check_schema(schema)
        except UserError as error:
            raise UserError(f"{row.place}: field 'json_schema': {error}") from None
        checked.add(key)
