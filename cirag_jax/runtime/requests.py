"""The requests of methods, and their responses.

A method is a generator function. It yields a request and is sent the response. It may also yield a
list of requests, which may run concurrently, and is then sent their responses in the same order.
Methods therefore need no access to models, files or networks, and tests can run them without a
scheduler.
"""

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from cirag_jax.datasets.chains import UnitKind
from cirag_jax.io import visible
from cirag_jax.llm.types import Ability, Generate, Generated, Score, Scored
from cirag_jax.triples.entity_index import Match
from cirag_jax.triples.normalization import Normalization
from cirag_jax.types import Feedback, Granularity, Passage, Question, Text, Triple

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

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the passages."""
        return tuple(passage.id for passage in self.passages)


@dataclasses.dataclass(frozen=True, slots=True)
class Follow:
    """A request for the passages whose titles occur in ``texts``; answered by `Retrieved`.

    Returns at most ``k`` passages, in order of occurrence. A passage's score is the number of texts
    that contain its title.
    """

    texts: tuple[str, ...]
    k: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """A request for the passages with these ids; answered by `Retrieved`, with scores of 1.

    The request fails if one of the passages is missing from the corpus.
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
    """Entities, best first, and the triples that contain at least one of them."""

    entities: tuple[str, ...]
    triples: tuple[Triple, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A request for the ``n`` triples of the corpus nearest to ``query``; answered by `Linked`."""

    query: str
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class Linked:
    """Triples, best first, with their cosines.

    ``lowest`` is the lowest cosine of all triples of the corpus.
    """

    triples: tuple[Triple, ...]
    scores: tuple[float, ...]
    lowest: float


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """A request for the passages at which a walk over the graph ends; answered by `Retrieved`.

    The walk starts and restarts at the entities of triples, and at passages that the index finds
    for the query. Scores are its PageRank.

    Attributes:
      query: the query of the passages.
      triples: triples whose entities are seeds.
      weights: weight of each triple. An entity's weight is the mean over its triples, divided by
        the number of passages that contain the entity.
      k: number of passages.
      num_entities: number of entities with the highest weights that are seeds; 0 is all.
      num_seeds: number of passages that are seeds; 0 is all.
      passage_weight: weight of the best passage. The weights of the others decrease with their
        scores, to 0 for the last passage.
      restart: probability of a restart at each step.
    """

    query: str
    triples: tuple[Triple, ...]
    weights: tuple[float, ...]
    k: int
    num_entities: int
    num_seeds: int
    passage_weight: float
    restart: float


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
class Route:
    """A request for the granularity router (`models.router`); answered by `Routed`.

    Attributes:
      question: the question, whose embedding the router reads.
      granularity: the granularity that may be skipped.
      scalars: the other features (`methods.cirag.routing.scalars`).
      refused: whether the scalars include those of a refusal.
    """

    question: str
    granularity: Granularity
    scalars: tuple[float, ...]
    refused: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """The probability that reading the granularity is worthwhile."""

    probability: float


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


Request = (
    Retrieve | Fetch | Follow | Extract | Anchor | Link | Walk | Rank | Route | Demonstrate
    | Generate | Score
)  # fmt: skip
Response = (
    Retrieved | Extracted | Anchored | Linked | Ranked | Routed | Demonstrated | Generated | Scored
)  # fmt: skip

_T = TypeVar("_T")

# A running method: it yields requests, is sent responses, and returns its result.
Program = Generator[Request | Sequence[Request], Any, _T]


@dataclasses.dataclass(frozen=True)
class Needs:
    """The resources that a method needs with its settings; commands open only these resources.

    Attributes:
      roles: names of language-model roles; each role is a block of the config.
      abilities: role -> abilities that the role needs and that some backends lack.
      rankers: names of blocks of ``config.rankers``.
      units: the kind of units that the rankers rank, if there is only one kind. Aligners that were
        trained on other units are rejected.
      corpus: whether the method needs passages (`Retrieve` or `Fetch`).
      search: whether it needs an index; if not, passages are only fetched by id.
      feedback: whether it uses relevance feedback.
      links: whether it follows links from texts to the passages that they name (`Follow`).
      triples: whether it needs triples of passages (`Extract`).
      entities: normalization of entity names (`Anchor`, and `Fetch` for their passages); None if
        no entities are needed.
      graph: whether it needs a graph of all triples and passages (`Link` and `Walk`).
      router: whether it needs a granularity router (`Route`).
      demonstrations: whether it needs training questions (`Demonstrate`).
      gold: whether it uses gold annotations, including answers; results report this.
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
    graph: bool = False
    router: bool = False
    demonstrations: bool = False
    gold: bool = False

    @property
    def index(self) -> bool:
        """Whether the method needs an index over the passages."""
        return self.corpus and self.search


class RequestError(Exception):
    """The error of a request that could not be answered; it ends only the request's program.

    Control characters in its text are escaped (`visible`), because it is shown in terminals.
    """

    def __init__(self, text: str = ""):
        super().__init__(visible(text))


def handler_key(request: Request) -> type | str:
    """Returns the key of a request's handler: a role, ``rankers.NAME``, or the request's type."""
    if isinstance(request, Generate | Score):
        return request.role
    return f"rankers.{request.ranker}" if isinstance(request, Rank) else type(request)
