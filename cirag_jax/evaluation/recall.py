"""Recall@K, recall by step, and scores of retrieved sets."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

# Gold item -> sets of substitutes; it counts as retrieved if an item of each set is retrieved.
Substitutes = Mapping[Hashable, Sequence[Collection[Hashable]]]

NO_SUBSTITUTES: Substitutes = MappingProxyType({})


def recall_at(
    ranked: Sequence[Hashable],
    gold: Collection[Hashable],
    k: int,
    substitutes: Substitutes = NO_SUBSTITUTES,
) -> float:
    """Returns |top-K and gold| / |gold|; 0 for an empty ranking."""
    relevant, top = set(gold), set(ranked[:k])
    if not relevant:
        raise ValueError("recall needs at least one gold item")
    replaced = [
        item
        for item in (relevant - top) & substitutes.keys()
        if not any(top.isdisjoint(others) for others in substitutes[item])
    ]
    return (len(relevant & top) + len(replaced)) / len(relevant)


class SetScores(NamedTuple):
    """Scores of a set of passages against the gold set, for one question or as means."""

    read: float  # Size of the set.
    recall: float
    exact: float  # 1 if both sets are equal.
    f1: float
    precision: float


def set_scores(
    retrieved: Collection[Hashable],
    gold: Collection[Hashable],
    substitutes: Substitutes = NO_SUBSTITUTES,
) -> SetScores:
    """Scores the set ``retrieved`` against the set ``gold``; neither may have duplicates."""
    recall = recall_at(list(retrieved), gold, len(retrieved), substitutes)
    # One passage may replace several gold ones.
    precision = min(recall * len(gold) / len(retrieved), 1.0) if retrieved else 0.0
    f1 = 2 * precision * recall / (precision + recall) if recall else 0.0
    return SetScores(len(retrieved), recall, float(recall == precision == 1), f1, precision)


def mean_scores(scores: Sequence[SetScores]) -> SetScores:
    """Returns the mean of each score."""
    return SetScores(*(sum(values) / len(scores) for values in zip(*scores, strict=True)))


def recall_by_step(
    steps: Sequence[Collection[Hashable]],
    gold: Collection[Hashable],
    count: int,
    substitutes: Substitutes = NO_SUBSTITUTES,
) -> list[float]:
    """Returns the recall of all items retrieved in steps 1 to i, for i from 1 to ``count``.

    The recall is constant after the last step.
    """
    retrieved: list[Hashable] = []
    recalls = []
    for step in [*steps, *[()] * count][:count]:
        retrieved += step
        recalls.append(recall_at(retrieved, gold, len(retrieved), substitutes))
    return recalls
