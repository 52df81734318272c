"""Recall@K, and recall of what a search has found so far."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

# Of a gold item that need not itself be found: sets, one item of each of which does as well.
Elsewhere = Mapping[Hashable, Sequence[Collection[Hashable]]]

NOWHERE: Elsewhere = MappingProxyType({})


def recall_at(
    ranked: Sequence[Hashable],
    gold: Collection[Hashable],
    k: int,
    elsewhere: Elsewhere = NOWHERE,
) -> float:
    """|top-K and gold| / |gold| (spec, section 0); an empty ranking earns 0.

    Raises:
      ValueError: no gold.
    """
    wanted, top = set(gold), set(ranked[:k])
    if not wanted:
        raise ValueError("recall needs at least one gold item")
    replaced = [
        item
        for item in (wanted - top) & elsewhere.keys()
        if not any(top.isdisjoint(others) for others in elsewhere[item])
    ]
    return (len(wanted & top) + len(replaced)) / len(wanted)


class SetScores(NamedTuple):
    """A set of passages against the gold ones, of one question or as means over several."""

    read: float  # Passages of the set.
    recall: float
    exact: float  # 1 where both sets are the same.
    f1: float


def set_scores(
    found: Collection[Hashable], gold: Collection[Hashable], elsewhere: Elsewhere = NOWHERE
) -> SetScores:
    """How well ``found`` is the set ``gold``, both without repetitions.

    Raises:
      ValueError: no gold.
    """
    recall = recall_at(list(found), gold, len(found), elsewhere)
    # One passage may hold what several gold ones do.
    precise = min(recall * len(gold) / len(found), 1.0) if found else 0.0
    f1 = 2 * precise * recall / (precise + recall) if recall else 0.0
    return SetScores(len(found), recall, float(recall == precise == 1), f1)


def mean_scores(scores: Sequence[SetScores]) -> SetScores:
    """Their means."""
    return SetScores(*(sum(values) / len(scores) for values in zip(*scores, strict=True)))


def recall_by_step(
    steps: Sequence[Collection[Hashable]],
    gold: Collection[Hashable],
    count: int,
    elsewhere: Elsewhere = NOWHERE,
) -> list[float]:
    """`recall_at` of all that the first 1, 2, ... ``count`` steps found.

    It grows with every step, however much a step finds; after the last one it stays.

    Raises:
      ValueError: no gold.
    """
    found: list[Hashable] = []
    recalls = []
    for step in [*steps, *[()] * count][:count]:
        found += step
        recalls.append(recall_at(found, gold, len(found), elsewhere))
    return recalls
