"""Recall@K, and recall of what a search has found so far."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from types import MappingProxyType

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
