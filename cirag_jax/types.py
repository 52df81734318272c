"""The nouns of the system, as small frozen dataclasses without behaviour.

Everything optional is ``None`` when a data set does not say; ``None`` means unknown, never empty.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# An ml_collections.ConfigDict, locked. Its fields are dynamic, so that no checker can know them.
Config = Any


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """A short document. ``sentences`` are the benchmark's own boundaries and never split again."""

    id: str
    title: str
    text: str
    sentences: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Triple:
    """A fact ``<head; relation; tail>`` with its provenance.

    ``sentence`` indexes the sentences of passage ``passage_id``.
    """

    head: str
    relation: str
    tail: str
    passage_id: str | None = None
    sentence: int | None = None


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
    index, ``context`` the ids of the question's own distractor pool, ``evidences`` gold triples in
    reasoning order (2WikiMultihopQA), ``decomposition`` the sub-questions (MuSiQue).
    """

    id: str
    question: str
    answers: tuple[str, ...]
    type: str | None = None
    hops: int | None = None
    split: str | None = None
    fold: str | None = None
    setting: str | None = None
    supporting: tuple[str, ...] | None = None
    supporting_sentences: tuple[tuple[str, int], ...] | None = None
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
