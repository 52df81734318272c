"""Builds padded micro-batches: either packed rows, or one example per row with length buckets.

All steps are planned before training, from the examples and a seed, so that a resumed run continues
with the same batches.

Conversations of one kind share a prefix: the instruction and often a worked example. A packed row
contains the prefix only once. All examples of the row attend to the prefix, but not to each other.
Apart from dropout, losses and gradients are the same as with one example per row.
"""

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cirag_jax.training.data import mixture
from cirag_jax.training.data.examples import Example
from cirag_jax.training.lora_step import Batch

WINDOW = 2048  # Number of examples that are packed, or sorted by length, together.
MIN_SHARED = 32  # Minimum length of a shared prefix in tokens.


class Row(NamedTuple):
    """A row of a batch: indices of its examples, and the length of their shared prefix."""

    places: tuple[int, ...]
    shared: int = 0

    def size(self, lengths: Sequence[int]) -> int:
        """Returns the number of real tokens; ``lengths`` has the length of every example."""
        return self.shared + sum(lengths[place] - self.shared for place in self.places)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of rows, micro-batches and steps; numbers of rows are totals over all devices.

    Attributes:
      length: maximum tokens of a row and of an example.
      packing: whether rows contain several examples, separated by segments.
      buckets: padded lengths of rows, ascending; the last is ``length``. A micro-batch uses the
        smallest bucket that its longest row fits into.
      rows_per_step: rows per optimizer step.
      rows_per_batch: rows per micro-batch; must divide ``rows_per_step``.
      shares_prefixes: whether examples of a packed row share their prefix.
    """

    length: int
    packing: bool
    buckets: tuple[int, ...]
    rows_per_step: int
    rows_per_batch: int
    shares_prefixes: bool = True


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of `lora_step.TrainStep` on the host, and its statistics.

    Attributes:
      batch: the arrays.
      part_BT: uint8, the `Part` of each supervised target.
      tokens: number of real tokens; a shared prefix counts once.
      attended: twice the number of pairs in causal attention. Without shared prefixes, this is the
        sum of the squared lengths of the examples.
    """

    batch: Batch
    part_BT: np.ndarray
    tokens: int
    attended: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows of every step, and the numbers of real, supervised and padded tokens per step.

    The last step may have fewer than ``rows_per_step`` rows. Shared prefixes count once.
    """

    steps: tuple[tuple[Row, ...], ...]
    tokens: tuple[int, ...]
    supervised: tuple[int, ...]
    padded: tuple[int, ...]

    def efficiency(self) -> float:
        """Returns the share of real tokens among all tokens, including padding."""
        return sum(self.tokens) / max(sum(self.padded), 1)

    def drawn(self, sizes: Sequence[int], num_steps: int) -> list[int]:
        """Returns how many examples of the first steps come from each set; see `make_plan`."""
        ends = list(itertools.accumulate(sizes))
        rows = itertools.chain.from_iterable(self.steps[:num_steps])
        counts = collections.Counter(bisect.bisect(ends, i) for row in rows for i in row.places)
        return [counts[which] for which in range(len(sizes))]


def make_plan(
    examples: Sequence[Example],
    layout: Layout,
    seed: int,
    *,
    num_epochs: float = 1.0,
    num_steps: int = 0,
    max_tokens: int = 0,
    sizes: Sequence[int] = (),
    weights: Sequence[float] | None = None,
) -> Plan:
    """Distributes examples over steps, in a new random order in every epoch.

    Args:
      examples: examples of at most ``layout.length`` tokens.
      layout: the sizes of rows and steps.
      seed: seed of the random orders.
      num_epochs: passes over the examples. For a fraction, the last pass has fewer steps.
      num_steps: number of steps; overrides ``num_epochs`` unless it is 0.
      max_tokens: maximum number of real tokens; 0 is no limit. The plan has at least one step.
      sizes: number of examples of each data set, one after the other; not used without weights.
      weights: relative number of examples drawn from each data set. An epoch is then the next
        ``len(examples)`` of `mixture.endless`.
    """
    if not examples:
        raise ValueError("there are no examples to pack")
    lengths = [len(example.tokens_T) for example in examples]
    # The first token of an example is not a target.
    targets = [int(np.count_nonzero(example.weight_T[1:])) for example in examples]
    shares = layout.packing and layout.shares_prefixes
    prefixes = _prefixes(examples) if shares else [(b"", 0)] * len(examples)
    mixed = None
    if weights is not None:
        ends = itertools.accumulate(sizes, initial=0)
        sets = [range(start, end) for start, end in itertools.pairwise(ends)]
        mixed = mixture.endless(sets, weights, seed)
    num_epochs = math.inf if num_steps else num_epochs
    all_steps = _steps(lengths, prefixes, layout, seed, num_epochs, mixed)
    steps = list(itertools.islice(all_steps, num_steps or None))
    tokens = [sum(row.size(lengths) for row in step) for step in steps]
    if max_tokens:
        fitting = int(np.searchsorted(np.cumsum(tokens), max_tokens, side="right"))
        steps, tokens = steps[: max(fitting, 1)], tokens[: max(fitting, 1)]
    return Plan(
        tuple(steps),
        tuple(tokens),
        tuple(sum(targets[i] for row in step for i in row.places) for step in steps),
        tuple(
            layout.rows_per_batch
            * sum(size for _, size in _micro_batch_rows(step, lengths, layout))
            for step in steps
        ),
    )


def micro_batches(
    examples: Sequence[Example], step: Sequence[Row], layout: Layout, pad_id: int
) -> list[MicroBatch]:
    """Returns the rows of a step as arrays, padded to complete micro-batches.

    Packed rows have ``positions_BT`` (which restart in each example), ``segments_BT`` (1, 2, ...; 0
    for padding) and ``shared_B`` (None without shared prefixes). Other rows have ``lengths_B``. The
    target of a token is the next token of the example. A shared prefix belongs to the first segment
    and is not supervised.
    """
    batches = []
    for rows, length in _micro_batch_rows(step, [len(e.tokens_T) for e in examples], layout):
        shape = (layout.rows_per_batch, length)
        tokens_BT = np.full(shape, pad_id, np.int32)
        targets_BT = np.full(shape, pad_id, np.int32)
        weights_BT = np.zeros(shape, np.float32)
        part_BT = np.zeros(shape, np.uint8)
        positions_BT, segments_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        real = attended = 0
        shared_B = np.zeros(shape[0], np.int32)
        for row, (places, shared) in enumerate(rows):
            shared_B[row] = shared
            start = 0
            attended -= (len(places) - 1) * shared**2
            for segment, place in enumerate(places, 1):
                skipped = shared if start else 0  # The row has the shared prefix already.
                tokens_T, weight_T, part_T, _ = examples[place]
                end = start + len(tokens_T) - skipped
                tokens_BT[row, start:end] = tokens_T[skipped:]
                targets_BT[row, start : end - 1] = tokens_T[skipped + 1 :]
                weights_BT[row, start : end - 1] = weight_T[skipped + 1 :]
                part_BT[row, start : end - 1] = part_T[skipped + 1 :]
                positions_BT[row, start:end] = np.arange(skipped, len(tokens_T))
                segments_BT[row, start:end] = segment
                real, attended = real + end - start, attended + len(tokens_T) ** 2
                start = end
        batch = Batch(tokens_BT, targets_BT, weights_BT)
        if layout.packing:
            batch = batch._replace(
                positions_BT=positions_BT,
                segments_BT=segments_BT,
                shared_B=shared_B if layout.shares_prefixes else None,
            )
        else:
            batch = batch._replace(lengths_B=segments_BT.sum(1, dtype=np.int32))
        batches.append(MicroBatch(batch, part_BT, real, attended))
    return batches


def pack(lengths: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Packs examples into rows of ``length`` tokens by first-fit decreasing (Johnson, 1974).

    Returns the indices of the examples in each row, longest first. Examples of equal length keep
    their order.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    rows: list[list[int]] = []
    free: list[int] = []
    for place in order:
        size = lengths[place]
        if size > length:
            raise ValueError(f"an example of {size} tokens does not fit a row of {length}")
        row = next((i for i, space in enumerate(free) if space >= size), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(length)
        rows[row].append(place)
        free[row] -= size
    return [tuple(row) for row in rows]


def _prefixes(examples: Sequence[Example]) -> list[tuple[bytes, int]]:
    """Returns the kind of every example, and the length of the kind's shared prefix.

    Examples with the same first `MIN_SHARED` tokens are of one kind.
    """
    kinds = [example.tokens_T[:MIN_SHARED].tobytes() for example in examples]
    members: dict[bytes, list[Example]] = {}
    for kind, example in zip(kinds, examples, strict=True):
        members.setdefault(kind, []).append(example)
    lengths = {kind: _common_prefix(members[kind]) for kind in members}
    return [(kind, lengths[kind]) for kind in kinds]


def _common_prefix(examples: Sequence[Example]) -> int:
    """Returns the length of the common prefix, or 0 if it is shorter than `MIN_SHARED`.

    The prefix ends before the first token that differs or whose next token is supervised.
    """
    first_T = examples[0].tokens_T
    common = len(first_T)
    for tokens_T, weight_T, _, _ in examples:
        common = min(common, len(tokens_T))
        differs = np.flatnonzero(tokens_T[:common] != first_T[:common])
        common = int(differs[0]) if len(differs) else common
        counts = np.flatnonzero(weight_T[1 : common + 1])
        common = int(counts[0]) if len(counts) else common
    return common if common >= MIN_SHARED else 0


def _steps(
    lengths: Sequence[int],
    prefixes: Sequence[tuple[bytes, int]],
    layout: Layout,
    seed: int,
    num_epochs: float,
    mixed: Any,
) -> Iterator[tuple[Row, ...]]:
    """Yields the steps of all epochs; ``mixed`` is the order of weighted examples, if any."""
    size, epoch = len(lengths), 0
    while epoch < num_epochs:
        rng = np.random.default_rng((seed, epoch))
        if mixed is None:
            order = rng.permutation(size).tolist()
        else:
            order = [mixed[place] for place in range(epoch * size, (epoch + 1) * size)]
        steps = _epoch(order, lengths, prefixes, layout, rng)
        share = min(num_epochs - epoch, 1.0)
        yield from steps[: max(round(share * len(steps)), 1)]
        epoch += 1


def _epoch(
    order: Sequence[int],
    lengths: Sequence[int],
    prefixes: Sequence[tuple[bytes, int]],
    layout: Layout,
    rng: np.random.Generator,
) -> list[tuple[Row, ...]]:
    """Builds rows within windows of a random order, and shuffles them."""
    size = layout.rows_per_step
    rows: list[Row] = []
    groups: list[list[Row]] = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        if layout.packing:
            for prefix in dict.fromkeys(prefixes[place] for place in window):
                members = [place for place in window if prefixes[place] == prefix]
                shared = prefix[1]
                packed = pack([lengths[i] - shared for i in members], layout.length - shared)
                rows += [Row(tuple(members[i] for i in row), shared) for row in packed]
        else:  # Rows of a step have similar lengths, which saves padding.
            by_length = [Row((place,)) for place in sorted(window, key=lengths.__getitem__)]
            groups += [by_length[i : i + size] for i in range(0, len(by_length), size)]
    if layout.packing:
        rows = [rows[i] for i in rng.permutation(len(rows))]
        return [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
    return [tuple(groups[i]) for i in rng.permutation(len(groups))]


def _micro_batch_rows(
    step: Sequence[Row], lengths: Sequence[int], layout: Layout
) -> list[tuple[Sequence[Row], int]]:
    """Returns the rows and the padded length of each micro-batch of a step."""
    size = layout.rows_per_batch
    micro_batches = []
    for start in range(0, len(step), size):
        rows = step[start : start + size]
        longest = max(row.size(lengths) for row in rows)
        bucket = layout.buckets[bisect.bisect_left(layout.buckets, longest)]
        micro_batches.append((rows, bucket))
    return micro_batches
