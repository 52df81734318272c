"""Agreement between two judges of the same answers."""

from collections.abc import Sequence
from typing import Any


def agreement(first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """Returns the share of equal verdicts, and Cohen's kappa (p_o - p_e) / (1 - p_e).

    p_o is the observed agreement. p_e is the chance agreement of two independent judges that answer
    "right" at the rates of the given judges (Cohen, 1960, equation 1).

    Returns:
      The counts ``num_answers``, ``both_right``, ``first_alone``, ``second_alone`` and
      ``both_wrong``; ``agree`` in [0, 1] and ``kappa`` in [-1, 1]. If one of these is undefined, it
      is None and ``reason`` explains why.
    """
    pairs = list(zip(first, second, strict=True))
    table = {
        "both_right": pairs.count((True, True)),
        "first_alone": pairs.count((True, False)),
        "second_alone": pairs.count((False, True)),
        "both_wrong": pairs.count((False, False)),
    }
    count = len(pairs)
    counts = {"num_answers": count, **table}
    if not count:
        return {**counts, "agree": None, "kappa": None, "reason": "no answer has both verdicts"}
    observed = (table["both_right"] + table["both_wrong"]) / count
    right = sum(first) / count, sum(second) / count
    expected = right[0] * right[1] + (1 - right[0]) * (1 - right[1])
    if expected == 1:
        reason = "both judges always give the same verdict"
        return {**counts, "agree": observed, "kappa": None, "reason": reason}
    return {**counts, "agree": observed, "kappa": (observed - expected) / (1 - expected)}
