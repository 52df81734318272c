"""Examples as padded micro-batches: packed into rows of one length, or one to a row in buckets.

What a step trains on is laid down before training starts, from the examples and a seed alone, so
that a run goes on with the batch at which it stopped.

Conversations of one kind begin alike, with an instruction and often a worked example. A packed row
holds that beginning once: every example of the row attends to it, none to another example. Losses
and gradients are those of one example a row (dropout aside), at a fraction of the tokens.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cirag_jax.training.data.examples import Example
from cirag_jax.training.lora_step import Batch

WINDOW = 2048  # examples that are packed, or sorted by length, together

MIN_SHARED = 32  # tokens from which on a common beginning is worth sharing


class Row(NamedTuple):
    """One row of a batch.

    Attributes:
      places: of its examples, in their order.
      shared: tokens that all of them begin with and that the row holds once, in front.
    """

    places: tuple[int, ...]
    shared: int = 0

    def size(self, lengths: Sequence[int]) -> int:
        """Its real tokens, where the examples have ``lengths``."""
        return self.shared + sum(lengths[place] - self.shared for place in self.places)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How examples become rows and rows become steps.

    Attributes:
      length: most tokens of a packed row, and of an example.
      packing: several examples in a row, told apart by segments; else one a row.
      buckets: what rows are padded to, ascending, the last one ``length``: the smallest that holds
        the longest row of a micro-batch.
      rows_per_step: rows of an optimiser step, over all devices.
      rows_per_batch: rows of a micro-batch, over all devices; divides ``rows_per_step``.
    """

    length: int
    packing: bool
    buckets: tuple[int, ...]
    rows_per_step: int
    rows_per_batch: int


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What one gradient is computed of.

    Attributes:
      batch: for `lora_step.TrainStep`, on the host.
      part_BT: uint8, the `Part` of each target that counts.
      tokens: real tokens, shared ones once.
      attended: pairs of tokens that causal attention looks at, twice: of examples that share
        nothing the sum of their squared lengths.
    """

    batch: Batch
    part_BT: np.ndarray
    tokens: int
    attended: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows of every step.

    Attributes:
      steps: rows of each step; the last step may have fewer than ``rows_per_step``.
      tokens: real tokens of each step, shared ones once.
      supervised: supervised tokens of each step.
      computed: tokens of each step's rows, padding included.
    """

    steps: tuple[tuple[Row, ...], ...]
    tokens: tuple[int, ...]
    supervised: tuple[int, ...]
    computed: tuple[int, ...]

    def efficiency(self) -> float:
        """Real tokens over computed ones."""
        return sum(self.tokens) / max(sum(self.computed), 1)


def make_plan(
    examples: Sequence[Example],
    layout: Layout,
    seed: int,
    *,
    num_epochs: float = 1.0,
    num_steps: int = 0,
    max_tokens: int = 0,
) -> Plan:
    """Deals examples out to steps, epoch by epoch, each in another order.

    Args:
      examples: none longer than ``layout.length``.
      layout: of rows and steps.
      seed: of the orders.
      num_epochs: passes over the examples; a fraction is that share of the last pass's steps.
      num_steps: above 0: so many steps instead, however many passes that takes.
      max_tokens: above 0: ends before the step that would exceed so many real tokens, but not
        before the first.
    """
    if not examples:
        raise ValueError("there is nothing to plan")
    lengths = [len(example.tokens_T) for example in examples]
    targets = [_targets(example) for example in examples]
    shared = _shared(examples) if layout.packing else [(b"", 0)] * len(examples)
    steps: list[tuple[Row, ...]] = []
    for step in _endless(lengths, shared, layout, seed, num_epochs, num_steps):
        steps.append(step)
        if num_steps and len(steps) == num_steps:
            break
    tokens = [sum(row.size(lengths) for row in step) for step in steps]
    if max_tokens:
        fitting = int(np.searchsorted(np.cumsum(tokens), max_tokens, side="right"))
        steps, tokens = steps[: max(fitting, 1)], tokens[: max(fitting, 1)]
    return Plan(
        tuple(steps),
        tuple(tokens),
        tuple(sum(targets[i] for row in step for i in row.places) for step in steps),
        tuple(
            sum(
                layout.rows_per_batch * length
                for _, length in _micro_batch_rows(step, lengths, layout)
            )
            for step in steps
        ),
    )


