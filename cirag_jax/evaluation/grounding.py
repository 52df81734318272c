"""Faithfulness and relevancy of answers, judged by a language model (after RAGAS).

Both scores come from Es et al. (2024), section 3, and need no gold answer. The wording of the
prompts is ours. Answers and evidence are untrusted text, so they appear as JSON strings.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

from cirag_jax.evaluation.judge_prompts import MAX_CHARS, quoted
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.prompt_parts import object_schema
from cirag_jax.methods.common.tolerant_json import find_json
from cirag_jax.runtime.requests import Generate, Generated, Program

FAITHFULNESS, RELEVANCY = "faithfulness", "relevancy"
NUM_QUESTIONS = 3  # RAGAS generates three questions from an answer
MAX_STATEMENTS = 30  # further statements of an answer are ignored
MAX_TOKENS = 1024  # maximum new tokens of a list of statements, verdicts or questions
ROLE = "judge"

STATEMENTS = Prompt(
    "judge.statements",
    labels={"question": "Question:", "answer": "Answer:"},
    keys=("statements",),
)
SUPPORT = Prompt(
    "judge.support",
    labels={"evidence": "Evidence:", "statements": "Statements:"},
    keys=("supported",),
)
QUESTIONS = Prompt(
    "judge.questions", labels={"answer": "Answer:"}, keys=("questions", "noncommittal")
)
# Rubric -> its prompts.
RUBRICS: Mapping[str, tuple[Prompt, ...]] = {
    FAITHFULNESS: (STATEMENTS, SUPPORT),
    RELEVANCY: (QUESTIONS,),
}

_STATEMENTS_TASK = (
    "You are given a question and an answer to it. Break the answer into simple statements. Each "
    "states one fact in a full sentence and can be understood without the others: write names "
    "instead of pronouns, and for a short answer, include what the question asks. Add nothing that "
    'the answer does not say. Reply with {"statements": ["...", "..."]} and nothing else.'
)
_SUPPORT_TASK = (
    "You are given evidence and a list of statements. Decide for each statement whether it follows "
    "directly from the evidence, without other knowledge. Reply with one value for each statement, "
    'in their order, as in {"supported": [true, false]}, and nothing else.'
)
_QUESTIONS_TASK = (
    f"You are given an answer. Write {NUM_QUESTIONS} different questions that it answers. Also say "
    'whether the answer is noncommittal: evasive or vague, such as "I do not know". Reply with '
    '{"questions": ["...", "...", "..."], "noncommittal": false} and nothing else.'
)


class Verdict(TypedDict):
    """A judge's verdict on an answer.

    Attributes:
      right: whether the answer is right, or its score; None without a readable output.
      parse_errors: the kinds of malformed outputs.
      questions: `RELEVANCY`: the generated questions, if the answer is not noncommittal. The score
        is the mean cosine of each with the question.
    """

    right: bool | float | None
    parse_errors: list[str]
    questions: NotRequired[list[str]]


def faithfulness(
    question: str, answer: str, evidence: Sequence[str], constrained: bool, retries: int
) -> Program[Verdict]:
    """Returns the share of the answer's statements that the evidence supports.

    Requests the statements, and then one verdict for each.
    """
    request = statement_messages(question, answer)
    schema = object_schema({"statements": _list_of("string")})
    statements, errors = yield from _ask(
        STATEMENTS, request, schema, parse_statements, constrained, retries
    )
    if statements is None:
        return {"right": None, "parse_errors": errors}
    count = len(statements)
    schema = object_schema({"supported": _list_of("boolean", count)})
    supported, more_errors = yield from _ask(
        SUPPORT,
        support_messages(evidence, statements),
        schema,
        lambda text, truncated: parse_support(text, count, truncated),
        constrained,
        retries,
    )
    share = None if supported is None else sum(supported) / count
    return {"right": share, "parse_errors": errors + more_errors}


def relevancy(answer: str, constrained: bool, retries: int) -> Program[Verdict]:
    """Requests questions that the answer answers; the score is 0 if it is noncommittal."""
    questions = _list_of("string", NUM_QUESTIONS)
    schema = object_schema({"questions": questions, "noncommittal": {"type": "boolean"}})
    reply, errors = yield from _ask(
        QUESTIONS, question_messages(answer), schema, parse_questions, constrained, retries
    )
    if reply is None:
        return {"right": None, "parse_errors": errors}
    if reply.noncommittal:
        return {"right": 0.0, "parse_errors": errors}
    return {"right": None, "parse_errors": errors, "questions": list(reply.questions)}


def statement_messages(question: str, answer: str) -> tuple[Message, ...]:
    """Returns the conversation that requests the statements of an answer."""
    text = f"Question: {quoted(question)}\nAnswer: {quoted(answer)}"
    return STATEMENTS.conversation(_STATEMENTS_TASK, (), Message("user", text))


def support_messages(evidence: Sequence[str], statements: Sequence[str]) -> tuple[Message, ...]:
    """Returns the conversation that requests a verdict on each statement."""
    lines = [*(f"Evidence: {quoted(text)}" for text in evidence)]
    lines.append(f"Statements: [{', '.join(map(quoted, statements))}]")
    return SUPPORT.conversation(_SUPPORT_TASK, (), Message("user", "\n".join(lines)))


def question_messages(answer: str) -> tuple[Message, ...]:
    """Returns the conversation that requests questions that an answer answers."""
    turn = Message("user", f"Answer: {quoted(answer)}")
    return QUESTIONS.conversation(_QUESTIONS_TASK, (), turn)


# ------------------------------------------------------------------------------------ the replies


class Questions(NamedTuple):
    """The generated questions, at most `NUM_QUESTIONS`."""

    questions: tuple[str, ...]
    noncommittal: bool


def parse_statements(text: str, truncated: bool) -> tuple[tuple[str, ...] | None, list[str]]:
    """Parses the statements of an answer; never raises.

    The parse errors are ``statements_`` plus an error of `find_json` or ``missing``.
    """
    parsed, errors = _object(text, "statements", "statements", truncated)
    statements = _texts(parsed.get("statements"))[:MAX_STATEMENTS]
    return (statements, errors) if statements else (None, [*errors, "statements_missing"])


def parse_support(
    text: str, count: int, truncated: bool
) -> tuple[tuple[bool, ...] | None, list[str]]:
    """Parses the verdicts on ``count`` statements; never raises.

    The parse errors are ``support_`` plus an error of `find_json`, ``missing`` or ``count``, if the
    number of verdicts is wrong, because then it is unknown which statements they are about.
    """
    parsed, errors = _object(text, "supported", "support", truncated)
    verdicts = parsed.get("supported")
    if not isinstance(verdicts, list) or not all(isinstance(item, bool) for item in verdicts):
        return None, [*errors, "support_missing"]
    if len(verdicts) != count:
        return None, [*errors, "support_count"]
    return tuple(verdicts), errors


def parse_questions(text: str, truncated: bool) -> tuple[Questions | None, list[str]]:
    """Parses generated questions; never raises.

    A noncommittal answer needs no questions. The parse errors are ``questions_`` plus an error of
    `find_json` or ``missing``.
    """
    parsed, errors = _object(text, "questions", "questions", truncated)
    questions = _texts(parsed.get("questions"))[:NUM_QUESTIONS]
    noncommittal = parsed.get("noncommittal")
    if not isinstance(noncommittal, bool) or not (questions or noncommittal):
        return None, [*errors, "questions_missing"]
    return Questions(questions, noncommittal), errors


def _object(text: str, key: str, kind: str, truncated: bool) -> tuple[dict[str, Any], list[str]]:
    parsed, problem = find_json(text, key, truncated=truncated)
    errors = [] if problem is None else [f"{kind}_{problem}"]
    return parsed if isinstance(parsed, dict) else {}, errors


def _texts(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list) else ()
    return tuple(
        item.strip()[:MAX_CHARS] for item in items if isinstance(item, str) and item.strip()
    )


# ----------------------------------------------------------------------------------- the requests

_T = TypeVar("_T")


def _ask(
    prompt: Prompt,
    messages: tuple[Message, ...],
    schema: Mapping[str, Any],
    parse: Callable[[str, bool], tuple[_T | None, list[str]]],
    constrained: bool,
    retries: int,
) -> Program[tuple[_T | None, list[str]]]:
    """Requests a reply until it is readable, up to ``retries`` times again."""
    turns, errors, value = messages, list[str](), None
    for _ in range(retries + 1):
        response: Generated = yield Generate(
            turns,
            ROLE,
            max_tokens=MAX_TOKENS,
            json_schema=prompt.schema(schema) if constrained else None,
        )
        value, problems = parse(prompt.read(response.text), response.finish_reason == "length")
        errors += problems
        if value is not None:
            break
        reply = Message("assistant", response.text[:MAX_CHARS])
        again = "Reply again, only with JSON in the format of the instruction."
        turns = (*messages, reply, Message("user", again))
    return value, errors


def _list_of(item: str, count: int | None = None) -> dict[str, Any]:
    """Returns the schema of a list of ``count`` items, or of at least one."""
    bounds = {"minItems": count or 1, "maxItems": count or MAX_STATEMENTS}
    return {"type": "array", "items": {"type": item}, **bounds}
