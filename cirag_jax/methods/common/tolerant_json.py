"""Parsing of JSON in the output of a language model.

Models wrap JSON in prose and code fences, write it with single quotes or superfluous commas, or are
cut off in the middle of a list. `find_json` parses as much as possible and reports the problem. The
text is untrusted: it is never evaluated, time and memory are bounded, and no input raises an error.

The library json-repair (0.64.6) is unsuitable. For 20,000 characters such as ``["["["`` it takes 20
seconds or raises RecursionError. It accepts strings that were cut off, returns infinities and
unpaired surrogates, and does not report whether it repaired or lost data.
"""

import dataclasses
import json
import math
import re
import sys
from typing import Any, Literal

from cirag_jax.io import replace_surrogates

Problem = Literal["no_json", "broken_json", "loose_json", "truncated"]

MAX_CHARS = 200_000  # Further text is ignored.
MAX_DEPTH = 32  # Maximum depth of nested containers.
_MAX_WORK = 8 * MAX_CHARS  # Characters read, summed over all positions where JSON may begin.
_FAILURE_COST = 1_000  # Minimum cost of a failed attempt, in characters.

_THOUGHTS, _THOUGHTS_END = "<think>", "</think>"
_BEGIN = re.compile(r"[\[{]")
_SKIPPED = re.compile(r"[\s,;]*")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s,;:\[\]{}()\"'“”‘’]+|.", re.DOTALL)
_NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,24})?([eE][+-]?\d{1,3})?", re.ASCII)
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’"}
# The next backslash or possible end of a string.
_STOPS = {quote: re.compile(rf"[\\{end}]") for quote, end in _QUOTES.items()}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_AFTER_STRING = ",:;]})"
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = {char: re.compile(f"[0-9a-fA-F]{{{n}}}") for char, n in (("x", 2), ("u", 4), ("U", 8))}


def find_json(
    text: str, key: str | None = None, truncated: bool = False
) -> tuple[Any | None, Problem | None]:
    """Returns the first JSON object or list in ``text``, or the first object that has ``key``.

    Accepts single, curly and unescaped quotes, tuples, Python constants, extra and missing commas,
    and missing closing brackets. Words without quotes are dropped. Thoughts of a reasoning model,
    up to ``</think>``, are ignored.

    With ``key``, a complete object takes precedence over an earlier broken object. The object may
    be nested in other values. Its key may differ in case and in the separators ``_``, ``-`` and
    space; it is renamed to ``key``. ``key: [...]`` without braces is also accepted.

    Only the first `MAX_CHARS` characters are read. ``truncated`` means that generation ended at its
    token limit.

    Returns:
      The value and its problem, each possibly None. Without a value the problem is ``no_json``,
      ``broken_json``, or ``truncated`` (only if ``truncated`` is set). With a value, ``loose_json``
      means that it is complete, but not strict JSON; ``broken_json`` and ``truncated`` mean that
      parts are missing, and only complete elements are kept. Strings of the value have no unpaired
      surrogates, numbers are finite, and containers nest at most `MAX_DEPTH` deep.
    """
    text = _prepared(text)
    rescued: tuple[Any, Problem] | None = None
    has_bracket, work, position = False, _MAX_WORK, 0
    while work > 0 and (begin := _BEGIN.search(text, position)) is not None:
        has_bracket = True
        reading = _read(text, begin.start())
        value = reading.value if key is None else _with_key(reading.value, key)
        work -= reading.end - begin.start()
        if reading.problem is None or reading.problem == "loose_json":
            if value is not None:
                return value, reading.problem
            position = reading.end
        elif value:
            rescued = rescued or (value, reading.problem)
            if key is None:
                break
            position = reading.end  # Continues after the rescued value.
        else:
            work -= _FAILURE_COST
            position = begin.end()
    if rescued is None and key is not None:
        rescued = _without_braces(text, key)
    if rescued is not None:
        value, problem = rescued
        # A text that ends too early is broken if generation was not cut off.
        return value, "broken_json" if problem == "truncated" and not truncated else problem
    if truncated:
        return None, "truncated"
    return None, "broken_json" if has_bracket else "no_json"


def _prepared(text: str) -> str:
    """Returns the text after a model's thoughts, at most `MAX_CHARS` long."""
    end = text.rfind(_THOUGHTS_END)
    if end >= 0:
        # A string of the JSON may also contain the mark, but not at the start of a line.
        begins_line = not text[:end].rpartition("\n")[2].strip()
        if begins_line or text.lstrip().startswith(_THOUGHTS):
            text = text[end + len(_THOUGHTS_END) :]
    return replace_surrogates(text[:MAX_CHARS])


def _same_name(name: str, key: str) -> bool:
    def plain(text: str) -> str:
        return re.sub(r"[\s_-]+", " ", text).strip().casefold()

    return name == key or plain(name) == plain(key)


def _with_key(value: Any, key: str) -> dict[str, Any] | None:
    """Returns the first outermost object in ``value`` that has ``key``, with ``key``'s spelling."""
    level = [value]
    while level:
        for item in level:
            if isinstance(item, dict):
                name = next((name for name in item if _same_name(name, key)), None)
                if name is not None:
                    return {key if k == name else k: v for k, v in item.items()}
        inner = ((i.values() if isinstance(i, dict) else i) for i in level if _is_container(i))
        level = [item for items in inner for item in items if _is_container(item)]
    return None


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list)


