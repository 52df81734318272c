"""Pairs of texts to logits: tokenise, sort into length buckets, one compilation per bucket."""

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from cirag_jax import sharding
from cirag_jax.models import cross_encoder
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.retrieval.encode import batch_rows, bucket_length

_CHUNK = 4096  # pairs tokenised at a time, while earlier batches run
_AHEAD = 4  # batches dispatched before the oldest is fetched


class PairTokens(NamedTuple):
    """Token ids of a pair with special tokens, and which text each belongs to: int32 [T] both."""

    tokens_T: np.ndarray
    types_T: np.ndarray


def tokenize_pairs(
    model: PairEncoder, pairs: Sequence[tuple[str, str]], max_length: int | None = None
) -> list[PairTokens]:
    """Tokens of each pair; of one that is too long the longer text is cut, as usual."""
    limit = min(max_length or model.max_length, model.config.max_length)
    model.tokenizer.enable_truncation(limit, strategy="longest_first")
    has_types = model.model_type == "bert"  # RoBERTa's kind knows one type only.
    found = []
    for row in model.tokenizer.encode_batch_fast(list(pairs)):
        tokens_T = np.asarray(row.ids, np.int32)
        types_T = np.asarray(row.type_ids, np.int32) if has_types else np.zeros_like(tokens_T)
        found.append(PairTokens(tokens_T, types_T))
    return found


def pad_pairs(
    rows: Sequence[PairTokens], num_rows: int, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``tokens_BT``, ``types_BT`` and ``lengths_B``, int32, of ``num_rows`` rows.

    Missing rows are a single padding token taken for real, so that no row is empty.
    """
    tokens_BT = np.full((num_rows, length), pad_id, np.int32)
    types_BT = np.zeros((num_rows, length), np.int32)
    lengths_B = np.ones((num_rows,), np.int32)
    for index, row in enumerate(rows):
        tokens_BT[index, : len(row.tokens_T)] = row.tokens_T
        types_BT[index, : len(row.tokens_T)] = row.types_T
        lengths_B[index] = len(row.tokens_T)
    return tokens_BT, types_BT, lengths_B


def score_pairs(
    model: PairEncoder,
    params: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    max_length: int | None = None,
    mesh: Mesh | None = None,
    tokens_per_batch: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> np.ndarray:
    """Logits of (query, text) pairs, float32 of shape (N,), in input order.

    Args:
      model: tokenizer and architecture.
      params: its state, possibly newer than ``model.state``; None means that one.
      pairs: equal ones are scored once.
      max_length: tokens kept of a pair; default ``model.max_length``.
      mesh: batches are split over its data and fsdp axes.
      tokens_per_batch: default by platform.
      progress: called with the number of distinct pairs just finished.
    """
    params = model.state if params is None else params
    unique = list(dict.fromkeys(pairs))
    result = np.zeros((len(unique),), np.float32)
    ways = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    multiple = math.lcm(8, ways)

    def rows_of(bucket: int) -> int:
        return batch_rows(bucket, tokens_per_batch, multiple)

    pending: collections.deque[tuple[list[int], jax.Array]] = collections.deque()

    def fetch() -> None:
        numbers, logit_B = pending.popleft()
        result[numbers] = np.asarray(logit_B)[: len(numbers)]
        if progress is not None:
            progress(len(numbers))

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        for bucket, numbers, rows in _batches(model, unique, max_length, rows_of):
            arrays = pad_pairs(rows, rows_of(bucket), bucket, model.config.pad_id)
            logit_B = _apply(model.graphdef, params, *(_put(array, mesh) for array in arrays))
            pending.append((numbers, logit_B))
            if len(pending) > _AHEAD:
                fetch()
        while pending:
            fetch()
    if len(unique) == len(pairs):
        return result
    position = {pair: index for index, pair in enumerate(unique)}
    return result[[position[pair] for pair in pairs]]


def _batches(
    model: PairEncoder,
    pairs: Sequence[tuple[str, str]],
    max_length: int | None,
    rows_of: Callable[[int], int],
) -> Iterator[tuple[int, list[int], list[PairTokens]]]:
    """Yields (bucket, row numbers, rows): full batches first, then each bucket's rest."""
    waiting: dict[int, tuple[list[int], list[PairTokens]]] = {}
    for start in range(0, len(pairs), _CHUNK):
        chunk = tokenize_pairs(model, pairs[start : start + _CHUNK], max_length)
        for number, row in enumerate(chunk, start):
            bucket = bucket_length(len(row.tokens_T), model.config.max_length)
            numbers, rows = waiting.setdefault(bucket, ([], []))
            numbers.append(number)
            rows.append(row)
            if len(rows) == rows_of(bucket):
                yield bucket, *waiting.pop(bucket)
    for bucket, (numbers, rows) in sorted(waiting.items()):
        yield bucket, numbers, rows


@functools.partial(jax.jit, static_argnums=0)
def _apply(graphdef: Any, state: Any, tokens_BT: Any, types_BT: Any, lengths_B: Any) -> jax.Array:
    """``logit_B`` in fp32, on every device of the mesh if there is one."""
    mask_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
    logit_B = cross_encoder.apply(graphdef, state, tokens_BT, mask_BT, types_BT)
    if jax.sharding.get_abstract_mesh().empty:
        return logit_B
    return jax.lax.with_sharding_constraint(logit_B, PartitionSpec())


def _put(array: np.ndarray, mesh: Mesh | None) -> Any:
    if mesh is None:
        return array
    return sharding.place(array, sharding.batch_sharding(mesh, array.ndim, array.shape))
