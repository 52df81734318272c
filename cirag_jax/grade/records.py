"""Records that the steps of question generation exchange."""

import dataclasses
from typing import Any, Literal

from cirag_jax import errors

Kind = Literal["always", "context"]  # exact equivalence, or equivalence within a cluster


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """An article, with ``source`` and ``date`` from its file."""

    id: str
    title: str
    sentences: tuple[str, ...]
    source: str | None = None
    date: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A self-contained statement, made from the document's sentence with index ``sentence``."""

    document: str
    sentence: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """A triple of the claim with index ``claim``.

    ``head_id`` and ``tail_id`` are the nodes of the triple's ends. ``type`` is the relation in the
    built-in dataset's graph; it is empty for other facts. The nodes of typed facts are never
    merged.
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
    """Equivalent nodes in the cluster with index ``cluster``."""

    cluster: int
    nodes: tuple[str, ...]
    kind: Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """An edge from the fact with index ``fact``, between its nodes or equivalent nodes."""

    fact: int
    head: str
    tail: str


Path = tuple[Edge, ...]


def extra(name: str) -> Any:
    """Imports an optional module that only question generation needs."""
    return errors.import_optional(name, "generating questions", "grade")
