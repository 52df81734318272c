"""Prompts of a user's own, from a TOML file, in place of this package's prompts.

Every conversation with a language model is built by a `Prompt`, which has a name (``planner``, or
``reader.triple`` where a role has several prompts), an instruction, worked examples, and field
names: the labels in front of the parts of a turn, and the names that the response must have. A
prompt file (docs/prompts.md) replaces the first three by name. Programs render and parse with
this package's names; a `Prompt` translates both ways.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cirag_jax.errors import UserError
from cirag_jax.io import write_text
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.prompt_parts import example_turns
from cirag_jax.runtime.requests import Program

_T = TypeVar("_T")
_KEYS = ("system", "examples", "fields")
_TURNS = ("user", "assistant")


@dataclasses.dataclass(frozen=True)
class OwnPrompt:
    """A prompt of a file: instruction, turns of worked examples, and field names."""

    system: str
    examples: tuple[tuple[str, str], ...]
    fields: Mapping[str, str]


OwnPrompts = Mapping[str, OwnPrompt]

NONE: OwnPrompts = types.MappingProxyType({})
_ACTIVE: contextvars.ContextVar[OwnPrompts] = contextvars.ContextVar("own_prompts", default=NONE)
# Collects the conversations that are built, by name; see `rendered`.
_RECORD: contextvars.ContextVar[dict[str, "_Rendered"] | None] = contextvars.ContextVar(
    "rendered_prompts", default=None
)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt of this package.

    Attributes:
      name: the table of the prompt in a file: a role, or ``ROLE.KIND``.
      labels: field name -> label in front of a part of a user turn.
      written: field name -> label that the response has.
      marks: field name -> text that is a whole part of the response, such as a refusal.
      keys: names in JSON that the response has.
      texts: field name -> a text that is only part of the instruction.
      placeholders: names ``{NAME}`` that the instruction contains and each request fills in.
      is_inert: whether evidence cannot imitate labels, so that labels within it are translated.
      has_instruction: whether the instruction must not be empty; some models, such as those of the
        T5 family, were trained without one.
    """

    name: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    written: Mapping[str, str] = dataclasses.field(default_factory=dict)
    marks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    keys: tuple[str, ...] = ()
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    placeholders: tuple[str, ...] = ()
    is_inert: bool = False
    has_instruction: bool = True

    @property
    def fields(self) -> dict[str, str]:
        """The field names of this package."""
        keys = {key: key for key in self.keys}
        return {**self.labels, **self.written, **self.marks, **keys, **self.texts}

    @property
    def _own(self) -> OwnPrompt | None:
        return _ACTIVE.get().get(self.name)

    @property
    def has_own_examples(self) -> bool:
        """Whether the user's file has examples for this prompt."""
        return self._own is not None and bool(self._own.examples)

    def conversation(
        self,
        system: str | Message,
        examples: Sequence[Message],
        *turns: Message,
        appended: str = "",
        **values: str,
    ) -> tuple[Message, ...]:
        """Returns an instruction, worked examples and turns, or those of the user's file.

        Args:
          system: the instruction, possibly with evidence after it.
          examples: alternating user and assistant turns.
          *turns: the turns after the examples.
          appended: text after the instruction, such as one of `texts`.
          **values: the texts of the placeholders.
        """
        first = Message("system", system) if isinstance(system, str) else system
        record = _RECORD.get()
        if record is not None:
            record[self.name] = _Rendered(self, first.content, tuple(examples))
        own = self._own
        content = first.content if own is None else own.system
        for name, value in values.items():
            content = content.replace(f"{{{name}}}", value)
        first = dataclasses.replace(first, content=content + appended)
        if own is None:
            return (first, *examples, *turns)
        return (first, *example_turns(*own.examples), *map(self._translated, turns))

    def _translated(self, turn: Message) -> Message:
        if turn.role != "user":
            return dataclasses.replace(turn, content=self.write(turn.content))
        observation = self._labeled(turn.observation) if self.is_inert else turn.observation
        return Message("user", self._labeled(turn.content), observation, self._labeled(turn.ending))

    def _labeled(self, text: str) -> str:
        """Returns a part of a user turn with the user's field names at the start of its lines."""
        own = self._own
        if own is None:
            return text
        names = {**self.labels, **self.written, **self.marks}
        return _replaced(text, {ours: own.fields[name] for name, ours in names.items()})

    def write(self, text: str) -> str:
        """Returns (part of) a response in this package's format with the user's field names."""
        return _substituted(text, self._names())

    def read(self, text: str) -> str:
        """Returns a response in the user's format with this package's field names."""
        return _substituted(text, [_Name(n.new, n.old, n.is_mark) for n in self._names()])

    def text(self, name: str) -> str:
        """Returns a field that is a text of the instruction."""
        own = self._own
        return self.texts[name] if own is None else own.fields[name]

    def stops(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Returns strings that begin the next turn, with the user's labels.

        ``texts`` are beginnings of labels, possibly after a line break.
        """
        own = self._own
        if own is None:
            return tuple(texts)
        stops = []
        for text in texts:
            start = text.removeprefix("\n")
            names = (name for name, ours in self.labels.items() if ours.startswith(start))
            label = own.fields[next(names)].strip()
            if label:
                stops.append(text[: len(text) - len(start)] + label)
        return tuple(stops)

    def schema(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a JSON schema with the user's names of properties."""
        own = self._own
        if own is None:
            return schema
        return _renamed(schema, {key: own.fields[key] for key in self.keys})

    def _names(self) -> list["_Name"]:
        """Returns the fields in responses: this package's text, then the user's."""
        own = self._own
        if own is None:
            return []
        names = [_Name(ours, own.fields[name]) for name, ours in self.written.items()]
        names += [_Name(ours, own.fields[name], True) for name, ours in self.marks.items()]
        return names + [_Name(f'"{key}"', f'"{own.fields[key]}"') for key in self.keys]


class _Name(NamedTuple):
    """A text in responses and its replacement."""

    old: str
    new: str
    is_mark: bool = False

    @property
    def pattern(self) -> str:
        """A pattern of the text, which is no part of a longer word."""
        # As in this package's parsers, "**Answer** :" is the label "Answer:".
        is_label = self.old.endswith(":")
        body = rf"{re.escape(self.old[:-1])}[\s*]*:" if is_label else re.escape(self.old)
        start = r"(?<![A-Za-z0-9])" if re.match(r"[A-Za-z0-9]", self.old) else ""
        end = r"(?![A-Za-z0-9])" if re.search(r"[A-Za-z0-9]$", self.old) else ""
        return f"{start}{body}{end}"


@dataclasses.dataclass(frozen=True)
class _Rendered:
    """A prompt of this package with its instruction and examples in a config."""

    prompt: Prompt
    system: str
    examples: tuple[Message, ...]


def _replaced(text: str, names: Mapping[str, str]) -> str:
    """Replaces labels at the start of lines."""
    names = {ours: theirs for ours, theirs in names.items() if ours != theirs}
    if not names or not text:
        return text
    longest_first = sorted(names, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first))
    return re.sub(rf"(?m)^(?:{pattern})", lambda match: names[match[0]], text)


