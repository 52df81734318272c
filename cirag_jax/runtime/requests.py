"""What a method may ask for, and what it gets back.

A method is a generator function: it yields one request, or a list of requests that may run at the
same time, and is sent the response, or the list of responses in order. So it never sees a model, a
file or a network, and a test drives it by hand.
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
    """The ``k`` passages nearest to ``query``; answered by `Retrieved`.

    With ``feedback`` those nearest to its vector as passages move it, which no BM25 index answers.
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
    """The passages that ``texts`` name by their titles; answered by `Retrieved`.

    At most ``k`` of them, as they are named; a score says how many texts name it.
    """

    texts: tuple[str, ...]
    k: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """The passages with these ids, in their order; answered by `Retrieved`, every score 1.

    It fails where the run's corpus lacks one.
    """

    passage_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Extract:
    """The triples of each passage; answered by `Extracted`."""

    passages: tuple[Passage, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Extracted:
    """For every passage asked for, its triples, or None where extraction failed or never ran."""

    triples: tuple[tuple[Triple, ...] | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Anchor:
    """The ``n`` entities of all triples nearest to a name, and what is said of them.

    Answered by `Anchored`; ``match`` as in `EntityIndex.anchors`.
    """

    surface: str
    n: int
    match: Match = "coverage"


@dataclasses.dataclass(frozen=True, slots=True)
class Anchored:
    """Entities, best first, and the triples with one of them at either end, by passage."""

    entities: tuple[str, ...]
    triples: tuple[Triple, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """The ``n`` texts that fit ``query`` best; answered by `Ranked`.

    Attributes:
      query: what they are compared with.
      texts: triples, passages or sentences; the ranker writes them as its model reads them.
      n: 0: all of them.
      ranker: which one, a block of ``config.rankers``.
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
    """At most ``n`` training questions, most similar to ``query``; answered by `Demonstrated`.

    Never one that is being answered, by its id or by its text.
    """

    query: str
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class Demonstrated:
    """Training questions with their annotations, the most similar first; none where none is."""

    questions: tuple[Question, ...]


Request = Retrieve | Fetch | Follow | Extract | Anchor | Rank | Demonstrate | Generate | Score
Response = Retrieved | Extracted | Anchored | Ranked | Demonstrated | Generated | Scored

_T = TypeVar("_T")

# What a method returns when called: yields requests, is sent responses, returns its result.
Program = Generator[Request | Sequence[Request], Any, _T]


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a method asks for with its settings; nothing else is opened.

    Attributes:
      roles: language models, each a block of the config.
      abilities: what a role is asked for that not every backend gives.
      rankers: each a block of ``config.rankers``.
      units: what these rank, where that is triples, sentences or passages alone: an aligner that
        was trained on others is refused.
      corpus: passages, by `Retrieve` or `Fetch`.
      search: without it passages are only fetched by their ids, and nothing is embedded.
      feedback: whether it retrieves by vectors that passages move.
      links: from texts to the passages that they name, by `Follow`.
      triples: of passages, by `Extract`.
      entities: of the triples of the whole corpus, by `Anchor`, with their passages, by `Fetch`;
        the normal form of their names. None: not needed.
      demonstrations: training questions, by `Demonstrate`.
      gold: what a question's benchmark annotates, its answers too; results say so.
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
        """Whether an index over the passages is needed."""
        return self.corpus and self.search


class RequestError(Exception):
    """A request that could not be answered; ends its own question, never another's.

    Its text is `visible`: a journal keeps it, a terminal shows it.
    """

    def __init__(self, text: str = ""):
        super().__init__(visible(text))


def addressee(request: Request) -> type | str:
    """Whose request it is: a role's, ``rankers.NAME``, or of the only one who answers its type."""
    if isinstance(request, Generate | Score):
        return request.role
    return f"rankers.{request.ranker}" if isinstance(request, Rank) else type(request)
