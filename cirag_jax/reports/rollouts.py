"""A page that shows the rollouts of a training step by reinforcement, question by question."""

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cirag_jax.io import replacing
from cirag_jax.reports import pages
from cirag_jax.runtime.records import Generation
from cirag_jax.types import Passage, Prediction, Question

PAGE = "rollouts.html"
# Upper limits of the log-probabilities of the classes p3, p2 and p1; p0 is more probable.
_LIMITS = (-2.3, -0.7, -0.1)


class ShownRollout(NamedTuple):
    """A rollout on the page.

    Attributes:
      question: the question.
      prediction: what the method answered; None if it failed.
      values: rewards and costs by name.
      turns: the texts of the trained role, with their tokens.
      error: the reason of a failure.
    """

    question: Question
    prediction: Prediction | None
    values: Mapping[str, float]
    turns: Sequence[Generation]
    error: str | None = None


def write_page(
    path: pathlib.Path,
    title: str,
    rollouts: Sequence[ShownRollout],
    passages: Mapping[str, Passage],
) -> None:
    """Writes the page; ``passages`` are those of the rollouts, by id."""
    by_question: dict[str, list[ShownRollout]] = collections.defaultdict(list)
    for rollout in rollouts:
        by_question[rollout.question.id].append(rollout)
    questions = "\n".join(_question(group, passages) for group in by_question.values())
    style = ["page.css", "results.css", "rollouts.css"]
    before, after = pages.template("rollouts.html", title, style, questions=questions)
    with replacing(path) as temporary:
        temporary.write_text(before + after, "utf-8", newline="\n")


def _question(rollouts: Sequence[ShownRollout], passages: Mapping[str, Passage]) -> str:
    question = rollouts[0].question
    answers = " or ".join(question.answers) or "no gold answer"
    columns = "\n".join(_rollout(rollout, passages) for rollout in rollouts)
    return (
        f'<section><h2 class="text">{pages.text(question.question)}</h2>\n'
        f"<p>{pages.text(f'{question.id}: {answers}')}</p>\n"
        f'<div class="rollouts">{columns}</div></section>'
    )


def _rollout(rollout: ShownRollout, passages: Mapping[str, Passage]) -> str:
    values = "".join(
        f"<dt>{pages.text(name)}</dt><dd>{value:g}</dd>" for name, value in rollout.values.items()
    )
    answer, steps = f"failed: {rollout.error}", []
    if rollout.prediction is not None:
        answer = rollout.prediction.answer or "(no answer)"
        steps = [
            f'<li><span class="text">{pages.text(step.query)}</span> '
            f'<span class="soft">{pages.text(_titles(step.passages, passages))}</span></li>'
            for step in rollout.prediction.steps
        ]
    searches = f"<summary>{len(steps)} searches</summary><ol>{''.join(steps)}</ol>"
    turns = "".join(map(_turn, rollout.turns))
    return (
        f'<div class="rollout"><strong class="text">{pages.text(answer)}</strong>'
        f'<dl>{values}</dl>{turns}<details class="turn">{searches}</details></div>'
    )


def _titles(ids: Sequence[str], passages: Mapping[str, Passage]) -> str:
    return " · ".join(passages[name].title if name in passages else name for name in ids)


def _turn(turn: Generation) -> str:
    prompt = "\n\n".join(message.text for message in turn.request.messages)
    tokens = "".join(
        f'<span class="p{_darkness(token.logprob)}">{pages.text(token.text)}</span>'
        for token in turn.response.tokens or ()
    )
    return (
        f'<div class="turn"><details><summary>prompt</summary>'
        f'<div class="text">{pages.text(prompt)}</div></details>'
        f'<div class="text">{tokens or pages.text(turn.response.text)}</div></div>'
    )


def _darkness(logprob: float | None) -> int:
    """Returns the number of the token's class, 3 for the least probable tokens."""
    return sum((logprob or 0.0) < limit for limit in _LIMITS)
