"""The requests of methods, and their responses.

A method is a generator function. It yields a request and is sent the response, or it yields a list
of requests that may run concurrently and is sent their responses in order. Methods therefore need
no access to models, files or networks, and tests can drive them by hand.
"""

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from cirag_jax.datasets.chains import UnitKind
from cirag_jax.io import visible
from cirag_jax.llm.types import Ability, Generate, Generated, Score, Scored
from cirag_jax.triples.entity_index import Match
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Feedback, Passage, Question, Text, Triple

TextT = TypeVar("TextT", bound=Text)


@dataclasses.dataclass(frozen=True, slots=True)
class Retrieve:
    """A request for the ``k`` passages nearest to ``query``; answered by `Retrieved`.

    ``feedback`` moves the query's vector toward passages; BM25 indexes do not support it.
    """

    query: str
    k: int
    feedback: Feedback | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Retrieved:
    """Passages, best first, with the retriever's scores."""

    passages: tuple[Passage, ...]
    scores: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Follow:
    """A request for the passages whose titles occur in ``texts``; answered by `Retrieved`.

    Returns at most ``k``, in order of occurrence. The score is the number of texts with the title.
    """

    texts: tuple[str, ...]
    k: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """A request for the passages with these ids; answered by `Retrieved`, with scores of 1.

    It fails if the corpus lacks one of them.
    """

    passage_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Extract:
    """A request for the triples of each passage; answered by `Extracted`."""

    passages: tuple[Passage, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Extracted:
    """The triples of each passage; None if they were not extracted or extraction failed."""

    triples: tuple[tuple[Triple, ...] | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Anchor:
    """A request for the ``n`` entities nearest to a name, with their triples.

    Answered by `Anchored`; see `EntityIndex.anchors` for ``match``.
    """

    surface: str
    n: int
    match: Match = "coverage"


@dataclasses.dataclass(frozen=True, slots=True)
class Anchored:
    """Entities, best first, and the triples that contain one of them, by passage."""

    entities: tuple[str, ...]
    triples: tuple[Triple, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """A request for the ``n`` texts that match ``query`` best; answered by `Ranked`.

    Attributes:
      query: the query.
      texts: triples, passages or sentences, which the ranker formats for its model.
      n: number of texts to return; 0 means all.
      ranker: name of a block of ``config.rankers``.
    """

    query: str
    texts: tuple[Text, ...]
    n: int
    ranker: str


@dataclasses.dataclass(frozen=True, slots=True)
class Ranked(Generic[TextT]):
    """Texts, best first, with the ranker's scores."""

    texts: tuple[TextT, ...]
    scores: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Demonstrate:
    """A request for at most ``n`` training questions similar to ``query``.

    Answered by `Demonstrated`. Questions of the run itself are excluded, by id and by text.
    """

    query: str
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class Demonstrated:
    """Training questions with their annotations, most similar first; possibly none."""

    questions: tuple[Question, ...]


Request = Retrieve | Fetch | Follow | Extract | Anchor | Rank | Demonstrate | Generate | Score
Response = Retrieved | Extracted | Anchored | Ranked | Demonstrated | Generated | Scored

_T = TypeVar("_T")

# A running method: it yields requests, is sent responses, and returns its result.
Program = Generator[Request | Sequence[Request], Any, _T]


@dataclasses.dataclass(frozen=True)
class Needs:
    """The resources that a method requests with its settings; no others are opened.

    Attributes:
      roles: language models, each a block of the config.
      abilities: features that a role needs and that not every backend has.
      rankers: names of blocks of ``config.rankers``.
      units: the only kind of units that the rankers are given, if there is one. Aligners trained on
        another kind are rejected.
      corpus: passages (`Retrieve` or `Fetch`).
      search: an index; without it, passages are only fetched by their ids.
      feedback: retrieval with relevance feedback.
      links: links from texts to the passages that they name (`Follow`).
      triples: triples of passages (`Extract`).
      entities: normal form of the names of entities (`Anchor`, and `Fetch` for their passages);
        None if no entities are needed.
      demonstrations: training questions (`Demonstrate`).
      gold: gold annotations of the questions, including answers; results report this.
    """

    roles: tuple[str, ...] = ()
    abilities: Mapping[str, tuple[Ability, ...]] = dataclasses.field(default_factory=dict)
    rankers: tuple[str, ...] = ()
    units: UnitKind | None = None
    corpus: bool = True
    search: bool = True
    feedback: bool = False
    links: bool = False
    triples: bool = False
    entities: Normalization | None = None
    demonstrations: bool = False
    gold: bool = False

    @property
    def index(self) -> bool:
        """Whether the method needs an index over the passages."""
        return self.corpus and self.search


class RequestError(Exception):
    """A request could not be answered; only its own program ends.

    Its text is made `visible`, because it is recorded and shown in terminals.
    """

    def __init__(self, text: str = ""):
        super().__init__(visible(text))


def handler_key(request: Request) -> type | str:
    """Returns the key of a request's handler: a role, ``rankers.NAME``, or the request's type."""
    if isinstance(request, Generate | Score):
        return request.role
    return f"rankers.{request.ranker}" if isinstance(request, Rank) else type(request)
