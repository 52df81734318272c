"""Prompts for a judge of answers, and the parser of its verdicts.

The prompts reword the questions of two papers: does the prediction imply the answer (DualRAG,
Figure 8), and is the response correct (GRADE, A.9.8)? Answers are untrusted text. They
appear as JSON strings, so they cannot imitate other lines of the prompt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.prompt_parts import object_schema
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.methods.common.verdicts import leading_word

MAX_CHARS = 4000  # longer answers are cut


class Rubric(NamedTuple):
    """A judge's task.

    Attributes:
      verdict: name of the boolean field in the reply.
      task: the instruction.
      prediction, gold: labels of the judged answer and of the right answer.
    """

    verdict: str
    task: str
    prediction: str
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


PROMPTS = {
    name: Prompt(
        f"judge.{name}",
        labels={
            "question": "Question:",
            "prediction": f"{rubric.prediction}:",
            "reference": f"{rubric.gold}:",
        },
        keys=(rubric.verdict,),
    )
    for name, rubric in RUBRICS.items()
}


def judge_messages(
    question: str, answer: str, golds: Sequence[str], rubric: str
) -> tuple[Message, ...]:
    """Returns the conversation about one answer.

    ``golds`` are the accepted answers, at least one. ``rubric`` is a key of `RUBRICS`.
    """
    verdict, task, prediction_label, gold_label = RUBRICS[rubric]
    reply = " or ".join(json.dumps({verdict: value}) for value in (True, False))
    gold = " or ".join(map(quoted, golds))
    answers = f"{prediction_label}: {quoted(answer)}\n{gold_label}: {gold}"
    turn = Message("user", f"Question: {quoted(question)}\n{answers}")
    return PROMPTS[rubric].conversation(f"{task} Reply with {reply} and nothing else.", (), turn)


def ask_again(messages: Sequence[Message], reply: str, rubric: str) -> tuple[Message, ...]:
    """Returns the conversation that asks again after a reply without a verdict."""
    reminder = f'Say it as JSON: {{"{RUBRICS[rubric].verdict}": true}} or false instead of true.'
    return (
        *messages,
        Message("assistant", reply[:MAX_CHARS]),
        Message("user", PROMPTS[rubric].write(reminder)),
    )


def verdict_schema(rubric: str) -> dict[str, Any]:
    """Returns the JSON schema of a reply."""
    schema = object_schema({RUBRICS[rubric].verdict: {"type": "boolean"}})
    return dict(PROMPTS[rubric].schema(schema))


def quoted(text: str) -> str:
    """Returns a text on one line as a JSON string, cut after `MAX_CHARS`."""
    return json.dumps(one_line(text)[:MAX_CHARS], ensure_ascii=False)


class Verdict(NamedTuple):
    """A parsed verdict; ``right`` is None if the reply lacks it."""

    right: bool | None
    parse_errors: tuple[str, ...]


# "No" before a noun, as in "Yes, there is no doubt".
_NO_NOUN = re.compile(
    r"(?<!\bor )(?<!\band )\bno (?!(?:it|this|that|they|the|not|i|he|she)\b)(?=[a-z])"
)
_WORDS = {"true": True, "yes": True, "false": False, "no": False}


def parse_verdict(text: str, rubric: str, *, truncated: bool = False) -> Verdict:
    """Parses a judge's reply; never raises.

    Also accepts a reply without JSON that starts with yes, true, no or false and contains no word
    of the opposite meaning. "No" before a noun ("no doubt") is no verdict. The parse errors are
    ``verdict_`` plus an error of `find_json`, ``verdict_no_boolean`` and ``verdict_missing``.
    """
    verdict, text = RUBRICS[rubric].verdict, PROMPTS[rubric].read(text)
    parsed, problem = find_json(text, verdict, truncated=truncated)
    problems = [f"verdict_{problem}"] if problem is not None else []
    value = parsed.get(verdict) if isinstance(parsed, dict) else text
    if isinstance(value, bool):
        return Verdict(value, tuple(problems))
    if not problems:
        problems.append("verdict_no_boolean")
    reply = str(value)[:MAX_CHARS]
    words = re.findall(r"[a-z]+", _NO_NOUN.sub("", reply.casefold()))
    values = {_WORDS[word] for word in words if word in _WORDS}
    right = _WORDS.get(leading_word(reply))
    if right is None or len(values) > 1:
        return Verdict(None, (*problems, "verdict_missing"))
    return Verdict(right, tuple(problems))
