"""A judge of answers: the two papers' questions, and what is read of a verdict.

The fields are the papers', the words ours: DualRAG asks whether the prediction implies the answer
(its Figure 8), GRADE whether the response is correct (A.9.8). Answers are hostile text: they are
shown as JSON strings, so that none can pass for another line of the prompt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.llm.types import Message
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.methods.common.verdicts import leading_word, without_thoughts

MAX_CHARS = 4000  # of one answer that are shown


class Rubric(NamedTuple):
    """What a judge is asked.

    Attributes:
      verdict: the field of its reply, true or false.
      task: the instruction.
      given, gold: how the answer that is judged, and the right one, are called.
    """

    verdict: str
    task: str
    given: str
    gold: str


RUBRICS: Mapping[str, Rubric] = {
    "dualrag": Rubric(
        "implies",
        "You compare a predicted answer with a reference answer to the same question. Does the "
        "prediction imply the reference: must whoever believes the one accept the other? Wording "
        "and detail may differ. The reference can be one of several ways to answer; a prediction "
        "that has it in it, or that means nearly the same, implies it. A prediction that answers "
        "nothing implies nothing.",
        "Prediction",
        "Reference",
    ),
    "grade": Rubric(
        "correct",
        "You mark a response to a question. The right answer is given beside it. Decide whether "
        "the response is correct.",
        "Response",
        "Right answer",
    ),
}


def judge_messages(
    question: str, answer: str, golds: Sequence[str], rubric: str
) -> tuple[Message, ...]:
    """The conversation about one answer.

    Args:
      question: its text.
      answer: what is judged.
      golds: accepted answers, the main one first; at least one.
      rubric: a key of `RUBRICS`.
    """
    asked = RUBRICS[rubric]
    reply = " or ".join(json.dumps({asked.verdict: value}) for value in (True, False))
    gold = " or ".join(map(_quoted, golds))
    turn = f"Question: {_quoted(question)}\n{asked.given}: {_quoted(answer)}\n{asked.gold}: {gold}"
    return Message("system", f"{asked.task} Reply with {reply} and nothing else."), Message(
        "user", turn
    )


def ask_again(messages: Sequence[Message], reply: str, rubric: str) -> tuple[Message, ...]:
    """The conversation that asks for a verdict that was not given."""
    reminder = f'Say it as JSON: {{"{RUBRICS[rubric].verdict}": true}} or false instead of true.'
    return (*messages, Message("assistant", reply[:MAX_CHARS]), Message("user", reminder))


def verdict_schema(rubric: str) -> dict[str, Any]:
    """JSON schema of a reply."""
    verdict = RUBRICS[rubric].verdict
    return {
        "type": "object",
        "properties": {verdict: {"type": "boolean"}},
        "required": [verdict],
        "additionalProperties": False,
    }


def _quoted(text: str) -> str:
    return json.dumps(" ".join(text.split())[:MAX_CHARS], ensure_ascii=False)


class Verdict(NamedTuple):
    """What a judge said; None: it did not say. ``parse_errors``: kinds, one entry each time."""

    right: bool | None
    parse_errors: tuple[str, ...]


_WORDS = {"true": True, "yes": True, "false": False, "no": False}


def parse_verdict(text: str, rubric: str, *, truncated: bool = False) -> Verdict:
    """Reads a reply; never fails.

    Without the JSON asked for, a reply counts that is, or begins with, yes, true, no or false, and
    holds no word of the other kind. Problems: those of `find_json`, ``verdict_no_boolean``,
    ``verdict_missing``.
    """
    verdict = RUBRICS[rubric].verdict
    text = without_thoughts(text)
    found, problem = find_json(text, verdict, truncated=truncated)
    problems = [f"verdict_{problem}"] if problem is not None else []
    said = found.get(verdict) if isinstance(found, dict) else text
    if isinstance(said, bool):
        return Verdict(said, tuple(problems))
    if not problems:
        problems.append("verdict_no_boolean")
    said = str(said)[:MAX_CHARS]
    values = {_WORDS[word] for word in re.findall(r"[a-z]+", said.casefold()) if word in _WORDS}
    right = _WORDS.get(leading_word(said))
    if right is None or len(values) > 1:
        return Verdict(None, (*problems, "verdict_missing"))
    return Verdict(right, tuple(problems))
