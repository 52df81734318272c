"""Runs a compiled function over texts of any length, with one compilation per length bucket.

A text's bucket depends only on its length, and every bucket has one batch shape. A text's result
therefore never depends on the other texts in its batch.
"""

import bisect
import collections
import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from cirag_jax import sharding
from cirag_jax.errors import UserError

# Fine steps for triples and sentences; coarse steps for long texts, where compiling costs more than
# padding.
BUCKETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# Tokens per batch, by platform. Larger batches are not faster, but a single query waits for the
# padding of its batch.
TOKENS_PER_BATCH = {"cpu": 256}
DEFAULT_TOKENS_PER_BATCH = 16384

_CHUNK = 4096  # texts tokenized at a time, while earlier batches run
_AHEAD = 4  # batches dispatched before the oldest is fetched

Text = TypeVar("Text", bound=Hashable)
Row = TypeVar("Row")


@functools.cache
def bucket_lengths(limit: int) -> tuple[int, ...]:
    """Returns the buckets for at most ``limit`` tokens, ascending; the last one is ``limit``."""
    lengths = [*BUCKETS]
    while lengths[-1] < limit:  # 768, 1024, 1536, 2048, ...
        lengths.append(2 * lengths[-2])
    return (*(length for length in lengths if length < limit), limit)


def smallest_bucket(n: int, buckets: Sequence[int]) -> int:
    """Returns the smallest of the ascending ``buckets`` that holds ``n`` tokens."""
    place = bisect.bisect_left(buckets, n)
    if place == len(buckets):
        raise UserError(f"a text of {n} tokens does not fit the {buckets[-1]} tokens of a row")
    return buckets[place]


def bucket_length(n: int, limit: int = BUCKETS[-1]) -> int:
    """Returns the smallest bucket for ``n`` tokens, at most ``limit`` (the encoder's maximum)."""
    return smallest_bucket(n, bucket_lengths(limit))


def batch_rows(length: int, tokens_per_batch: int | None = None, multiple: int = 8) -> int:
    """Returns the batch size of a bucket, a positive multiple of ``multiple``."""
    if tokens_per_batch is None:
        tokens_per_batch = TOKENS_PER_BATCH.get(jax.default_backend(), DEFAULT_TOKENS_PER_BATCH)
    return max(tokens_per_batch // (length * multiple), 1) * multiple


def map_texts(
    texts: Sequence[Text],
    tokenize: Callable[[Sequence[Text]], list[Row]],
    length_of: Callable[[Row], int],
    pad: Callable[[list[Row], int, int], tuple[np.ndarray, ...]],
    apply: Callable[..., jax.Array],
    *,
    width: tuple[int, ...],
    max_length: int,
    mesh: Mesh | None,
    tokens_per_batch: int | None,
    progress: Callable[[int], Any] | None,
) -> np.ndarray:
    """Applies a function to batches of texts; returns float32 (N, *width), in input order.

    Args:
      texts: texts or tuples of texts; duplicates are computed once.
      tokenize: turns texts into rows of tokens.
      length_of: the number of tokens of a row.
      pad: (rows, number of rows, length) -> arrays whose first axis is the batch.
      apply: the padded arrays, on the device -> array of shape (number of rows, *width).
      width: shape of one result.
      max_length: length of the longest bucket.
      mesh: batches are split over the mesh's data and fsdp axes.
      tokens_per_batch: None uses the platform's default.
      progress: called with the number of distinct texts just finished.
    """
    unique = list(dict.fromkeys(texts))
    result = np.zeros((len(unique), *width), np.float32)
    ways = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]

    def shape_of(row: Row) -> tuple[int, int]:
        bucket = bucket_length(length_of(row), max_length)
        # Eight texts of thousands of tokens may not fit the memory.
        multiple = ways if bucket > BUCKETS[-1] else math.lcm(8, ways)
        return batch_rows(bucket, tokens_per_batch, multiple), bucket

    pending: collections.deque[tuple[list[int], jax.Array]] = collections.deque()

    def fetch() -> None:
        numbers, batch = pending.popleft()
        result[numbers] = np.asarray(batch)[: len(numbers)]
        if progress is not None:
            progress(len(numbers))

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        for shape, numbers, rows in _batches(unique, tokenize, shape_of):
            arrays = pad(rows, *shape)
            pending.append((numbers, apply(*(_put(array, mesh) for array in arrays))))
            if len(pending) > _AHEAD:
                fetch()
        while pending:
            fetch()
    if len(unique) == len(texts):
        return result
    position = {text: index for index, text in enumerate(unique)}
    return result[[position[text] for text in texts]]


def _batches(
    texts: Sequence[Text],
    tokenize: Callable[[Sequence[Text]], list[Row]],
    shape_of: Callable[[Row], tuple[int, int]],
) -> Iterator[tuple[tuple[int, int], list[int], list[Row]]]:
    """Yields (shape, text numbers, rows): full batches first, then the remainder of each bucket."""
    waiting: dict[tuple[int, int], tuple[list[int], list[Row]]] = {}
    for start in range(0, len(texts), _CHUNK):
        chunk = tokenize(texts[start : start + _CHUNK])
        for number, row in enumerate(chunk, start):
            shape = shape_of(row)
            numbers, rows = waiting.setdefault(shape, ([], []))
            numbers.append(number)
            rows.append(row)
            if len(rows) == shape[0]:
                yield shape, *waiting.pop(shape)
    for shape, (numbers, rows) in sorted(waiting.items(), key=lambda item: item[0][1]):
        yield shape, numbers, rows


def _put(array: np.ndarray, mesh: Mesh | None) -> Any:
    if mesh is None:
        return array
    return sharding.place(array, sharding.batch_sharding(mesh, array.ndim, array.shape))


def everywhere(array: jax.Array) -> jax.Array:
    """Inside a compiled function, replicates an array on every device of the mesh, if any."""
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec())
