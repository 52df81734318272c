"""How far two judges agree about the same answers."""

from collections.abc import Sequence
from typing import Any


def agreement(first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """Share of equal verdicts, and Cohen's kappa (1960), equation 1: (p_o - p_e) / (1 - p_e).

    p_e is how often they would agree if each said "right" as often as it does, by chance.

    Args:
      first: verdicts of one judge.
      second: of the other, about the same answers.

    Returns:
      ``num_answers``; ``both_right``, ``first_alone``, ``second_alone`` and ``both_wrong``, their
      numbers; ``agree`` in [0, 1] and ``kappa`` in [-1, 1], each None with its ``reason`` where it
      cannot be said.
    """
    pairs = list(zip(first, second, strict=True))
    table = {
        "both_right": pairs.count((True, True)),
        "first_alone": pairs.count((True, False)),
        "second_alone": pairs.count((False, True)),
        "both_wrong": pairs.count((False, False)),
    }
    count = len(pairs)
    found = {"num_answers": count, **table}
    if not count:
        return {**found, "agree": None, "kappa": None, "reason": "no answer has both verdicts"}
    observed = (table["both_right"] + table["both_wrong"]) / count
    right = sum(first) / count, sum(second) / count
    expected = right[0] * right[1] + (1 - right[0]) * (1 - right[1])
    if expected == 1:
        reason = "both judges always say the same"
        return {**found, "agree": observed, "kappa": None, "reason": reason}
    return {**found, "agree": observed, "kappa": (observed - expected) / (1 - expected)}
