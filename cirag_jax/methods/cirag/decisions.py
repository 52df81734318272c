"""Parsed decisions of an integrator, independent of the prompt format."""

import dataclasses
from typing import Any

# All kinds of malformed output that the parsers of decisions report.
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
    """A parsed integration response y_t = (r_t, T~_t, a_{t+1}).

    Attributes:
      thought: the reasoning r_t, or an empty string.
      kept: the chosen candidates T~_t (triples or sentences), without repeats.
      next_query: the next query a_{t+1}, or None to end the rounds; valid only if ``has_question``.
      has_question: whether the response has a question section.
      parse_errors: kinds of malformed output, one entry per occurrence.
      response: the unparsed text.
    """

    thought: str
    kept: tuple[Any, ...]
    next_query: str | None = None
    has_question: bool = True
    parse_errors: tuple[str, ...] = ()
    response: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A section of a response whose headers are prefilled.

    Attributes:
      opening: text before the model's part, such as the header.
      stop: strings that end the model's part.
      closing: text after the model's part.
      max_tokens: maximum number of new tokens in the model's part.
    """

    opening: str
    stop: tuple[str, ...]
    closing: str
    max_tokens: int
