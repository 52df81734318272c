"""Normal forms of names and triples, and the merging of equal triples."""

import dataclasses
import re
import unicodedata
from collections.abc import Iterable
from typing import Literal

from cirag_jax.types import Triple

Normalization = Literal["ascii", "unicode"]

_NOT_ASCII_WORD = re.compile("[^a-z0-9]+")


def normalize(text: str, normalization: Normalization = "ascii") -> str:
    """Returns the normal form of a name: words separated by single spaces, or "".

    Args:
        text: A name, as spelled by the model or the passage.
        normalization: ``ascii`` follows CIRAG's case study (Table 9): the name is lower-cased, and
            everything except ``a-z`` and ``0-9`` becomes a space ("br k" for "bråk"). ``unicode``
            keeps the letters, digits and marks of every script, after compatibility normalization
            (NFKC) and case folding.
    """
    if normalization == "ascii" or text.isascii():
        return _NOT_ASCII_WORD.sub(" ", text.lower()).strip()
    while (folded := _folded(text)) != text:  # Folding again may change the result.
        text = folded
    return text


def _folded(text: str) -> str:
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = (char if unicodedata.category(char)[0] in "LNM" else " " for char in text)
    return " ".join("".join(kept).split())


def triple_key(triple: Triple, normalization: Normalization = "ascii") -> tuple[str, str, str]:
    """Returns the `name_key` of each part of a triple; equal facts have equal keys."""
    return (
        name_key(triple.head, normalization),
        name_key(triple.relation, normalization),
        name_key(triple.tail, normalization),
    )


def name_key(text: str, normalization: Normalization = "ascii") -> str:
    """Returns a key that is equal for all spellings of a name.

    The key is the normal form. If the ASCII form is empty (Greek, Chinese), the key is the Unicode
    form. If both are empty, the key is the name itself, so that different names never share the key
    "".
    """
    return normalize(text, normalization) or normalize(text, "unicode") or text.strip()


@dataclasses.dataclass(frozen=True, slots=True)
class SourcedTriple:
    """A fact with its sources.

    Attributes:
        triple: The first triple that states the fact, in its original spelling.
        sources: Distinct pairs (passage id, sentence index) of all triples that state the fact, in
            order.
    """

    triple: Triple
    sources: tuple[tuple[str | None, int | None], ...]


def merge_sources(
    triples: Iterable[Triple], normalization: Normalization = "ascii"
) -> tuple[SourcedTriple, ...]:
    """Merges triples with equal `triple_key`, in the order of their first occurrences."""
    first: dict[tuple[str, str, str], Triple] = {}
    sources: dict[tuple[str, str, str], dict[tuple[str | None, int | None], None]] = {}
    for triple in triples:
        key = triple_key(triple, normalization)
        first.setdefault(key, triple)
        sources.setdefault(key, {})[triple.passage_id, triple.sentence] = None
    return tuple(SourcedTriple(triple, tuple(sources[key])) for key, triple in first.items())
