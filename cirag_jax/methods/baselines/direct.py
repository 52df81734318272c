"""Direct: the reader answers without retrieval."""

import dataclasses

from cirag_jax.methods.common import short_answers as prompts
from cirag_jax.methods.registry import Method
from cirag_jax.runtime.requests import Generate, Generated, Needs, Program
from cirag_jax.types import Attempt, Prediction, Question


@dataclasses.dataclass(frozen=True)
class DirectConfig:
    """Direct has no settings."""

    needs = Needs(roles=("reader",), corpus=False)


def direct(question: Question, config: DirectConfig) -> Program[Prediction]:
    """Answers a question from the reader's own knowledge."""
    response: Generated = yield Generate(prompts.reading_messages(question.question, ()), "reader")
    answer = prompts.parse_short_answer(prompts.CLOSED_BOOK.read(response.text))
    return Prediction(
        answer,
        "default",
        attempts=(Attempt("default", (), response.text, answer, bool(answer)),),
        parse_errors={} if answer else {"answer_empty": 1},
    )


METHOD = Method(direct, DirectConfig, lambda _: prompts.reading_messages("", ()))
