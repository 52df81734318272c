"""What answers took of language models: calls and tokens by role and by stage."""

from collections.abc import Iterable, Mapping
from typing import Any

from cirag_jax.runtime.records import Record, Spent

ANSWERING = "reader"  # The role that answers.


def stage_of(role: str) -> str:
    """``extraction`` of triples, ``answering``, or ``retrieval``: all that decides what is read."""
    return {"extractor": "extraction", ANSWERING: "answering"}.get(role, "retrieval")


def by_role(records: Iterable[Record]) -> dict[str, Spent]:
    """The sum over ``records`` for every role that was asked, in the order of their first calls."""
    found: dict[str, Spent] = {}
    for record in records:
        for role, spent in record.roles.items():
            found[role] = found.get(role, Spent()) + spent
    return found


def described(roles: Mapping[str, Spent], questions: int = 1) -> dict[str, Any]:
    """``roles`` and ``stages``: of each ``calls`` and prompt, cached and generated tokens.

    Args:
      roles: of `by_role`.
      questions: the figures are means over so many; 1: sums.
    """
    stages: dict[str, Spent] = {}
    for role, spent in roles.items():
        stages[stage_of(role)] = stages.get(stage_of(role), Spent()) + spent
    return {
        "roles": {
            role: {"stage": stage_of(role), **_row(spent, questions)}
            for role, spent in roles.items()
        },
        "stages": {stage: _row(spent, questions) for stage, spent in stages.items()},
    }


def _row(spent: Spent, questions: int) -> dict[str, float]:
    counts: dict[str, float] = {
        "calls": spent.calls,
        "prompt_tokens": spent.usage.prompt_tokens,
        "cached_tokens": spent.usage.cached_tokens,
        "generated_tokens": spent.usage.generated_tokens,
    }
    return counts if questions == 1 else {k: n / questions for k, n in counts.items()}
