"""Recall@K, and recall of what a search has found so far."""

from collections.abc import Collection, Hashable, Sequence


def recall_at(ranked: Sequence[Hashable], gold: Collection[Hashable], k: int) -> float:
    """|top-K and gold| / |gold| (spec, section 0); an empty ranking earns 0.

    Raises:
      ValueError: no gold.
    """
    wanted = set(gold)
    if not wanted:
        raise ValueError("recall needs at least one gold item")
    return len(wanted & set(ranked[:k])) / len(wanted)


def recall_by_step(
    steps: Sequence[Collection[Hashable]], gold: Collection[Hashable], count: int
) -> list[float]:
    """|found and gold| / |gold| of all that the first 1, 2, ... ``count`` steps found.

    It grows with every step, however much a step finds; after the last one it stays.

    Raises:
      ValueError: no gold.
    """
    found: list[Hashable] = []
    recalls = []
    for step in [*steps, *[()] * count][:count]:
        found += step
        recalls.append(recall_at(found, gold, len(found)))
    return recalls
