"""The nouns of the system, as small frozen dataclasses without behaviour.

Everything optional is ``None`` when a data set does not say; ``None`` means unknown, never empty.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec

# An ml_collections.ConfigDict, locked. Its fields are dynamic, so that no checker can know them.
Config = Any

# Types with limits, which hold for records of files and for settings.
Filled = Annotated[str, msgspec.Meta(pattern=r"\S")]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
UnitInterval = Annotated[float, msgspec.Meta(ge=0, le=1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """A short document. ``sentences`` are the benchmark's own boundaries and never split again."""

    id: Filled
    title: str
    text: str
    sentences: tuple[str, ...] | None = None


class Triple(NamedTuple):
    """A fact ``<head; relation; tail>`` with its provenance.

    ``sentence`` indexes the sentences of passage ``passage_id``.
    """

    head: str
    relation: str
    tail: str
    passage_id: str | None = None
    sentence: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence by its place: the ``index``-th of passage ``passage_id``.

    ``text`` is what an aligner reads, the passage's title in front, where a language model was
    shown it; equal are sentences of the same place.
    """

    passage_id: str
    index: int
    text: str | None = dataclasses.field(default=None, compare=False)


# What a step shows and keeps: a triple, a sentence, or a passage by its id.
Unit = Triple | Sentence | str
UnitT = TypeVar("UnitT", bound=Unit, covariant=True)

# What a ranker compares with a query.
Text = str | Passage | Triple


@dataclasses.dataclass(frozen=True, slots=True)
class Feedback:
    """Passages that move a query's vector q (Vector-PRF, Li et al. 2021): a q + sum of w_i p_i.

    The average of q and n passages has weights 1 / (n + 1) throughout; Rocchio has a = alpha and
    w_i = beta / n.

    Attributes:
        query_weight: a.
        passages: (passage id, w_i); the vector p_i is the index's own.
    """

    query_weight: float
    passages: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SubQuestion:
    """One step of a MuSiQue decomposition; ``#1`` in ``question`` stands for the first answer."""

    question: str
    answer: str
    supporting: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question with whatever its benchmark annotates.

    ``supporting`` holds gold passage ids, ``supporting_sentences`` pairs of passage id and sentence
    index, ``same_sentences`` where passages overlap the places that hold one and the same gold
    sentence, ``context`` the ids of the question's own distractor pool, ``evidences`` gold triples
    in reasoning order (2WikiMultihopQA), ``decomposition`` the sub-questions (MuSiQue).
    """

    id: Filled
    question: Filled
    answers: tuple[str, ...]
    type: str | None = None
    hops: Count | None = None
    split: str | None = None
    fold: str | None = None
    setting: str | None = None
    supporting: tuple[str, ...] | None = None
    supporting_sentences: tuple[tuple[str, Count], ...] | None = None
    same_sentences: tuple[tuple[tuple[str, Count], ...], ...] | None = None
    context: tuple[str, ...] | None = None
    evidences: tuple[tuple[str, str, str], ...] | None = None
    decomposition: tuple[SubQuestion, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Questions over a corpus.

    ``corpus`` maps passage id to passage in file order; ``triples`` maps passage id to the triples
    extracted from it (an empty tuple is a passage in which extraction found nothing, an absent key
    one that was never extracted).
    """

    name: str
    questions: tuple[Question, ...]
    corpus: Mapping[str, Passage]
    triples: Mapping[str, tuple[Triple, ...]]


Granularity = Literal["triple", "sentence", "passage", "default"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


@dataclasses.dataclass(frozen=True, slots=True)
class Step(Generic[UnitT]):
    """One round of iterative retrieval, as a trace shows it and distillation trains on it.

    ``candidates`` are what the model was shown, best first, with the ranker's ``scores``; ``kept``
    the units it chose (CIRAG's core triples, in the order it named them); ``next_query`` is None
    where it asked for nothing more. ``response`` is the model's text as it came. A round of several
    queries has the others in ``more_queries``. ``notes`` are whatever else a method wants to be
    seen (a plan, an outline, a number), as JSON.
    """

    query: str
    passages: tuple[str, ...] = ()
    candidates: tuple[UnitT, ...] = ()
    scores: tuple[float, ...] = ()
    thought: str = ""
    kept: tuple[UnitT, ...] = ()
    next_query: str | None = None
    response: str = ""
    more_queries: tuple[str, ...] = ()
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One try to answer from evidence of one granularity; an empty pool is refused uncalled."""

    granularity: Granularity
    evidence: tuple[str, ...]
    response: str
    answer: str
    sufficient: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What a method answers, and from what; passages, sentences and triples are best first.

    ``granularity`` is the one that answered, ``default`` where every one refused. ``attempts`` are
    the answering calls, in order. ``parse_errors`` tell malformed output of each kind -> how often
    it was met.
    """

    answer: str
    granularity: Granularity
    passages: tuple[str, ...] = ()
    sentences: tuple[tuple[str, int], ...] = ()
    triples: tuple[Triple, ...] = ()
    steps: tuple[Step, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """One question as a teacher collected its evidence: what distillation trains on.

    Attributes:
        question_id: The question's.
        question: Its text.
        teacher: Who decided: ``annotations``, or the name of a language model.
        steps: The rounds of retrieval, each with the teacher's decision.
        end: ``stopped`` (the teacher asked for nothing more), ``max_steps``, ``repeat`` (it
            asked again what it had asked before, and that ends a run), ``in_vain`` (its second
            round that kept nothing, and those after it, are left out), or ``no_decision`` (its last
            response said neither what to ask nor that it had enough).
        solved: Whether core facts of its steps support every fact that the question needs
            (annotations), or the answer read from them is right (a language model); None where
            nobody looked.
        parse_errors: Malformed output of each kind -> how often it was met.
    """

    question_id: Filled
    question: Filled
    teacher: str
    steps: tuple[Step[Triple | Sentence], ...]
    end: Literal["stopped", "max_steps", "repeat", "in_vain", "no_decision"]
    solved: bool | None = None
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Usage:
    """Work of one response, or summed over many.

    Attributes:
      prompt_tokens: tokens of the prompt as rendered, cached ones included.
      cached_tokens: those of them that were not computed again.
      generated_tokens: new tokens, the end-of-turn token included.
      seconds: wall time from the request's admission to its end (summed, these overlap).
      truncated: prompts that were shortened to fit.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    truncated: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        fields = (f.name for f in dataclasses.fields(self))
        return Usage(*(getattr(self, name) + getattr(other, name) for name in fields))

    @property
    def tokens(self) -> dict[str, int]:
        """The counts of tokens, as results have them."""
        names = ("prompt_tokens", "cached_tokens", "generated_tokens")
        return {name: getattr(self, name) for name in names}
