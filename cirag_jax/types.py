"""Data types that the whole package uses: small frozen dataclasses without behavior.

An optional field is ``None`` if the dataset does not provide it. An empty tuple means that the
dataset lists no items.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec

# A locked ml_collections.ConfigDict. Its fields are dynamic, so type checkers cannot know them.
Config = Any

# Types with a range, checked when records are read from files and when settings are created.
NonEmptyStr = Annotated[str, msgspec.Meta(pattern=r"\S")]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
UnitInterval = Annotated[float, msgspec.Meta(ge=0, le=1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """A short document; ``sentences`` are the benchmark's own sentences of ``text``, if known."""

    id: NonEmptyStr
    title: str
    text: str
    sentences: tuple[str, ...] | None = None


class Triple(NamedTuple):
    """A fact ``<head; relation; tail>``, extracted from a sentence of a passage."""

    head: str
    relation: str
    tail: str
    passage_id: str | None = None
    sentence: int | None = None  # index into the passage's sentences


@dataclasses.dataclass(frozen=True, slots=True)
class Sentence:
    """Sentence number ``index`` of a passage; equality ignores ``text``.

    ``text`` starts with the passage's title, as in the aligner's input. It is set only if the
    sentence was part of a language model's prompt.
    """

    passage_id: str
    index: int
    text: str | None = dataclasses.field(default=None, compare=False)


# A retrieval unit: a triple, a sentence, or the id of a passage.
Unit = Triple | Sentence | str
UnitT = TypeVar("UnitT", bound=Unit, covariant=True)

# An item that a ranker scores against a query.
Text = str | Passage | Triple

# What a text is to an encoder, which may have an instruction for each role.
Role = Literal["query", "passage", "triple"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclasses.dataclass(frozen=True, slots=True)
class Feedback:
    """Relevance feedback on a query vector q (Vector-PRF, Li et al. 2021): a*q + sum of w_i*p_i.

    Averaging q with n passages sets all weights to 1 / (n + 1). Rocchio sets a to alpha and w_i to
    beta / n.

    Attributes:
        query_weight: The weight a.
        passages: Pairs (passage id, w_i); the index supplies the vector p_i.
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
    """A question with the annotations of its benchmark.

    Attributes:
        answers: The gold answer and its aliases; blank ones are dropped.
        type: The benchmark's question type, such as ``bridge`` or ``comparison``.
        hops: Number of reasoning steps.
        split: ``train``, ``dev`` or ``test``.
        fold: Part of a split, such as ``tune``.
        setting: ``distractor`` or ``fullwiki`` (HotpotQA).
        supporting: Ids of the gold passages.
        supporting_sentences: Gold sentences, as pairs (passage id, sentence index).
        same_sentences: Groups of positions of the same gold sentence in overlapping passages.
        context: Ids of the question's own passages, distractors included.
        evidences: Gold triples in reasoning order (2WikiMultihopQA).
        decomposition: Sub-questions in reasoning order (MuSiQue).
        aliases: Those of ``answers`` that are aliases, which some scorers ignore; None if unknown.
    """

    id: NonEmptyStr
    question: NonEmptyStr
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
    # Outside repr, so that hashes of training data stay the same; only scorers read it.
    aliases: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        answers = tuple(answer for answer in self.answers if answer.strip())
        object.__setattr__(self, "answers", answers)


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Questions over a corpus.

    Attributes:
        corpus: Passages by id, in file order.
        triples: Extracted triples by passage id. A passage without triples maps to an empty tuple;
            a missing id means that the passage was never extracted.
    """

    name: str
    questions: tuple[Question, ...]
    corpus: Mapping[str, Passage]
    triples: Mapping[str, tuple[Triple, ...]]


Granularity = Literal["triple", "sentence", "passage", "default"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


@dataclasses.dataclass(frozen=True, slots=True)
class Step(Generic[UnitT]):
    """One round of iterative retrieval, recorded for traces and for distillation.

    Attributes:
        query: The query of the round.
        passages: Ids of the retrieved passages.
        candidates: The units shown to the model, best first.
        scores: The ranker's scores of the candidates.
        thought: The model's reasoning.
        kept: The units that the model chose, in the model's order (CIRAG's core triples).
        next_query: The query for the next round; None if the model stopped.
        response: The model's raw text.
        more_queries: Further queries of the same round.
        notes: Other data that a method records, as JSON (such as a plan or an outline).
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
    """One attempt to answer from evidence of one granularity.

    Without evidence the model is not called, and the attempt counts as insufficient.

    Attributes:
        answer: The answer; empty if it is a refusal.
        error: The reason why the model could not answer. The question then fails, but its
            retrieved passages still count.
        logprobs: Log-probabilities of the response's tokens, if the method asked for them.
    """

    granularity: Granularity
    evidence: tuple[str, ...]
    response: str
    answer: str
    sufficient: bool
    error: str | None = None
    logprobs: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A method's answer and its evidence.

    Attributes:
        granularity: Granularity of the sufficient evidence; ``default`` if none was sufficient.
        passages: Ids of the retrieved passages, best first.
        sentences: Retrieved sentences as pairs (passage id, index), best first.
        triples: Retrieved triples, best first.
        parse_errors: Number of malformed outputs by kind.
    """

    answer: str
    granularity: Granularity
    passages: tuple[str, ...] = ()
    sentences: tuple[tuple[str, int], ...] = ()
    triples: tuple[Triple, ...] = ()
    steps: tuple[Step, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def error(self) -> str | None:
        """The reason why the reader failed; the prediction then has no answer."""
        return next((a.error for a in self.attempts if a.error is not None), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """A teacher's steps in collecting evidence for one question; training data of distillation.

    Attributes:
        teacher: ``annotations``, or the name of a language model.
        steps: The rounds of retrieval, each with the teacher's decision.
        end: Why the trajectory ends. ``stopped``: the teacher gave no further query.
            ``max_steps``: the limit was reached. ``repeat``: the teacher repeated a query.
            ``in_vain``: two rounds kept nothing; the second and all later rounds are left out.
            ``no_decision``: the last response contains neither a query nor the statement that the
            evidence is sufficient.
        solved: For annotations, whether the core facts support all facts that the question needs.
            For a language model, whether the answer read from them is correct. None if unchecked.
        parse_errors: Number of malformed outputs by kind.
    """

    question_id: NonEmptyStr
    question: NonEmptyStr
    teacher: str
    steps: tuple[Step[Triple | Sentence], ...]
    end: Literal["stopped", "max_steps", "repeat", "in_vain", "no_decision"]
    solved: bool | None = None
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Usage:
    """Cost of one response, or the total over several.

    Attributes:
        prompt_tokens: Tokens of the rendered prompt, including cached ones.
        cached_tokens: Prompt tokens that were not computed again.
        generated_tokens: New tokens, including the end-of-turn token.
        seconds: Wall time from admission to end; totals add up concurrent requests.
        truncated: Number of prompts that were shortened to fit.
        thoughts: Number of responses from which a model's thoughts were removed.
        drafted_tokens: Generated tokens that the engine guessed correctly, so that they took no
            decoding step of their own.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    truncated: int = 0
    thoughts: int = 0
    drafted_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        fields = (f.name for f in dataclasses.fields(self))
        return Usage(*(getattr(self, name) + getattr(other, name) for name in fields))

    @property
    def counts(self) -> dict[str, int]:
        """The counts, under their names in results."""
        names = ("prompt_tokens", "cached_tokens", "generated_tokens")
        tokens = {name: getattr(self, name) for name in names}
        return {**tokens, "truncated": self.truncated, "thoughts": self.thoughts}