def _without_braces(text: str, key: str) -> tuple[dict[str, Any], Problem] | None:
    name = r"[\s_-]+".join(map(re.escape, re.split(r"[\s_-]+", key)))
    match = re.search(rf"(?i)\b{name}[\"'”’]?\s*[:=]\s*(?=[\[{{])", text)
    if match is None:
        return None
    reading = _read(text, match.end())
    problem: Problem = reading.problem or "loose_json"
    if not reading.value and problem != "loose_json":
        return None
    return {key: reading.value}, problem


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """A parsed container: its value, its end in the text, and its problem."""

    value: Any
    end: int
    problem: Problem | None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _short_integer(text: str) -> int | float | None:
    return int(text) if len(text) <= 19 else _finite(text[:400])


_STRICT = json.JSONDecoder(
    strict=False,  # Allows line breaks in strings.
    parse_float=_finite,
    parse_int=_short_integer,
    parse_constant=lambda _: None,
)


def _read(text: str, start: int) -> _Reading:
    """Reads the container that begins at ``start``, strictly if possible."""
    try:
        value, end = _STRICT.raw_decode(text, start)
        return _Reading(_checked(value, MAX_DEPTH), end, None)
    except (ValueError, RecursionError):
        return _Reader(text, start).read()


def _checked(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if not _is_container(value):
        return value
    if not depth:
        raise ValueError("nested too deeply")
    if isinstance(value, list):
        return [_checked(item, depth - 1) for item in value]
    return {replace_surrogates(name): _checked(item, depth - 1) for name, item in value.items()}


class _Open:
    """A container that is being read; ``has_colon`` is True if a colon followed ``key``."""

    __slots__ = ("closer", "has_colon", "key", "value")

    def __init__(self, opener: str):
        self.closer = _CLOSERS[opener]
        self.value: Any = {} if opener == "{" else []
        self.key: str | None = None
        self.has_colon = False

    def add(self, item: Any) -> bool:
        """Adds an element; returns False if the element or an earlier key is dropped."""
        if isinstance(self.value, list):
            self.value.append(item)
            return True
        if self.has_colon and self.key is not None:
            self.value[self.key] = item
            self.key, self.has_colon = None, False
            return True
        loses_key = self.key is not None
        self.key = item if isinstance(item, str) else None
        return self.key is not None and not loses_key


class _Reader:
    """A tolerant parser of one container, in a single pass without recursion."""

    def __init__(self, text: str, start: int):
        self._text, self._at = text, start
        self._lost = False  # Whether something was dropped.

    def read(self) -> _Reading:
        text = self._text
        stack = [_Open(text[self._at])]
        root = stack[0].value
        self._at += 1
        while stack:
            self._at = _SKIPPED.match(text, self._at).end()  # pyright: ignore
            if self._at >= len(text):
                return _Reading(root, self._at, "truncated")
            char = text[self._at]
            if char in _CLOSERS:
                if len(stack) == MAX_DEPTH:
                    return _Reading(None, self._at, "broken_json")
                container = _Open(char)
                self._lost |= not stack[-1].add(container.value)
                stack.append(container)
                self._at += 1
            elif char in "}])":
                self._close(stack, char)
                self._at += 1
            elif char in _QUOTES:
                string = self._string(char)
                if string is None:
                    return _Reading(root, len(text), "truncated")
                self._lost |= not stack[-1].add(string)
            elif char == ":":
                self._lost |= stack[-1].key is None or stack[-1].has_colon
                stack[-1].has_colon = stack[-1].key is not None
                self._at += 1
            else:
                self._word(stack[-1])
        return _Reading(root, self._at, "broken_json" if self._lost else "loose_json")

    def _close(self, stack: list[_Open], char: str) -> None:
        """Closes the container that ``char`` ends, and all open containers in it."""
        depth = next((i for i in range(len(stack) - 1, -1, -1) if stack[i].closer == char), None)
        if depth is None:
            self._lost = True
        else:
            self._lost |= any(container.key is not None for container in stack[depth:])
            del stack[depth:]

    def _word(self, container: _Open) -> None:
        match = _WORD.match(self._text, self._at)
        word = match.group() if match else " "
        self._at += len(word)
        if word in _WORDS:
            self._lost |= not container.add(_WORDS[word])
        elif _NUMBER.fullmatch(word) and self._at < len(self._text):  # At the end it may be cut.
            is_integer = word.lstrip("-").isdigit()
            self._lost |= not container.add(int(word) if is_integer else _finite(word))
        else:
            self._lost = True

    def _string(self, quote: str) -> str | None:
        """Reads a string; returns None if it does not end."""
        text, parts, at = self._text, [], self._at + 1
        while (stop := _STOPS[quote].search(text, at)) is not None:
            parts.append(text[at : stop.start()])
            at = stop.end()
            if stop.group() == "\\":
                escaped, at = self._escape(at)
                parts.append(escaped)
            elif self._ends(at):
                self._at = at
                return replace_surrogates("".join(parts))
            else:
                parts.append(stop.group())  # A quote that should have been escaped.
        return None

    def _ends(self, at: int) -> bool:
        """Returns whether the quote before ``at`` ends a string, judging by the text at ``at``."""
        after = _SPACE.match(self._text, at).end()  # pyright: ignore
        if after >= len(self._text):
            return True
        next_line = "\n" in self._text[at:after]
        char = self._text[after]
        return char in _AFTER_STRING or (next_line and (char in _QUOTES or char in _CLOSERS))

    def _escape(self, at: int) -> tuple[str, int]:
        char = self._text[at : at + 1]
        if char in _HEX and (code := _HEX[char].match(self._text, at + 1)):
            number = int(code.group(), 16)
            return chr(number) if number <= sys.maxunicode else "\ufffd", code.end()
        return _ESCAPES.get(char, char), at + len(char)
