"""What a method may ask for, and what it gets back.

A method is a generator function: it yields one request, or a list of requests that may run at the
same time, and is sent the response, or the list of responses in order. So it never sees a model, a
file or a network, and a test drives it by hand.
"""

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from cirag_jax.llm.types import Generate, Generated, Score, Scored
from cirag_jax.types import Passage, Triple


@dataclasses.dataclass(frozen=True, slots=True)
class Retrieve:
    """The ``k`` passages nearest to ``query``; answered by `Retrieved`."""

    query: str
    k: int


@dataclasses.dataclass(frozen=True, slots=True)
class Retrieved:
    """Passages, best first, with the retriever's scores."""

    passages: tuple[Passage, ...]
    scores: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Extract:
    """The triples of each passage; answered by `Extracted`."""

    passages: tuple[Passage, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Extracted:
    """For every passage asked for, its triples, or None where extraction failed or never ran."""

    triples: tuple[tuple[Triple, ...] | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RankTriples:
    """The ``n`` triples that fit ``query`` best (0: all of them); answered by `RankedTriples`."""

    query: str
    triples: tuple[Triple, ...]
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class RankedTriples:
    """Triples, best first, with the reranker's scores."""

    triples: tuple[Triple, ...]
    scores: tuple[float, ...]


Request = Retrieve | Extract | RankTriples | Generate | Score
Response = Retrieved | Extracted | RankedTriples | Generated | Scored

_T = TypeVar("_T")

# What a method returns when called: yields requests, is sent responses, returns its result.
Program = Generator[Request | Sequence[Request], Any, _T]


class RequestError(Exception):
    """A request that could not be answered; ends its own question, never another's."""