def micro_batches(
    examples: Sequence[Example], step: Sequence[Row], layout: Layout, pad_id: int
) -> list[MicroBatch]:
    """One step's rows as arrays; rows that are missing at the end are padding.

    Packed rows have ``positions_BT`` that restart, ``segments_BT`` (1, 2, ...; 0 is padding) and
    ``shared_B``, the others ``lengths_B``. A token's target is the next token of its own example;
    a shared beginning is part of the first segment and has no target that counts.
    """
    found = []
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
                skipped = shared if start else 0  # The row holds these already.
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
                positions_BT=positions_BT, segments_BT=segments_BT, shared_B=shared_B
            )
        else:
            batch = batch._replace(lengths_B=segments_BT.sum(1, dtype=np.int32))
        found.append(MicroBatch(batch, part_BT, real, attended))
    return found


# -------------------------------------------------------------------------------------------- rows


def pack(lengths: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Rows of at most ``length`` tokens by first-fit decreasing (Johnson, 1974), as places.

    Equal lengths keep their order, and rows hold their examples longest first.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    rows: list[list[int]] = []
    free: list[int] = []
    for place in order:
        size = lengths[place]
        if size > length:
            raise ValueError(f"an example of {size} tokens does not fit a row of {length}")
        row = next((i for i, left in enumerate(free) if left >= size), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(length)
        rows[row].append(place)
        free[row] -= size
    return [tuple(row) for row in rows]


def _shared(examples: Sequence[Example]) -> list[tuple[bytes, int]]:
    """For every example its kind, and how many tokens all examples of that kind begin with.

    Of one kind are those with the same `MIN_SHARED` first tokens.
    """
    kinds: dict[bytes, list[Example]] = {}
    for example in examples:
        kinds.setdefault(example.tokens_T[:MIN_SHARED].tobytes(), []).append(example)
    lengths = {kind: _common_beginning(members) for kind, members in kinds.items()}
    found = (example.tokens_T[:MIN_SHARED].tobytes() for example in examples)
    return [(kind, lengths[kind]) for kind in found]


def _common_beginning(examples: Sequence[Example]) -> int:
    """Tokens that all the examples begin with, but 0 for fewer than `MIN_SHARED`.

    The loss counts none of them, nor what follows the last one, which differs.
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


def _endless(
    lengths: Sequence[int],
    shared: Sequence[tuple[bytes, int]],
    layout: Layout,
    seed: int,
    num_epochs: float,
    num_steps: int,
) -> Iterator[tuple[Row, ...]]:
    """Steps of one epoch after the other; ends after ``num_epochs`` unless steps are counted."""
    epoch = 0
    while num_steps or epoch < num_epochs:
        steps = _epoch(lengths, shared, layout, np.random.default_rng((seed, epoch)))
        share = 1.0 if num_steps else min(num_epochs - epoch, 1.0)
        yield from steps[: max(round(share * len(steps)), 1)]
        epoch += 1


def _epoch(
    lengths: Sequence[int],
    shared: Sequence[tuple[bytes, int]],
    layout: Layout,
    rng: np.random.Generator,
) -> list[tuple[Row, ...]]:
    """One pass: rows made within windows of a random order, then put in a random order."""
    order = [int(place) for place in rng.permutation(len(lengths))]
    size = layout.rows_per_step
    rows: list[Row] = []
    groups: list[list[Row]] = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        if layout.packing:
            for kind in dict.fromkeys(shared[place] for place in window):
                members = [place for place in window if shared[place] == kind]
                common = kind[1]
                packed = pack([lengths[i] - common for i in members], layout.length - common)
                rows += [Row(tuple(members[i] for i in row), common) for row in packed]
        else:  # Rows of a step are of similar lengths: little is padding.
            alike = sorted(window, key=lambda place: lengths[place])
            groups += [[Row((p,)) for p in alike[i : i + size]] for i in range(0, len(alike), size)]
    if layout.packing:
        rows = [rows[i] for i in rng.permutation(len(rows))]
        return [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
    return [tuple(groups[i]) for i in rng.permutation(len(groups))]


def _micro_batch_rows(
    step: Sequence[Row], lengths: Sequence[int], layout: Layout
) -> list[tuple[Sequence[Row], int]]:
    """The micro-batches of a step: their rows and padded length."""
    size = layout.rows_per_batch
    found = []
    for start in range(0, len(step), size):
        rows = step[start : start + size]
        longest = max(row.size(lengths) for row in rows)
        found.append((rows, layout.buckets[bisect.bisect_left(layout.buckets, longest)]))
    return found


def _targets(example: Example) -> int:
    """Tokens of an example that the loss counts: its first token is nobody's target."""
    return int(np.count_nonzero(example.weight_T[1:]))
