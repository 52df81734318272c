"""Hostile input, which must give the right result or be rejected in one sentence.

A case is a short list of changes to intact data. The arguments of a failure are therefore short
enough to be pasted above its test as ``@example(...)``.
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

# Set by `make attack`: multiplies the number of cases of the normal suite, with new seeds.
FACTOR = int(os.environ.get("CIRAG_JAX_ATTACK", "0"))

num_cases = 0  # cases so far


def attack(cases: int, *drawn: Any, **named: Any) -> Callable[[Any], Any]:
    """Decorates a test to run ``cases`` generated cases; only `make attack` generates new ones."""

    def decorate(test: Any) -> Any:
        decorator = settings(
            max_examples=cases * max(FACTOR, 1),
            derandomize=not FACTOR,
            database=None,
            deadline=None,
            print_blob=bool(FACTOR),
            suppress_health_check=list(HealthCheck),
        )
        return decorator(given(*drawn, **named)(test))

    return decorate


def attempt(action: Callable[[], T], *refusals: type[Exception]) -> T | None:
    """Returns the result of ``action``, or None if it raises one of the allowed exceptions."""
    global num_cases
    num_cases += 1
    try:
        return action()
    except (UserError, *refusals) as error:
        text = str(error)
        assert text.strip() and "Traceback" not in text, text
        return None


@contextlib.contextmanager
def unchanged(folder: pathlib.Path) -> Iterator[None]:
    """Checks that a block does not change a folder."""
    before = _contents(folder)
    yield
    assert _contents(folder) == before


@contextlib.contextmanager
def replaced(path: pathlib.Path, content: bytes) -> Iterator[None]:
    """Replaces a file's content inside a block."""
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        yield
    finally:
        path.write_bytes(before)


def _contents(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


DEEP = 100_000  # nested brackets, more than any stack can hold

WORDS = (
    *("\0", "\ud800", "\udfff\ud800", "\u202egnp.exe", "\x1b[2J\x1b]0;x\x07", "\x9b31m", "\u2028"),
    *("</script><script>alert(1)</script>", "<!--", "{{data}}", "&lt;", "__proto__", "\ufeff"),
    *("9" * 400, "-" + "9" * 5000, "1e999", "NaN", "-Infinity", "true", "null", "0x", "\\u12"),
    *('{"', '"', "'", "[", "]", "{", "}", "<", ">", "<<", ":", ",", ";", "\\", "\n", "\r\n", " "),
    *("[" * 500, "{" * 500, '["' * 200, "x" * 3000, "\u0645\u0631\u062d\u0628\u0627", "e\u0301"),
)
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=6).map("".join)

INSERTS = (
    *(b"", b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x80", b"\xed\xa0\x80", b"\x1b[2J"),
    *(b'"', b"[", b"}", b"\n", b"NaN", b"1e999", b"9" * 400, "\u202e".encode(), b"\x80\x04K\x01."),
)
# (kind, position, bytes), see `corrupt`.
_CORRUPTION = st.tuples(
    st.sampled_from(["cut", "put", "over", "drop", "nest"]),
    st.integers(0, 1 << 16),
    st.sampled_from(INSERTS) | st.binary(min_size=1, max_size=4),
)
CORRUPTIONS = st.lists(_CORRUPTION, min_size=1, max_size=3)


def corrupt(data: bytes, damages: list[tuple[str, int, bytes]]) -> bytes:
    """Truncates the bytes, or inserts, overwrites, drops or deeply nests some of them.

    Positions are taken modulo the length.
    """
    for kind, position, filling in damages:
        at = position % (len(data) + 1)
        match kind:
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


VALUES = (
    *(None, True, False, 0, -1, 1 << 31, 1 << 63, 10**400, 0.5, float("nan"), float("inf")),
    *("", " \n", "\0", "\ud800", "\u202ex", "\x1b[2J", "</script>", "x" * 3000, "9" * 5000, "1"),
    *([], {}, [[]], [None], {"": 0}, ["a", "b"], [[0, 0]], "DROP", "DEEP"),
)
# Whether texts are escaped, and pairs (index of a node, new value), see `mutate_json`.
MUTATIONS = st.tuples(
    st.booleans(),
    st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from(VALUES) | st.text(max_size=4)),
        min_size=1,
        max_size=2,
    ),
)


def mutate_json(value: Any, changes: tuple[bool, list[tuple[int, Any]]]) -> bytes:
    """Returns the JSON of ``value`` with some nodes replaced.

    The new value ``DROP`` removes a node, and ``DEEP`` stands for deeply nested brackets.
    """
    ascii_only, replacements = changes
    root = [json.loads(json.dumps(value))]
    for index, new_value in replacements:
        nodes = list(_nodes(root))
        if nodes:
            container, key = nodes[index % len(nodes)]
            if new_value == "DROP":
                del container[key]
            else:
                container[key] = copy.deepcopy(new_value)
    text = json.dumps(root[0], ensure_ascii=ascii_only) if root else ""
    return text.replace('"DEEP"', "[" * DEEP).encode("utf-8", "surrogatepass")


def _nodes(container: Any) -> Iterator[tuple[Any, Any]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        yield container, key
        if isinstance(value, dict | list):
            yield from _nodes(value)
