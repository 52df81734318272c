"""Normal forms of names and triples, and the sources of what several passages say."""

import dataclasses
import re
import unicodedata
from collections.abc import Iterable
from typing import Literal

from cirag_jax.types import Triple

Normalization = Literal["ascii", "unicode"]

_NOT_ASCII_WORD = re.compile("[^a-z0-9]+")


def normalise(text: str, normalization: Normalization = "ascii") -> str:
    """The normal form in which surfaces are compared; applying it twice changes nothing.

    Args:
        text: A surface, as the model or the passage spells it.
        normalization: ``ascii`` is that of CIRAG's case study (Table 9): lower case, everything but
            ``a-z``, ``0-9`` and space is a space ("br k" for "bråk"). ``unicode`` keeps the
            letters, digits and marks of every script, after compatibility normalisation (NFKC)
            and case folding.

    Returns:
        Words separated by single spaces; empty where nothing is left.
    """
    if normalization == "ascii":
        return _NOT_ASCII_WORD.sub(" ", text.lower()).strip()
    if text.isascii():  # the same, and faster
        return _NOT_ASCII_WORD.sub(" ", text.lower()).strip()
    while (folded := _folded(text)) != text:  # a fold may make another one possible
        text = folded
    return text


def _folded(text: str) -> str:
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = (char if unicodedata.category(char)[0] in "LNM" else " " for char in text)
    return " ".join("".join(kept).split())


def triple_key(triple: Triple, normalization: Normalization = "ascii") -> tuple[str, str, str]:
    """What two triples have in common that say the same in the same words.

    A part of which the ASCII form leaves nothing (Greek, Chinese) is taken in its Unicode form, and
    one of which that leaves nothing either as it stands: different names never share the key "".
    """
    return (
        name_key(triple.head, normalization),
        name_key(triple.relation, normalization),
        name_key(triple.tail, normalization),
    )


def name_key(text: str, normalization: Normalization = "ascii") -> str:
    """What two surfaces of a name have in common; see `triple_key`. Empty where nothing is left."""
    return normalise(text, normalization) or normalise(text, "unicode") or text.strip()


@dataclasses.dataclass(frozen=True, slots=True)
class SourcedTriple:
    """A fact with everything that states it.

    Attributes:
        triple: The first statement of it, with its raw surface.
        sources: (passage id, sentence index) of every statement, in order, each pair once.
    """

    triple: Triple
    sources: tuple[tuple[str | None, int | None], ...]


def merge_sources(
    triples: Iterable[Triple], normalization: Normalization = "ascii"
) -> tuple[SourcedTriple, ...]:
    """Joins triples with the same `triple_key`, in the order of their first statements."""
    first: dict[tuple[str, str, str], Triple] = {}
    sources: dict[tuple[str, str, str], dict[tuple[str | None, int | None], None]] = {}
    for triple in triples:
        key = triple_key(triple, normalization)
        first.setdefault(key, triple)
        sources.setdefault(key, {})[triple.passage_id, triple.sentence] = None
    return tuple(SourcedTriple(triple, tuple(sources[key])) for key, triple in first.items())
