"""What a method may ask for, and what it gets back.

A method is a generator function: it yields one request, or a list of requests that may run at the
same time, and is sent the response, or the list of responses in order. So it never sees a model, a
file or a network, and a test drives it by hand.
"""

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from cirag_jax.llm.types import FinishReason, Message, Usage
from cirag_jax.types import Passage, Triple

Role = Literal["reader", "integrator", "extractor", "constructor", "judge", "teacher", "planner"]


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


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
    """A continuation of a conversation by the model of ``role``; answered by `Generated`.

    ``max_tokens``, ``temperature``, ``stop``, ``continue_final`` and ``json_schema`` mean what they
    mean in `cirag_jax.llm.types.Request`; a ``max_tokens`` of None is the role's own.
    """

    messages: tuple[Message, ...]
    role: Role
    max_tokens: int | None = None
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    continue_final: bool = False
    json_schema: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """The model's text; ``length`` says that it was cut off."""

    text: str
    finish_reason: FinishReason
    usage: Usage = Usage()


Request = Retrieve | Extract | RankTriples | Generate
Response = Retrieved | Extracted | RankedTriples | Generated

_T = TypeVar("_T")

# What a method returns when called: yields requests, is sent responses, returns its result.
Program = Generator[Request | Sequence[Request], Any, _T]


class RequestError(Exception):
    """A request that could not be answered; ends its own question, never another's."""
