"""Rewards of sampled runs: small named functions of what a run answered and what it cost."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cirag_jax.errors import UserError, check_choice
from cirag_jax.evaluation import answers
from cirag_jax.types import Prediction, Question


class Rollout(NamedTuple):
    """A run of a method on a question.

    Attributes:
      question: the question with its annotations.
      prediction: the result.
      tokens: number of tokens that the trained role generated.
      searches: number of searches.
      profile: the answer scorer (`evaluation.answers`).
    """

    question: Question
    prediction: Prediction
    tokens: int
    searches: int
    profile: str = answers.DEFAULT


def em(rollout: Rollout) -> float:
    """Returns whether the answer is exactly a gold answer, 0 or 1."""
    return answers.exact_match(rollout.prediction.answer, *_golds(rollout))


def f1(rollout: Rollout) -> float:
    """Returns the F1 of the answer's words, from 0 to 1."""
    return answers.f1(rollout.prediction.answer, *_golds(rollout))


def recall(rollout: Rollout) -> float:
    """Returns the share of the gold passages that were retrieved."""
    gold = set(rollout.question.supporting or ())
    return len(gold & set(rollout.prediction.passages)) / max(len(gold), 1)


def format(rollout: Rollout) -> float:
    """Returns whether all outputs were well-formed, 0 or 1."""
    return float(not any(rollout.prediction.parse_errors.values()))


def length(rollout: Rollout) -> float:
    """Returns minus the number of generated tokens, in hundreds."""
    return -rollout.tokens / 100.0


def searches(rollout: Rollout) -> float:
    """Returns minus the number of searches."""
    return -float(rollout.searches)


def _golds(rollout: Rollout) -> tuple[Sequence[str], str]:
    return answers.golds_of(rollout.question, rollout.profile), rollout.profile


REWARDS: Mapping[str, Callable[[Rollout], float]] = {
    function.__name__: function for function in (em, f1, recall, format, length, searches)
}
# The annotation of a question that a reward needs.
_NEEDS = {"em": "answers", "f1": "answers", "recall": "supporting"}


def check(weights: Mapping[str, float], questions: Sequence[Question]) -> None:
    """Raises `UserError` for unknown rewards, and for questions without a needed annotation."""
    if not any(weights.values()):
        raise UserError("config.rewards: at least one reward must have a weight other than 0.")
    for name, weight in weights.items():
        check_choice("config.rewards", name, REWARDS)
        field = _NEEDS.get(name)
        if not weight or field is None:
            continue
        lacking = [q.id for q in questions if not getattr(q, field)]
        if lacking:
            raise UserError(
                f"config.rewards.{name} needs the field {field} of every question, which "
                f"{len(lacking)} of {len(questions)} lack (first: {lacking[0]})."
            )


def score(rollout: Rollout, weights: Mapping[str, float]) -> dict[str, float]:
    """Returns every reward with a weight, and ``reward``, their weighted sum."""
    values = {name: REWARDS[name](rollout) for name, weight in weights.items() if weight}
    return {**values, "reward": sum(weights[name] * value for name, value in values.items())}


def all_of(rollout: Rollout) -> dict[str, float]:
    """Returns every reward whose annotation the question has."""
    return {
        name: function(rollout)
        for name, function in REWARDS.items()
        if name not in _NEEDS or getattr(rollout.question, _NEEDS[name])
    }
