"""Language-model calls and tokens, by role and by stage."""

from collections.abc import Iterable, Mapping
from typing import Any

from cirag_jax.runtime.records import ModelUsage, Record


def stage_of(role: str) -> str:
    """Returns a role's stage: ``extraction``, ``answering``, or ``retrieval`` for all others."""
    return {"extractor": "extraction", "reader": "answering"}.get(role, "retrieval")


def spent_by_role(records: Iterable[Record]) -> dict[str, ModelUsage]:
    """Returns each role's total usage over ``records``, in the order of first calls."""
    totals: dict[str, ModelUsage] = {}
    for record in records:
        for role, spent in record.roles.items():
            totals[role] = totals.get(role, ModelUsage()) + spent
    return totals


def summarize(roles: Mapping[str, ModelUsage], questions: int = 1) -> dict[str, Any]:
    """Returns calls and prompt, cached and generated tokens for ``roles`` and ``stages``.

    With more than one question, the numbers are means over questions.
    """
    stages: dict[str, ModelUsage] = {}
    for role, spent in roles.items():
        stages[stage_of(role)] = stages.get(stage_of(role), ModelUsage()) + spent
    return {
        "roles": {
            role: {"stage": stage_of(role), **_row(spent, questions)}
            for role, spent in roles.items()
        },
        "stages": {stage: _row(spent, questions) for stage, spent in stages.items()},
    }


def _row(spent: ModelUsage, questions: int) -> dict[str, float]:
    counts: dict[str, float] = {
        "calls": spent.calls,
        "prompt_tokens": spent.usage.prompt_tokens,
        "cached_tokens": spent.usage.cached_tokens,
        "generated_tokens": spent.usage.generated_tokens,
    }
    return counts if questions == 1 else {k: n / questions for k, n in counts.items()}
