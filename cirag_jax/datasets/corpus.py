"""Which passages a question may find: the corpus policies of the papers.

The papers differ in what they search, and recall differs with it, so the choice is a named option
(`docs/data.md` says who used which).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.types import Dataset, Passage, Question

WHOLE = "ircot_full"  # The policy that leaves nothing out.


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    """The passages to search.

    Attributes:
        policy: Name of the policy that chose them.
        passages: The passages, each once, in a reproducible order.
        allowed: Question id -> indices into ``passages`` that this question may find, int32 of
            shape [number of its context passages], in context order with any repeats; None where
            every question searches all ``passages``.
    """

    policy: str
    passages: tuple[Passage, ...]
    allowed: Mapping[str, np.ndarray] | None = None


def build_corpus(dataset: Dataset, questions: Sequence[Question], policy: str) -> Corpus:
    """Chooses the passages to search.

    Args:
        dataset: Questions and passages.
        questions: The selected questions; what `selected_questions` and `per_question` look at.
        policy: One of `POLICIES`:
            ``ircot_full``: every passage of the dataset, that is all contexts of train, dev and
            test for a converted benchmark and the whole ``corpus.jsonl`` of any other folder;
            ``selected_questions``: the union of the contexts of ``questions``;
            ``supporting_only``: gold passages of all questions of the dataset outside ``test``;
            ``per_question``: each of ``questions`` searches its own context and nothing else.

    Raises:
        UserError: The policy is unknown, or needs a field that a question does not have.
    """
    if policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise UserError(f"config.data.corpus={policy!r} is not a corpus policy; known: {known}.")
    return POLICIES[policy](dataset, questions)


def _ircot_full(dataset: Dataset, questions: Sequence[Question]) -> Corpus:
    del questions
    return Corpus(WHOLE, tuple(dataset.corpus.values()))


def _selected_questions(dataset: Dataset, questions: Sequence[Question]) -> Corpus:
    ids = (pid for q in questions for pid in _ids(dataset, q, "context", "selected_questions"))
    return Corpus("selected_questions", _passages(dataset, ids))


def _supporting_only(dataset: Dataset, questions: Sequence[Question]) -> Corpus:
    del questions
    annotated = (q for q in dataset.questions if q.split != "test")
    ids = (pid for q in annotated for pid in _ids(dataset, q, "supporting", "supporting_only"))
    return Corpus("supporting_only", _passages(dataset, ids))


def _per_question(dataset: Dataset, questions: Sequence[Question]) -> Corpus:
    contexts = {q.id: _ids(dataset, q, "context", "per_question") for q in questions}
    passages = _passages(dataset, (pid for ids in contexts.values() for pid in ids))
    rows = {passage.id: row for row, passage in enumerate(passages)}
    allowed = {
        question_id: np.array([rows[pid] for pid in ids], np.int32)
        for question_id, ids in contexts.items()
    }
    return Corpus("per_question", passages, allowed)


POLICIES: Mapping[str, Callable[[Dataset, Sequence[Question]], Corpus]] = {
    WHOLE: _ircot_full,
    "selected_questions": _selected_questions,
    "supporting_only": _supporting_only,
    "per_question": _per_question,
}


def _passages(dataset: Dataset, ids: Iterable[str]) -> tuple[Passage, ...]:
    """The passages of ``ids``, each once, in the order of their first mention."""
    return tuple(dataset.corpus[passage_id] for passage_id in dict.fromkeys(ids))


def _ids(dataset: Dataset, question: Question, field: str, policy: str) -> tuple[str, ...]:
    ids = getattr(question, field)
    if ids is None:
        raise UserError(
            f"corpus policy {policy!r} needs '{field}', which question {question.id!r} of "
            f"{dataset.name} (questions.jsonl) does not have."
        )
    return ids
