"""Conversations of a teacher, as training data for the roles of a method.

Each call of a language model in a run of a method is an example for its role: the messages of the
request are the prompt, and the response is the target.
"""

import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cirag_jax.datasets.records import field_error, read_lines
from cirag_jax.errors import UserError
from cirag_jax.io import read_object, write_lines
from cirag_jax.llm.types import Generate, Message
from cirag_jax.runtime.records import Generation, RequestKey
from cirag_jax.types import NonEmptyStr

FILE = "examples.jsonl"
SIDECAR = "examples.json"
Keep = Literal["all", "correct", "found", "judge"]
_TURNS = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True, slots=True)
class RoleExample:
    """A prompt of a role and the response to learn.

    Attributes:
      role: the role of the method.
      question_id: id of the question whose answer needed the call.
      messages: the prompt. If the last turn is an assistant's, the target continues it.
      target: the response, without special tokens.
      source: origin of the example: ``method``, ``teacher``, ``dataset``, and ``call`` (position of
        the request in the program) or ``label`` (the rule that made the target).
    """

    role: NonEmptyStr
    question_id: NonEmptyStr
    messages: tuple[Message, ...]
    target: NonEmptyStr
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def examples_of(
    calls: Sequence[Generation], roles: Sequence[str], few_shot: bool = True
) -> tuple[list[RoleExample], collections.Counter[tuple[str, str]]]:
    """Returns the examples of one program for ``roles``, and the dropped calls.

    A response that was requested again is dropped. If the repeated request quotes it, the target of
    the original prompt is the later response. Responses that were cut at the token limit, and empty
    responses, are dropped, too.

    Args:
      calls: all generations of the program, in order.
      roles: the roles to collect.
      few_shot: keep the worked examples, which are the turns between the instruction and the last
        user turn.

    Returns:
      The examples without ``source`` except ``call``, and the number of dropped calls by role and
      reason: ``asked_again``, ``truncated`` or ``empty``.
    """
    examples, dropped = [], collections.Counter[tuple[str, str]]()
    prompts: dict[RequestKey, tuple[Message, ...]] = {}
    by_key = {call.key: call for call in calls}
    for key, request, response in calls:
        if request.role not in roles:
            continue
        messages = prompts.pop(key, request.messages)
        next_key = dataclasses.replace(key, ordinal=key.ordinal + 1)
        again = by_key.get(next_key)
        if again is not None and _repeats(again.request, request):
            quotes = again.request.messages[: len(request.messages)] == request.messages
            prompts[next_key] = messages if quotes else again.request.messages
            dropped[request.role, "asked_again"] += 1
        elif response.finish_reason != "stop":
            dropped[request.role, "truncated"] += 1
        elif not response.text.strip():
            dropped[request.role, "empty"] += 1
        else:
            shown = messages if few_shot else _without_examples(messages)
            call = f"{key.ordinal}.{key.part}"
            examples.append(
                RoleExample(request.role, key.program, shown, response.text, {"call": call})
            )
    return examples, dropped


def _repeats(request: Generate, earlier: Generate) -> bool:
    """Returns whether a request repeats the earlier one: same role, same turns up to the user's."""
    end = _last_user(earlier.messages) + 1
    return request.role == earlier.role and request.messages[:end] == earlier.messages[:end]


def _last_user(messages: Sequence[Message]) -> int:
    """Returns the index of the last user turn, or -1."""
    return max((i for i, turn in enumerate(messages) if turn.role == "user"), default=-1)


def _without_examples(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    last = _last_user(messages)
    return (*(turn for turn in messages[: max(last, 0)] if turn.role == "system"), *messages[last:])


# -------------------------------------------------------------------------------- write and read


def write_examples(path: Path, examples: Iterable[RoleExample]) -> None:
    """Writes one example per line, atomically."""
    write_lines(path, map(_record, examples))


def _record(example: RoleExample) -> dict[str, Any]:
    turns = [{"role": turn.role, "content": turn.text} for turn in example.messages]
    fields = {f.name: getattr(example, f.name) for f in dataclasses.fields(example)}
    return {**fields, "messages": turns, "source": dict(example.source)}


def read_examples(path: str | os.PathLike[str]) -> Iterator[tuple[str, RoleExample]]:
    """Yields ``file:line`` and the example of each line of a file or of a workdir."""
    for place, example in read_lines(example_file(path), RoleExample):
        if not example.messages:
            raise field_error(place, "messages", "is empty")
        for turn in example.messages:
            if turn.role not in _TURNS:
                raise field_error(place, "messages", f"has the role {turn.role!r}, not {_TURNS}")
        yield place, example


def example_file(path: str | os.PathLike[str]) -> Path:
    """Returns the examples of a workdir of launch/distill.py, or ``path`` itself."""
    path = Path(path).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{file} does not exist; launch/distill.py writes it with a method's config."
        )
    return file


def read_sidecar(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the metadata of examples: the method and its settings."""
    file = example_file(path).with_suffix(".json")
    sidecar = read_object(file)
    if not isinstance(sidecar.get("method"), str) or not isinstance(sidecar.get("settings"), dict):
        raise UserError(f"{file}: expected the fields method and settings.")
    return sidecar
