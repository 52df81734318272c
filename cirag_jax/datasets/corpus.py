"""Corpus policies, which choose the passages to search (`docs/data.md`)."""

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cirag_jax.datasets.passage_file import PassagesById
from cirag_jax.errors import UserError, check_choice
from cirag_jax.types import Dataset, Passage, Question

WHOLE = "ircot_full"  # The policy that searches every passage.
POLICIES = (
    WHOLE,
    "selected_questions",
    "supporting_only",
    "supporting_and_sampled",
    "per_question",
)
SAMPLED = 10  # Passages that supporting_and_sampled adds per question (CIRAG, B.1).


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    """The passages to search.

    Attributes:
        policy: Name of the policy that chose them.
        passages: The passages, each once, in a reproducible order. Those of a large corpus stay on
            disk (`PassageFile`).
        allowed: Question id -> int32 indices of the passages that the question may retrieve, in
            the order of its context, with repeats. None if every question searches all passages.
    """

    policy: str
    passages: Sequence[Passage]
    allowed: Mapping[str, np.ndarray] | None = None


def build_corpus(
    dataset: Dataset, questions: Sequence[Question], policy: str, seed: int = 0
) -> Corpus:
    """Chooses the passages to search.

    Args:
        dataset: Questions and passages.
        questions: The selected questions; ``ircot_full`` and ``supporting_only`` ignore them.
        policy: One of `POLICIES`:
            ``ircot_full``: every passage of the dataset; for a converted benchmark, these are the
            contexts of all splits;
            ``selected_questions``: the union of the contexts of ``questions``;
            ``supporting_only``: gold passages of all questions of the dataset outside ``test``;
            ``supporting_and_sampled``: gold passages of ``questions``, plus up to `SAMPLED` random
            other passages per question;
            ``per_question``: each question searches only its own context.
        seed: Seed of the random passages, which are drawn separately for each question.
    """
    check_choice("config.data.corpus", policy, POLICIES)
    if policy == WHOLE:
        return Corpus(policy, _all_passages(dataset))
    if policy == "supporting_only":
        annotated = (q for q in dataset.questions if q.split != "test")
        ids = [pid for q in annotated for pid in _ids(dataset, q, "supporting", policy)]
        return Corpus(policy, _passages(dataset, ids))
    if policy == "supporting_and_sampled":
        all_passages, chosen = _all_passages(dataset), set[str]()
        for question in questions:
            gold = _ids(dataset, question, "supporting", policy)
            chosen |= {*gold, *_sample_others(all_passages, gold, f"{seed} {question.id}")}
        return Corpus(policy, tuple(p for pid, p in dataset.corpus.items() if pid in chosen))
    contexts = [_ids(dataset, q, "context", policy) for q in questions]
    passages = _passages(dataset, (pid for ids in contexts for pid in ids))
    if policy == "selected_questions":
        return Corpus(policy, passages)
    rows = {passage.id: row for row, passage in enumerate(passages)}
    allowed = {
        question.id: np.array([rows[pid] for pid in ids], np.int32)
        for question, ids in zip(questions, contexts, strict=True)
    }
    return Corpus(policy, passages, allowed)


def _passages(dataset: Dataset, ids: Iterable[str]) -> tuple[Passage, ...]:
    """Returns the distinct passages of ``ids``, in the order of their first mention."""
    return tuple(dataset.corpus[passage_id] for passage_id in dict.fromkeys(ids))


def _all_passages(dataset: Dataset) -> Sequence[Passage]:
    corpus = dataset.corpus
    return corpus.passages if isinstance(corpus, PassagesById) else tuple(corpus.values())


def _sample_others(passages: Sequence[Passage], gold: Sequence[str], seed: str) -> list[str]:
    """Returns up to `SAMPLED` random ids that are not in ``gold``."""
    count = min(SAMPLED + len(gold), len(passages))
    drawn = random.Random(seed).sample(range(len(passages)), count)
    return [pid for row in drawn if (pid := passages[row].id) not in gold][:SAMPLED]


def _ids(dataset: Dataset, question: Question, field: str, policy: str) -> tuple[str, ...]:
    ids = getattr(question, field)
    if ids is None:
        raise UserError(
            f"corpus policy {policy!r} needs '{field}', which question {question.id!r} of "
            f"{dataset.name} (questions.jsonl) does not have; {WHOLE} needs no annotations."
        )
    return ids
