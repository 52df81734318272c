"""Reading of prompt files with one conversation per line (docs/generation.md)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cirag_jax.datasets.records import convert, field_error, read_lines
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generate, Message
from cirag_jax.types import NonEmptyStr

ROLES = ("system", "user", "assistant")


class _Sampling(msgspec.Struct, kw_only=True):
    """Settings that may be in a line of the file and in the config."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    stop: str | tuple[str, ...] | None = None


class _Defaults(_Sampling, kw_only=True):
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str
    observation: str | None = None


class _Line(_Sampling, kw_only=True, forbid_unknown_fields=True):
    id: NonEmptyStr
    messages: list[_Message]
    json_schema: dict[str, Any] | None = None
    continue_final: bool | None = None


def read_prompts(
    path: Path, defaults: Mapping[str, Any], *, check_schemas: bool = True
) -> dict[str, Generate]:
    """Returns the requests of a file by id, in order.

    ``defaults`` are fields of `Generate` for lines that do not set them. With ``check_schemas``,
    every ``json_schema`` is compiled with the grammar library, as local backends do.
    """
    _stop("config", convert("config", dict(defaults), _Defaults).stop)
    requests: dict[str, Generate] = {}
    checked: set[str] = set()
    for place, line in read_lines(path, _Line):
        request = _request(place, line, defaults)
        if line.id in requests:
            raise field_error(place, "id", f"repeats the id {line.id!r} of an earlier line")
        if check_schemas and request.json_schema is not None:
            _check_schema(place, request.json_schema, checked)
        requests[line.id] = request
    return requests


def _request(place: str, line: _Line, defaults: Mapping[str, Any]) -> Generate:
    if not line.messages:
        raise field_error(place, "messages", "is empty")
    for i, message in enumerate(line.messages):
        if message.role not in ROLES:
            problem = f"must be one of {', '.join(ROLES)}, not {message.role!r}"
            raise field_error(place, f"messages[{i}].role", problem)
    if line.continue_final and line.messages[-1].role != "assistant":
        problem = "needs a last message with the role 'assistant'"
        raise field_error(place, "continue_final", problem)
    fields = msgspec.structs.asdict(line) | {
        "messages": tuple(Message(m.role, m.content, m.observation or "") for m in line.messages),
        "stop": _stop(place, line.stop),
    }
    del fields["id"]
    return Generate(**{**defaults, **{k: v for k, v in fields.items() if v is not None}})


def _stop(place: str, stop: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Returns stop strings as a tuple; ``stop`` may be a single string."""
    stop = (stop,) if isinstance(stop, str) else stop
    if stop is not None and not all(stop):
        raise field_error(place, "stop", "must not contain an empty string")
    return stop


def _check_schema(place: str, schema: Mapping[str, Any], checked: set[str]) -> None:
    from cirag_jax.llm.grammar import check_schema

    key = json.dumps(schema)
    if key not in checked:
        try:
            check_schema(schema)
        except UserError as error:
            raise UserError(f"{place}: field 'json_schema': {error}") from None
        checked.add(key)
