"""What the steps of the generation hand on."""

import dataclasses
from typing import Any, Literal

from cirag_jax import errors

Kind = Literal["always", "context"]  # of an equivalence: exact, or in its cluster alone


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """An article, whole. ``source`` and ``date`` are whatever its file says."""

    id: str
    title: str
    sentences: tuple[str, ...]
    source: str | None = None
    date: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A fact that is understood alone, made from sentence ``sentence`` of a document."""

    document: str
    sentence: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """A triple of claim ``claim`` (its place).

    ``head_id`` and ``tail_id`` are the nodes of its ends. ``type`` is the relation of the built-in
    dataset's graph, where it comes from there, else empty; its ends are then known to be what they
    are, and are never taken for others.
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
        """Head, relation and tail as they were extracted."""
        return self.head, self.relation, self.tail


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Nodes of cluster ``cluster`` that mean the same."""

    cluster: int
    nodes: tuple[str, ...]
    kind: Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """A fact (its place) as it connects two nodes of the graph, perhaps in others' stead."""

    fact: int
    head: str
    tail: str


Path = tuple[Edge, ...]


def extra(name: str) -> Any:
    """A module that only the generation needs; raises `UserError` where it is not installed."""
    return errors.extra(name, "generating questions", "requirements-grade.txt")
