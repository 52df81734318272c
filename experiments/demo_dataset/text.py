"""Stable orders and normalization of names, without the data packages."""

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

from cirag_jax.datasets.demo.wording import stable_hash

T = TypeVar("T")
_WORDS = re.compile(r"[0-9a-z]+")


def shuffled(items: Sequence[T], *salt: object) -> list[T]:
    """Returns the items in an order fixed by the stable hash of their text."""
    return sorted(items, key=lambda item: (stable_hash(*salt, item), str(item)))


@functools.cache
def fold(text: str) -> str:
    """Removes case, accents and punctuation, to match names across sources."""
    if not text.isascii():
        plain = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in plain if not unicodedata.combining(char))
    return " ".join(_WORDS.findall(text.casefold()))