def _substituted(text: str, names: Sequence[_Name]) -> str:
    """Replaces texts in any case and at once, so that names may also be exchanged.

    A mark of words ("Unknown") must be a whole part of the text: "Tomb of the Unknown Soldier" is
    unchanged.
    """
    if all(name.old == name.new for name in names):
        return text
    longest_first = sorted(names, key=lambda name: len(name.old), reverse=True)
    pattern = "|".join(f"({name.pattern})" for name in longest_first)
    labels = tuple(name.old.lower() for name in names if not name.is_mark)

    def replacement(match: re.Match[str]) -> str:
        name = longest_first[(match.lastindex or 1) - 1]
        if name.old == name.new:
            return match[0]
        if name.is_mark and name.old[0].isalnum() and name.old[-1].isalnum():
            before = text[: match.start()].rstrip(" \t*\"'`([").lower()
            after = text[match.end() :].lstrip(" \t*\"'`)]")
            if before and not before.endswith(("\n", ":", *labels)):
                return match[0]
            if after and after[0] not in "\n.!;":
                return match[0]
        return name.new

    return re.sub(pattern, replacement, text, flags=re.IGNORECASE)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        renamed = {key: _renamed(inner, names) for key, inner in value.items()}
        if isinstance(value.get("properties"), Mapping):
            inner = renamed["properties"]
            renamed["properties"] = {names.get(key, key): inner[key] for key in inner}
        if isinstance(value.get("required"), list | tuple):
            renamed["required"] = [names.get(key, key) for key in value["required"]]
        return renamed
    return [_renamed(item, names) for item in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------ use in a run


@contextlib.contextmanager
def active(own_prompts: OwnPrompts) -> Iterator[None]:
    """Renders and parses with these prompts within a ``with`` block."""
    token = _ACTIVE.set(own_prompts)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def current() -> OwnPrompts:
    """Returns the prompts of the innermost `active` block."""
    return _ACTIVE.get()


def run_with(own_prompts: OwnPrompts, program: Program[_T]) -> Program[_T]:
    """Returns a program that renders and parses with the user's prompts."""
    if not own_prompts:
        return (yield from program)
    response: Any = None
    error: BaseException | None = None
    while True:
        try:
            with active(own_prompts):
                request = program.send(response) if error is None else program.throw(error)
        except StopIteration as stop:
            return stop.value
        response = error = None
        try:
            response = yield request
        except GeneratorExit:
            program.close()
            raise
        except Exception as problem:  # such as a `RequestError`, which the program may handle
            error = problem


def digest(own_prompts: OwnPrompts) -> str:
    """Returns a hash of the prompts, for the identity of a run."""
    prompts = {name: dataclasses.asdict(own) for name, own in own_prompts.items()}
    return hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest()[:16]


def of_role(own_prompts: OwnPrompts, role: str) -> str | None:
    """Returns the digest of the prompts of a role, or None if it has none."""
    own = {name: each for name, each in own_prompts.items() if name.partition(".")[0] == role}
    return digest(own) if own else None


# --------------------------------------------------------------------------------------- the file


def rendered(render: Callable[[], Any]) -> dict[str, _Rendered]:
    """Returns the prompts that ``render`` builds conversations with, by name."""
    token = _RECORD.set({})
    try:
        render()
        return dict(_RECORD.get() or {})
    finally:
        _RECORD.reset(token)


def read(path: str | Path, render: Callable[[], Any], owner: str) -> dict[str, OwnPrompt]:
    """Reads a prompt file.

    Args:
      path: a TOML file.
      render: builds a conversation with each prompt that the file may replace.
      owner: the method or command, for messages.
    """
    file = Path(path).expanduser()
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"config.prompt_file={path} cannot be read: {error.strerror}; write a file to start "
            "from with --config.export_prompts=FILE.toml."
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not valid UTF-8; save it as UTF-8.") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None
    known = {name: entry.prompt for name, entry in rendered(render).items()}
    found = dict(_tables(file, tables, known, owner))
    if not found:
        raise UserError(
            f"{file} has no prompts; the prompts of {owner} are {', '.join(known) or 'none'}."
        )
    return {name: _own_prompt(file, name, table, known[name]) for name, table in found.items()}


def _tables(
    file: Path, tables: Mapping[str, Any], known: Mapping[str, Prompt], owner: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the name and the table of each prompt in a file."""
    for role, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{file}: {role} must be a table [{role}], not {_kind(table)}.")
        kinds = [name.partition(".")[2] for name in known if name.startswith(f"{role}.")]
        if role not in known and not kinds:
            raise UserError(
                f"{file}: [{role}] is not a prompt of {owner}; its prompts are "
                f"{', '.join(known) or 'none'}."
            )
        own = {} if role not in known else {k: v for k, v in table.items() if k not in kinds}
        if own:
            yield role, own
        for kind, inner in table.items():
            if kind in own:
                continue
            if kind not in kinds:
                names = ", ".join(f"[{role}.{other}]" for other in kinds)
                raise UserError(f"{file}: field {role}.{kind} is unknown; {owner} has {names}.")
            if not isinstance(inner, dict):
                raise UserError(
                    f"{file}: {role}.{kind} must be a table [{role}.{kind}], not {_kind(inner)}."
                )
            yield f"{role}.{kind}", inner


def _own_prompt(file: Path, name: str, table: Mapping[str, Any], prompt: Prompt) -> OwnPrompt:
    unknown = [key for key in table if key not in _KEYS]
    if unknown:
        raise UserError(
            f"{file}: field {name}.{unknown[0]} is unknown; a prompt has {', '.join(_KEYS)}."
        )
    missing = [key for key in ("system", "fields") if key not in table]
    if not prompt.fields:
        missing = [key for key in missing if key != "fields"]
    if missing:
        raise UserError(
            f"{file}: field {name}.{missing[0]} is missing; a prompt needs system and fields "
            "(examples are optional)."
        )
    system = _string(file, f"{name}.system", table["system"])
    if prompt.has_instruction and not system.strip():
        raise UserError(f"{file}: field {name}.system is empty; it must be the instruction.")
    for placeholder in prompt.placeholders:
        if f"{{{placeholder}}}" not in system:
            raise UserError(
                f"{file}: field {name}.system must contain {{{placeholder}}}, which each request "
                "replaces."
            )
    examples = _examples(file, name, table.get("examples", []))
    return OwnPrompt(system, examples, _fields(file, name, table.get("fields", {}), prompt))


def _examples(file: Path, name: str, value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        raise UserError(f"{file}: field {name}.examples must be a list of tables with {_TURNS}.")
    examples = []
    for number, example in enumerate(value):
        place = f"{name}.examples[{number}]"
        if not isinstance(example, dict):
            raise UserError(f"{file}: field {place} must be a table, not {_kind(example)}.")
        for key in example:
            if key not in _TURNS:
                raise UserError(f"{file}: field {place}.{key} is unknown; use user and assistant.")
        for key in _TURNS:
            if key not in example:
                raise UserError(f"{file}: field {place}.{key} is missing.")
        user, assistant = (_string(file, f"{place}.{key}", example[key]) for key in _TURNS)
        examples.append((user, assistant))
    return tuple(examples)


def _fields(file: Path, name: str, value: Any, prompt: Prompt) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UserError(f"{file}: field {name}.fields must be a table, not {_kind(value)}.")
    expected = prompt.fields
    for key in value:
        if key not in expected:
            raise UserError(
                f"{file}: field {name}.fields.{key} is unknown; the fields are "
                f"{', '.join(expected) or 'none'}."
            )
    for key in expected:
        if key not in value:
            raise UserError(f"{file}: field {name}.fields.{key} is missing.")
    fields = {key: _string(file, f"{name}.fields.{key}", value[key]) for key in expected}
    parsed = [*prompt.written, *prompt.marks, *prompt.keys]
    for key in parsed:
        if not fields[key].strip():
            raise UserError(
                f"{file}: field {name}.fields.{key} is empty, but responses are parsed by it."
            )
    for names in (prompt.labels, dict.fromkeys(parsed)):
        texts = [fields[key] for key in names if fields[key]]
        repeated = next((text for text in texts if texts.count(text) > 1), None)
        if repeated is not None:
            raise UserError(
                f"{file}: {name}.fields has {repeated!r} twice; different fields need different "
                "names."
            )
    return fields


def _string(file: Path, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{file}: field {field} must be a string, not {_kind(value)}.")
    return value


def _kind(value: Any) -> str:
    names = {dict: "a table", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def export(render: Callable[[], Any]) -> str:
    """Returns this package's prompts in the format of a prompt file."""
    parts = []
    for name, entry in rendered(render).items():
        lines = [f"[{name}]", f"system = {_toml(entry.system)}"]
        if fields := entry.prompt.fields:
            lines += ["", f"[{name}.fields]"]
            lines += [f"{key} = {_toml(text)}" for key, text in fields.items()]
        for user, answer in zip(entry.examples[::2], entry.examples[1::2], strict=True):
            lines += ["", f"[[{name}.examples]]", f"user = {_toml(user.text)}"]
            lines.append(f"assistant = {_toml(answer.text)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def export_file(path: str, render: Callable[[], Any]) -> dict[str, Any]:
    """Writes this package's prompts to a new file; returns the result of the command."""
    file = Path(path).expanduser()
    if file.suffix != ".toml":
        raise UserError(f"config.export_prompts={path} must end in .toml.")
    if not file.parent.is_dir():
        raise UserError(f"config.export_prompts={path}: {file.parent} is not a folder.")
    if file.exists():
        raise UserError(f"config.export_prompts={path} exists; choose another name.")
    write_text(file, [export(render)])
    return {"file": str(file), "prompts": list(rendered(render))}


def _toml(text: str) -> str:
    """Returns a TOML string, with line breaks if the text has any."""
    if "\n" not in text:
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    plain = "\n" if '"""' in text or text.endswith('"') else '\n"'
    escaped = (c if c in plain else json.dumps(c, ensure_ascii=False)[1:-1] for c in text)
    return f'"""\n{"".join(escaped)}"""'.replace("\x7f", "\\u007f")
