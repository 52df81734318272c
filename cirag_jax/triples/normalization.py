"""Normal forms of names and triples, and the sources of facts that several passages state."""

import dataclasses
import re
import unicodedata
from collections.abc import Iterable
from typing import Literal

from cirag_jax.types import Triple

Normalization = Literal["ascii", "unicode"]

_NOT_ASCII_WORD = re.compile("[^a-z0-9]+")


def normalize(text: str, normalization: Normalization = "ascii") -> str:
    """Returns the normal form of a name as words separated by single spaces, maybe none.

    Args:
        text: A name, as the model or the passage spells it.
        normalization: ``ascii`` is that of CIRAG's case study (Table 9): lower case, with a space
            for everything but ``a-z`` and ``0-9`` ("br k" for "bråk"). ``unicode`` keeps the
            letters, digits and marks of every script, after compatibility normalization (NFKC)
            and case folding.
    """
    if normalization == "ascii" or text.isascii():
        return _NOT_ASCII_WORD.sub(" ", text.lower()).strip()
    while (folded := _folded(text)) != text:  # One folding may enable another.
        text = folded
    return text


def _folded(text: str) -> str:
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = (char if unicodedata.category(char)[0] in "LNM" else " " for char in text)
    return " ".join("".join(kept).split())


def triple_key(triple: Triple, normalization: Normalization = "ascii") -> tuple[str, str, str]:
    """Returns the key that triples with equal normal forms share, one `name_key` per part."""
    return (
        name_key(triple.head, normalization),
        name_key(triple.relation, normalization),
        name_key(triple.tail, normalization),
    )


def name_key(text: str, normalization: Normalization = "ascii") -> str:
    """Returns the key that spellings of a name share.

    A name with an empty ASCII form (Greek, Chinese) gets its Unicode form, and if that is empty
    too, the name itself, so that different names never share the key "".
    """
    return normalize(text, normalization) or normalize(text, "unicode") or text.strip()


@dataclasses.dataclass(frozen=True, slots=True)
class SourcedTriple:
    """A fact and its sources.

    Attributes:
        triple: The first triple that states the fact, in its original spelling.
        sources: Distinct (passage id, sentence index) of all triples that state it, in order.
    """

    triple: Triple
    sources: tuple[tuple[str | None, int | None], ...]


def merge_sources(
    triples: Iterable[Triple], normalization: Normalization = "ascii"
) -> tuple[SourcedTriple, ...]:
    """Merges triples with the same `triple_key`, in the order of their first occurrences."""
    first: dict[tuple[str, str, str], Triple] = {}
    sources: dict[tuple[str, str, str], dict[tuple[str | None, int | None], None]] = {}
    for triple in triples:
        key = triple_key(triple, normalization)
        first.setdefault(key, triple)
        sources.setdefault(key, {})[triple.passage_id, triple.sentence] = None
    return tuple(SourcedTriple(triple, tuple(sources[key])) for key, triple in first.items())
