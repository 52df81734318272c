"""Question templates of the built-in dataset, by type of relation.

They are used by the dataset's generator and by GRADE's rules.
"""

import hashlib
import pathlib
import tomllib
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_FILE = pathlib.Path(__file__).with_name("questions.toml")
_templates: dict[str, Any] = tomllib.loads(_FILE.read_text("utf-8"))

# Kind of entity -> names for the first entity of a question.
STARTS: dict[str, list[str]] = _templates["starts"]
# Type of relation -> descriptions of its tail, and questions for its tail.
STEPS: dict[str, list[str]] = _templates["steps"]
ASKS: dict[str, list[str]] = _templates["asks"]
# Type of a step -> facts that link the same names without revealing the step.
HARMLESS: dict[str, list[str]] = _templates["harmless"]

# Words for small numbers in passages.
NUMBER_WORDS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip


def stable_hash(*parts: object) -> int:
    """Returns a 64-bit hash of ``parts`` that is equal in all processes and on all machines."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def pick(options: Sequence[T], *parts: object) -> T:
    """Returns one of the options, chosen by the stable hash of the parts."""
    return options[stable_hash(*parts) % len(options)]


def phrase(kind: str, name: str, spoken_name: str, types: Sequence[str], salt: object) -> str:
    """Returns a question that asks for the end of a chain of relations from an entity.

    Args:
        kind: The kind of the first entity.
        name: The entity's name.
        spoken_name: The entity's name as written inside a sentence.
        types: The types of the chain's relations, in order.
        salt: Chooses between the wordings.
    """
    text = pick(STARTS[kind], "start", salt).format(name=spoken_name, lower=name.lower())
    for step in types[:-1]:
        text = pick(STEPS[step], "step", salt, step).format(text)
    return pick(ASKS[types[-1]], "ask", salt).format(text).replace("??", "?")


def answer_forms(value: str) -> tuple[str, ...]:
    """Returns the accepted forms of an answer: as written, and without its unit or commas."""
    forms = [value]
    first, _, unit = value.partition(" ")
    digits = first.replace(",", "").replace(".", "").lstrip("$+")
    if digits.isdigit():
        forms += [first, value.replace(",", ""), first.replace(",", "")] if unit else []
        forms.append(value.replace(",", "").lstrip("$"))
    return tuple(dict.fromkeys(forms))
