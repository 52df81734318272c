"""Records that the steps of the generation exchange."""

import dataclasses
from typing import Any, Literal

from cirag_jax import errors

Kind = Literal["always", "context"]  # exact equivalence, or equivalence within a cluster


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A whole article, with the ``source`` and ``date`` of its file."""

    id: str
    title: str
    sentences: tuple[str, ...]
    source: str | None = None
    date: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A self-contained statement, made from sentence ``sentence`` of a document."""

    document: str
    sentence: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """A triple of the claim with index ``claim``.

    ``head_id`` and ``tail_id`` are the nodes of its ends. ``type`` is its relation in the built-in
    dataset's graph, empty for other facts. The ends of typed facts are never merged with others.
    """

    head: str
    relation: str
    tail: str
    claim: int
    head_id: str
    tail_id: str
    type: str = ""

    @property
    def parts(self) -> tuple[str, str, str]:
        """Returns head, relation and tail as extracted."""
        return self.head, self.relation, self.tail


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Equivalent nodes of cluster ``cluster``."""

    cluster: int
    nodes: tuple[str, ...]
    kind: Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """An edge that the fact with index ``fact`` states about two nodes or equivalent ones."""

    fact: int
    head: str
    tail: str


Path = tuple[Edge, ...]


def extra(name: str) -> Any:
    """Imports a module that only the generation needs."""
    return errors.import_optional(name, "generating questions", "requirements-grade.txt")
