"""Draws training examples from several data sets, by weight or by size."""

import collections
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import grain

from cirag_jax.errors import UserError

# Practically endless; with endless repetition, batches of size one overflow Grain's counter.
_EPOCHS = 1 << 32
_MAX_RATIO = 10_000  # of two weights; `drawn` takes this number of steps


def check_weights(
    weights: Any,
    num_sets: int,
    field: str = "config.data.weights",
    one_set: str = "folder of config.data.dir",
) -> None:
    """Raises `UserError` unless ``weights`` has a finite number above 0 per set, or is None.

    ``field`` and ``one_set`` name the weights and a set in the message.
    """
    if weights is None:
        return
    values = weights if isinstance(weights, tuple | list) else (weights,)
    valid = [type(value) in (int, float) and 0 < value < math.inf for value in values]
    if len(valid) != num_sets or not all(valid) or max(values) > _MAX_RATIO * min(values):
        raise UserError(
            f"{field}={weights} must have one number above 0 for each {one_set} ({num_sets}), none "
            f"over {_MAX_RATIO:,} times another."
        )


def endless(
    sets: Sequence[Sequence[Any]], weights: Sequence[float] | None, seed: int
) -> grain.MapDataset:
    """Returns a practically endless sequence of the examples of all sets.

    Without weights, all examples are shuffled together in every epoch, so that each epoch visits
    every example once. With weights, each set has a random order of its own, which restarts,
    reshuffled, when all its examples were drawn. The sets take turns in a fixed pattern, in which
    Grain rounds each weight down to hundredths of the smallest.
    """
    if weights is None:
        sets = [[example for examples in sets for example in examples]]
    elif not all(sets):
        raise UserError(
            f"the data sets have {', '.join(str(len(examples)) for examples in sets)} training "
            f"examples, but weights={weights} needs at least one of each"
        )
    orders = [
        grain.MapDataset.source(examples).seed(seed + i).shuffle().repeat(_EPOCHS)
        for i, examples in enumerate(sets)
    ]
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights)


def drawn(weights: Sequence[float], count: int) -> list[int]:
    """Returns how many of the first ``count`` examples of `endless` come from each set."""
    if len(weights) == 1:
        return [count]
    # Each element is its set and its number within the set.
    numbers = [
        grain.MapDataset.range(1 << 48).map(lambda number, i=i: (i, number))
        for i in range(len(weights))
    ]
    mixed: Any = grain.MapDataset.mix(numbers, weights)
    following: dict[int, int] = {}
    for index in itertools.count(count):
        which, number = mixed[index]
        following.setdefault(which, number)
        if len(following) == len(weights):
            break
    return [following[i] for i in range(len(weights))]


def by_source(sources: Iterable[str | None], counts: Sequence[int]) -> dict[str, int]:
    """Returns the count of each source; counts of a source that is listed twice are added."""
    totals = collections.Counter[str]()
    for source, count in zip(sources, counts, strict=True):
        totals[str(source)] += count
    return dict(totals)
