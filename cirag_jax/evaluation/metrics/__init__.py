"""The metrics of a run. A module of this folder is a family of them, by being here.

It has ``measure``, a `Family`, and ``TITLES``: how tables call each of its scores, by the part of
the name before ``@``; and where it looks at what was retrieved, ``NEEDS_CORPUS = True``. A config
chooses families by the modules' names.
"""

import importlib
import pathlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.evaluation.evidence import GRANULARITIES
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.scoring import NAMES, Answered, Scoring

_FAMILIES: Mapping[str, Any] = {
    found.name: importlib.import_module(f"{__package__}.{found.name}")
    for found in pkgutil.iter_modules([str(pathlib.Path(__file__).parent)])
}
_TITLES = {key: text for family in _FAMILIES.values() for key, text in family.TITLES.items()}


def check(names: Sequence[str]) -> None:
    """Raises `UserError` where ``config.metrics`` names what is no metric."""
    unknown = [name for name in names if name not in _FAMILIES]
    if unknown or not names:
        known = ", ".join(_FAMILIES)
        raise UserError(f"config.metrics={tuple(names)!r} must be some of {known}.")


def measure(
    answered: Sequence[Answered],
    scoring: Scoring,
    names: Sequence[str] = NAMES,
    *,
    corpus: bool = True,
) -> dict[str, Ratio]:
    """All scores of some families.

    Args:
      answered: a run's questions.
      scoring: how they are scored.
      names: the families.
      corpus: whether the method retrieves; without, what is retrieved is not scored.

    Returns:
      By name; a score of no question at all has the value NaN.
    """
    found: dict[str, Ratio] = {}
    for name in names:
        if corpus or not getattr(_FAMILIES[name], "NEEDS_CORPUS", False):
            found |= _FAMILIES[name].measure(answered, scoring)
    return found


def reason(name: str, answered: Sequence[Answered], *, corpus: bool = True) -> str:
    """Why a score is of no question; arguments as of `measure`."""
    kind = name.partition("@")[0]
    if not corpus and any(
        kind in family.TITLES and getattr(family, "NEEDS_CORPUS", False)
        for family in _FAMILIES.values()
    ):
        return "retrieves nothing"
    for granularity, own in _FAMILIES["recall"].SCORES.items():
        if kind == own:
            ranked_of = GRANULARITIES[granularity][0]
            ranks_any = any(ranked_of(found) for _, found in answered if found)
            return f"no gold {granularity}s" if ranks_any else f"ranks no {granularity}s"
    if not any(question.answers for question, _ in answered):
        return "no gold answer"
    if kind in _FAMILIES["hits"].TITLES:
        return "gold passages are known"
    if kind in _FAMILIES["by_granularity"].TITLES:
        return "no question was answered there"
    return "applies to no question"


def title(name: str) -> str:
    """How a table calls a score: ``recall@5`` is ``R@5``."""
    kind, at, k = name.partition("@")
    return f"{_TITLES[kind]}{at}{k}"
