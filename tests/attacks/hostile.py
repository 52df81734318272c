"""Hostile input, and the one invariant: the right result, or a refusal in one sentence.

A case is drawn as a short list of changes to something that is whole, so that what Hypothesis
prints of a failure is short enough to be pasted above its test: ``@example(...)``.
"""

import contextlib
import copy
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirag_jax.errors import UserError

T = TypeVar("T")

# `make attack` sets it: so many times as many cases as in the normal suite, and new ones.
FACTOR = int(os.environ.get("CIRAG_JAX_ATTACK", "0"))

tried = 0  # cases so far


def attack(cases: int, *drawn: Any, **named: Any) -> Callable[[Any], Any]:
    """A test of ``cases`` cases; always the same ones, but for `make attack`."""

    def decorate(test: Any) -> Any:
        chosen = settings(
            max_examples=cases * max(FACTOR, 1),
            derandomize=not FACTOR,
            database=None,
            deadline=None,
            print_blob=bool(FACTOR),
            suppress_health_check=list(HealthCheck),
        )
        return chosen(given(*drawn, **named)(test))

    return decorate


def held(action: Callable[[], T], *refusals: type[Exception]) -> T | None:
    """What ``action`` gives, or None where it refuses; any other exception is a failure."""
    global tried
    tried += 1
    try:
        return action()
    except (UserError, *refusals) as error:
        text = str(error)
        assert text.strip() and "Traceback" not in text, text
        return None


@contextlib.contextmanager
def untouched(folder: pathlib.Path) -> Iterator[None]:
    """Whoever reads changes nothing and leaves nothing behind."""
    before = _contents(folder)
    yield
    assert _contents(folder) == before


def _contents(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------- texts

DEEP = 100_000  # brackets: more than any stack holds

WORDS = (
    *("\0", "\ud800", "\udfff\ud800", "\u202egnp.exe", "\x1b[2J\x1b]0;x\x07", "\x9b31m", "\u2028"),
    *("</script><script>alert(1)</script>", "<!--", "{{data}}", "&lt;", "__proto__", "\ufeff"),
    *("9" * 400, "-" + "9" * 5000, "1e999", "NaN", "-Infinity", "true", "null", "0x", "\\u12"),
    *('{"', '"', "'", "[", "]", "{", "}", "<", ">", "<<", ":", ",", ";", "\\", "\n", "\r\n", " "),
    *("[" * 500, "{" * 500, '["' * 200, "x" * 3000, "\u0645\u0631\u062d\u0628\u0627", "e\u0301"),
)
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=6).map("".join)

# ------------------------------------------------------------------------------------------- bytes

_FILLINGS = (
    *(b"", b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x80", b"\xed\xa0\x80", b"\x1b[2J"),
    *(b'"', b"[", b"}", b"\n", b"NaN", b"1e999", b"9" * 400, "\u202e".encode(), b"\x80\x04K\x01."),
)
# (what, where, with which bytes): see `damaged`.
_DAMAGE = st.tuples(
    st.sampled_from(["cut", "put", "over", "drop", "nest"]),
    st.integers(0, 1 << 16),
    st.sampled_from(_FILLINGS) | st.binary(min_size=1, max_size=4),
)
DAMAGES = st.lists(_DAMAGE, min_size=1, max_size=3)


def damaged(data: bytes, damages: list[tuple[str, int, bytes]]) -> bytes:
    """The bytes cut short, with others put in or written over, with some dropped, or with brackets
    that nest without an end; places count modulo the length.
    """
    for what, where, filling in damages:
        at = where % (len(data) + 1)
        match what:
            case "cut":
                data = data[:at]
            case "put":
                data = data[:at] + filling + data[at:]
            case "over":
                data = data[:at] + filling + data[at + len(filling) :]
            case "drop":
                data = data[:at] + data[at + len(filling) + 1 :]
            case "nest":
                data = data[:at] + b"[" * DEEP + data[at:]
    return data


# -------------------------------------------------------------------------------------------- JSON

_VALUES = (
    *(None, True, False, 0, -1, 1 << 31, 1 << 63, 10**400, 0.5, float("nan"), float("inf")),
    *("", " \n", "\0", "\ud800", "\u202ex", "\x1b[2J", "</script>", "x" * 3000, "9" * 5000, "1"),
    *([], {}, [[]], [None], {"": 0}, ["a", "b"], [[0, 0]], "DROP", "DEEP"),
)
# Whether texts are escaped, and (which node, what takes its place): see `garbled`.
CHANGES = st.tuples(
    st.booleans(),
    st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from(_VALUES) | st.text(max_size=4)),
        min_size=1,
        max_size=2,
    ),
)


def garbled(value: Any, changes: tuple[bool, list[tuple[int, Any]]]) -> bytes:
    """The JSON of ``value`` with other values at some of its places, or (``DROP``) with nothing
    there, or (``DEEP``) with brackets that nest without an end.
    """
    ascii_only, places = changes
    root = [json.loads(json.dumps(value))]
    for place, other in places:
        nodes = list(_nodes(root))
        if nodes:
            container, key = nodes[place % len(nodes)]
            if other == "DROP":
                del container[key]
            else:
                container[key] = copy.deepcopy(other)
    text = json.dumps(root[0], ensure_ascii=ascii_only) if root else ""
    return text.replace('"DEEP"', "[" * DEEP).encode("utf-8", "surrogatepass")


def _nodes(container: Any) -> Iterator[tuple[Any, Any]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        yield container, key
        if isinstance(value, dict | list):
            yield from _nodes(value)
