"""What an integrator's response says, whatever the format it was written in."""

import dataclasses
from typing import Any

# Every kind of malformed output that a parser of decisions names.
PARSE_ERRORS = frozenset(
    {
        *("empty", "truncated", "no_header", "no_facts", "no_question", "repeated_header"),
        *("facts_no_json", "facts_broken_json", "facts_loose_json", "facts_truncated"),
        *("facts_wrong_shape", "too_many_facts", "not_a_triple", "not_a_candidate"),
        "question_without_header",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What an integration response says.

    Attributes:
      thought: its reasoning; empty where it has none.
      kept: the candidates it names, in its order, each once (triples, or sentences).
      next_query: what to retrieve for, or None to end; meaningless unless ``has_question``.
      has_question: whether there is a question section at all.
      parse_errors: kinds of malformed output met, one entry each time.
      response: the text as it came.
    """

    thought: str
    kept: tuple[Any, ...]
    next_query: str | None
    has_question: bool
    parse_errors: tuple[str, ...]
    response: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A section of the response, for a model that is led through it.

    Attributes:
      opening: written for the model, its header first.
      stop: ends the model's part.
      closing: written after it.
      max_tokens: most tokens of the model's part.
    """

    opening: str
    stop: tuple[str, ...]
    closing: str
    max_tokens: int
