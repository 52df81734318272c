"""Recall@K."""

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
