"""Texts to embeddings: tokenise, sort into length buckets, run one compiled function per bucket.

A text's bucket depends on its own length alone and every bucket has one batch shape, so there is
one compilation per bucket and a row never depends on its neighbours.
"""

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from cirag_jax import sharding
from cirag_jax.models.encoder import embed
from cirag_jax.models.pretrained import TextEncoder

# Fine steps where triples and sentences lie, coarser ones where compilations would cost more
# than the padding.
BUCKETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# Tokens of one batch, by platform.
TOKENS_PER_BATCH = {"cpu": 2048}
DEFAULT_TOKENS_PER_BATCH = 65536

_CHUNK = 4096  # texts tokenised at a time, while earlier batches run
_AHEAD = 4  # batches dispatched before the oldest is fetched

# (rows, length) -> times traced; a compile-once test reads it.
TRACES: collections.Counter[tuple[int, int]] = collections.Counter()


def bucket_length(n: int, limit: int = BUCKETS[-1]) -> int:
    """Smallest bucket that holds ``n`` tokens, at most ``limit`` (the encoder's positions)."""
    for bucket in BUCKETS:
        if n <= bucket:
            return max(min(bucket, limit), n)
    return n


def batch_rows(length: int, tokens_per_batch: int | None = None, multiple: int = 8) -> int:
    """Rows of the one batch shape of bucket ``length``: a positive multiple of ``multiple``."""
    if tokens_per_batch is None:
        tokens_per_batch = TOKENS_PER_BATCH.get(jax.default_backend(), DEFAULT_TOKENS_PER_BATCH)
    return max(tokens_per_batch // (length * multiple), 1) * multiple


def tokenize(
    encoder: TextEncoder, texts: Sequence[str], max_length: int | None = None
) -> list[np.ndarray]:
    """Token ids of each text: int32 arrays, special tokens included, cut to ``max_length``."""
    limit = min(max_length or encoder.max_length, encoder.config.max_length)
    encoder.tokenizer.enable_truncation(limit)
    return [
        np.asarray(row.ids, np.int32) for row in encoder.tokenizer.encode_batch_fast(list(texts))
    ]


def pad(
    rows: Sequence[np.ndarray], num_rows: int, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """``tokens_BT`` int32 and ``lengths_B`` int32 of shape (num_rows, length) and (num_rows,).

    Missing rows repeat a single padding token as if it were real, so that no row is empty.
    """
    tokens_BT = np.full((num_rows, length), pad_id, np.int32)
    lengths_B = np.ones((num_rows,), np.int32)
    for index, row in enumerate(rows):
        tokens_BT[index, : len(row)] = row
        lengths_B[index] = len(row)
    return tokens_BT, lengths_B


@functools.partial(jax.jit, static_argnums=0)
def _apply(graphdef: Any, state: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """``emb_BD`` in fp32, on every device of the mesh if there is one."""
    TRACES[tuple(tokens_BT.shape)] += 1  # type: ignore[index]
    mask_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
    emb_BD = embed(graphdef, state, tokens_BT, mask_BT)
    if jax.sharding.get_abstract_mesh().empty:
        return emb_BD
    return jax.lax.with_sharding_constraint(emb_BD, PartitionSpec())


def _put(array: np.ndarray, mesh: Mesh | None) -> Any:
    if mesh is None:
        return array
    return sharding.place(array, sharding.batch_sharding(mesh, array.ndim, array.shape))


def _batches(
    encoder: TextEncoder,
    texts: Sequence[str],
    max_length: int | None,
    rows_of: Callable[[int], int],
) -> Iterable[tuple[int, list[int], list[np.ndarray]]]:
    """Yields (bucket, row numbers, token rows): full batches first, then each bucket's rest."""
    waiting: dict[int, tuple[list[int], list[np.ndarray]]] = {}
    for start in range(0, len(texts), _CHUNK):
        chunk = tokenize(encoder, texts[start : start + _CHUNK], max_length)
        for number, row in enumerate(chunk, start):
            bucket = bucket_length(len(row), encoder.config.max_length)
            numbers, rows = waiting.setdefault(bucket, ([], []))
            numbers.append(number)
            rows.append(row)
            if len(rows) == rows_of(bucket):
                yield bucket, *waiting.pop(bucket)
    for bucket, (numbers, rows) in sorted(waiting.items()):
        yield bucket, numbers, rows


def encode(
    encoder: TextEncoder,
    params: Any,
    texts: Sequence[str],
    *,
    kind: Literal["query", "passage"] = "passage",
    max_length: int | None = None,
    mesh: Mesh | None = None,
    tokens_per_batch: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> np.ndarray:
    """Unit-length embeddings of ``texts``, float32 of shape (N, D), in input order.

    Args:
      encoder: tokenizer, prefixes, architecture.
      texts: any strings; equal ones are encoded once.
      params: its state, possibly newer than ``encoder.state``; None means that one.
      kind: which prefix to prepend.
      max_length: tokens kept of each text; default ``encoder.max_length``.
      mesh: batches are split over its data and fsdp axes.
      tokens_per_batch: default by platform.
      progress: called with the number of distinct texts just finished (``tqdm.update``).
    """
    params = encoder.state if params is None else params
    prefix = encoder.query_prefix if kind == "query" else encoder.passage_prefix
    unique = list(dict.fromkeys(texts))
    position = {text: index for index, text in enumerate(unique)}
    result = np.zeros((len(unique), encoder.dim), np.float32)
    ways = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    multiple = math.lcm(8, ways)

    def rows_of(bucket: int) -> int:
        return batch_rows(bucket, tokens_per_batch, multiple)

    pending: collections.deque[tuple[list[int], jax.Array]] = collections.deque()

    def fetch() -> None:
        numbers, emb_BD = pending.popleft()
        result[numbers] = np.asarray(emb_BD)[: len(numbers)]
        if progress is not None:
            progress(len(numbers))

    prefixed = [prefix + text for text in unique] if prefix else unique
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        for bucket, numbers, rows in _batches(encoder, prefixed, max_length, rows_of):
            tokens_BT, lengths_B = pad(rows, rows_of(bucket), bucket, encoder.config.pad_id)
            emb_BD = _apply(encoder.graphdef, params, _put(tokens_BT, mesh), _put(lengths_B, mesh))
            pending.append((numbers, emb_BD))
            if len(pending) > _AHEAD:
                fetch()
        while pending:
            fetch()
    if len(unique) == len(texts):
        return result
    return result[[position[text] for text in texts]]


__all__ = [
    "BUCKETS",
    "TRACES",
    "batch_rows",
    "bucket_length",
    "embed",
    "encode",
    "pad",
    "tokenize",
]
