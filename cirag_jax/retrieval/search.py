"""Exact maximum-inner-product search, jitted.

Sorting all scores would cost ten times as much as the products. The search therefore divides the
scores into groups. Only the k groups with the highest maxima can contain one of the k best scores,
so only the scores in these groups are sorted. The result is exact.
"""

import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cirag_jax import sharding
from cirag_jax.io import replacing
from cirag_jax.models.io.tensor_files import check_finite

QUERIES = 128  # Maximum number of queries per call.
_QUERY_BUCKETS = (1, 8, 32, QUERIES)  # The number of queries is padded to one of these.

_GROUP = 64  # Scores that share a maximum.
# Rows per device and call; the scores of a call take at most 4 * 128 * 2^20 bytes.
BLOCK_ROWS = 1 << 20
STREAMED_ROWS = 1 << 14  # The same for rows that are read from disk; two blocks are in memory.
_READ_ROWS = 2048  # Rows that are read from disk at a time.
_CPU_STEP_ROWS = 2048  # Rows per product on a CPU, so that they stay in the cache.

_AXIS = "rows"
_MINUS_INFINITY = float("-inf")

_take = jax.jit(lambda block_ND, row_R: block_ND[row_R])


class ExactIndex:
    """Inner-product search over all rows of one matrix, split over devices.

    Every device finds the k best of its own rows, and these are merged into the k best of all rows.
    Ties go to the lower row. Products are accumulated in fp32. With ``bfloat16`` only the stored
    rows are rounded; the queries keep at least 16 bits.

    Args:
      vectors_ND: floating-point matrix, or any object with a shape, row slices and, with
        ``stream``, selection of rows by an array; it is copied one block at a time.
      dtype: dtype of the stored rows, ``float32`` or ``bfloat16``.
      mesh: devices over which rows are split; None is the default device.
      stream: do not keep the rows, but copy them again, block by block, for every search. The next
        block is read during the products of the current one. The results are the same.
    """

    def __init__(
        self,
        vectors_ND: Any,
        *,
        dtype: str = "float32",
        mesh: Mesh | None = None,
        stream: bool = False,
    ):
        self._num_rows, self._dim = vectors_ND.shape
        self._mesh = None
        ways = 1
        if mesh is not None and mesh.size > 1:
            self._mesh = Mesh(mesh.devices.reshape(-1), (_AXIS,))
            ways = mesh.size
        block_rows = streamed_rows() if stream else BLOCK_ROWS
        self._rows, self._step, num_blocks = _layout(self._num_rows, ways, block_rows)
        self._firsts = [index * self._rows for index in range(num_blocks)]
        self._dtype = jnp.dtype(dtype)
        # First row of each block, and the number of all rows.
        self._limits = [
            self._upload(np.array([at, self._num_rows], np.int32)) for at in self._firsts
        ]
        self._source = vectors_ND if stream else None
        self._blocks = [] if stream else [self._place(vectors_ND, at) for at in self._firsts]
        if stream:
            self._buffers = [np.empty((self._rows, self._dim), self._dtype) for _ in range(2)]
            # One thread for all searches, because the C library keeps memory for every new thread.
            self._reader = ThreadPoolExecutor(1)
            self._lock = threading.Lock()  # Searches share the buffers.
            self._checked = 0  # Blocks whose numbers are known to be finite.

    def _place(self, vectors_ND: Any, first: int) -> jax.Array:
        """Uploads the block of rows that begins at ``first``, padded with zeros."""

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self._rows)
            rows = np.asarray(vectors_ND[first + start : first + stop])
            rows = check_finite(rows.astype(self._dtype, copy=False), "the index")
            if len(rows) == stop - start:
                return np.ascontiguousarray(rows)
            padded = np.zeros((stop - start, self._dim), self._dtype)
            padded[: len(rows)] = rows
            return padded

        if self._mesh is None:
            return jnp.asarray(part((slice(None),)))
        return self._split(part)

    def _split(self, part: Callable[[Any], np.ndarray]) -> jax.Array:
        """Splits the rows of a block over the devices; ``part`` returns those of one device."""
        by_rows = NamedSharding(self._mesh, P(_AXIS, None))  # pyright: ignore[reportArgumentType]
        return jax.make_array_from_callback((self._rows, self._dim), by_rows, part)

    def _each_block(self) -> Iterator[jax.Array]:
        """Yields the blocks in order; a streamed block is read during the use of the one before.

        Two buffers take turns. The caller must have used a block before it continues.
        """
        if self._source is None:
            yield from self._blocks
            return
        following = self._reader.submit(self._read, 0)
        for number in range(len(self._firsts)):
            block_ND = following.result()
            if number + 1 < len(self._firsts):
                following = self._reader.submit(self._read, number + 1)
            if self._mesh is None:
                yield jnp.asarray(block_ND)
            else:
                yield self._split(lambda index, block_ND=block_ND: block_ND[index[0]])

    def _read(self, number: int) -> np.ndarray:
        """Reads a block into one of the two buffers."""
        assert self._source is not None
        buffer_ND, first = self._buffers[number % 2], self._firsts[number]
        count = min(self._rows, self._num_rows - first)
        for start in range(0, count, _READ_ROWS):  # Pieces, because they may have another dtype.
            stop = min(start + _READ_ROWS, count)
            buffer_ND[start:stop] = self._source[first + start : first + stop]
        buffer_ND[count:] = 0
        if number == self._checked:
            check_finite(buffer_ND, "the index")
            self._checked += 1
        return buffer_ND

    def _upload(self, x: np.ndarray) -> jax.Array:
        """Copies ``x`` to every device of the index."""
        if self._mesh is None:
            return jnp.asarray(x)
        return jax.device_put(x, NamedSharding(self._mesh, P()))

    def __len__(self) -> int:
        return self._num_rows

    def vectors(self, rows: Sequence[int]) -> np.ndarray:
        """Returns the stored rows as float32 [len(rows), D]."""
        row_R = np.asarray(rows, np.int32)
        if self._source is not None:
            stored_RD = np.asarray(self._source[row_R]).astype(self._dtype, copy=False)
            return stored_RD.astype(np.float32)
        vector_RD = np.empty((len(row_R), self._dim), np.float32)
        for index, block in enumerate(self._blocks):
            here = np.flatnonzero(row_R // self._rows == index)
            if len(here):
                vector_RD[here] = self._gather(block, row_R[here] % self._rows)
        return vector_RD

    def _gather(self, block_ND: jax.Array, row_R: np.ndarray) -> np.ndarray:
        if self._mesh is None and jax.default_backend() == "cpu":
            return np.asarray(block_ND)[row_R]  # NumPy shares the memory of the CPU backend.
        # Padded to a power of two, so that few gathers are compiled.
        padded = np.zeros(1 << (len(row_R) - 1).bit_length(), np.int32)
        padded[: len(row_R)] = row_R
        return np.asarray(_take(block_ND, padded))[: len(row_R)]

    def search(
        self, query_QD: np.ndarray, k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the k best rows for every query, best first.

        Args:
          query_QD: float32 queries.
          k: number of rows, at most the size of the index.
          allowed: for each query, the rows that it may find (``corpus="per_question"``); if there
            are fewer than k, the remaining places have row -1 and score -inf. None allows all.

        Returns:
          ``row_QK`` int32 and ``score_QK`` float32.
        """
        k = min(k, len(self))
        starts = range(0, len(query_QD), QUERIES)
        parts = [np.asarray(query_QD[at : at + QUERIES], np.float32) for at in starts]
        may = [None if allowed is None else allowed[at : at + QUERIES] for at in starts]
        if not parts:
            return np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
        if self._source is None:
            found = [
                jax.device_get(self.dispatch(part, k, m))
                for part, m in zip(parts, may, strict=True)
            ]
        else:  # The rows are read once for all queries.
            with self._lock:
                found = jax.device_get(self._dispatch(parts, k, may))
        sizes = [len(part_QD) for part_QD in parts]
        score_QK, row_QK = (
            np.concatenate([x_QK[:size] for x_QK, size in zip(x, sizes, strict=True)])
            for x in zip(*found, strict=True)
        )
        return np.where(np.isneginf(score_QK), -1, row_QK), score_QK

    @property
    def nbytes(self) -> int:
        """Size of the rows that are kept on all devices, including padding, in bytes."""
        return sum(block_ND.nbytes for block_ND in self._blocks)

    def dispatch(
        self, query_QD: np.ndarray, k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Starts a search and returns without waiting; at most 128 queries, k <= ``len(self)``.

        Returns:
          ``score_QK`` float32 and ``row_QK`` int32 for the padded number of queries. Places without
          a row have the score -inf.
        """
        return self._dispatch([query_QD], k, [allowed])[0]

    def _dispatch(
        self,
        parts: Sequence[np.ndarray],
        k: int,
        allowed: Sequence[Sequence[np.ndarray] | None],
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Starts a search for each part of the queries; see `dispatch`."""
        # Uploaded once for all blocks.
        uploaded = [self._upload(_padded(part_QD)) for part_QD in parts]
        best: list[Any] = [None] * len(parts)
        for index, block_ND in enumerate(self._each_block()):
            for part, query_QD in enumerate(uploaded):
                mask_QN = self._mask(index, len(query_QD), allowed[part])
                best[part] = _search_block(
                    best[part],
                    query_QD,
                    block_ND,
                    self._limits[index],
                    mask_QN,
                    k,
                    self._step,
                    self._mesh,
                )
                if self._source is not None:  # Otherwise, blocks that wait would fill the memory.
                    jax.block_until_ready(best[part])
        return best

    def _mask(
        self, index: int, num_queries: int, allowed: Sequence[np.ndarray] | None
    ) -> np.ndarray | None:
        """Returns which rows of a block each query may find; None if all."""
        if allowed is None:
            return None
        mask_QN = np.zeros((num_queries, self._rows), bool)
        for row, may in enumerate(allowed):
            may = np.asarray(may) - self._firsts[index]
            mask_QN[row, may[(may >= 0) & (may < self._rows)]] = True
        return mask_QN


def streamed_rows() -> int:
    """Returns the maximum number of rows per device of a block that is read from disk."""
    # A CPU multiplies no more rows at a time, so larger blocks would only take memory.
    is_cpu = jax.default_backend() == "cpu"
    return min(STREAMED_ROWS, _CPU_STEP_ROWS) if is_cpu else STREAMED_ROWS


def empty_results(num_queries: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and scores of an empty result: row -1 and score -inf at every place."""
    rows = np.full((num_queries, k), -1, np.int32)
    return rows, np.full((num_queries, k), -np.inf, np.float32)


def accelerators() -> Mesh | None:
    """Returns a mesh of this process's accelerators, or None if it has only a CPU."""
    if jax.default_backend() == "cpu":
        return None
    return sharding.make_mesh(devices=jax.local_devices())


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes a ``.npy`` file next to ``path``, then renames it.

    Raises:
      OSError: the disk is full. NumPy writes to open files from C and may lose the last bytes
        silently, so it is passed an object that only has a ``write`` method.
    """
    with replacing(path) as aside, aside.open("wb") as file:
        writer: Any = types.SimpleNamespace(write=file.write)
        np.save(writer, array, allow_pickle=False)


def _layout(num_rows: int, ways: int, block_rows: int) -> tuple[int, int, int]:
    """Returns the rows per block (all devices), the rows per product, and the number of blocks.

    ``block_rows`` is the maximum number of rows per device and block.
    """
    num_blocks = max(-(-num_rows // (ways * block_rows)), 1)
    local = max(-(-num_rows // (ways * num_blocks)), 1)  # Rows of one device in a block.
    step = -(-local // _GROUP) * _GROUP
    if jax.default_backend() == "cpu":
        step = min(step, _CPU_STEP_ROWS)
    return -(-local // step) * step * ways, step, num_blocks


@functools.partial(jax.jit, static_argnames=("k", "step", "mesh"))
def _search_block(best, query_QD, block_ND, limits, mask_QN, k, step, mesh):
    """Merges ``best``, the best (scores, rows) so far or None, with the best of a block."""
    if mesh is None:
        block_best = _local_best(query_QD, block_ND, limits, mask_QN, k, step)
        return block_best if best is None else _merge(best, block_best, k)

    def local(best, query_QD, block_ND, limits, mask_QN):
        limits = limits.at[0].add(jax.lax.axis_index(_AXIS) * block_ND.shape[0])
        block_best = _local_best(query_QD, block_ND, limits, mask_QN, k, step)
        gathered = (jax.lax.all_gather(x_QK, _AXIS, axis=1, tiled=True) for x_QK in block_best)
        return _merge(best, tuple(gathered), k)

    everywhere, rows, columns = P(), P(_AXIS, None), P(None, _AXIS)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(everywhere, everywhere, rows, everywhere, columns),
        out_specs=(everywhere, everywhere),
        check_vma=False,  # The gathered candidates are the same on every device.
    )(best, query_QD, block_ND, limits, mask_QN)


def _merge(best, block_best, k):
    score_QC, row_QC = block_best
    if best is not None:
        score_QC = jnp.concatenate([best[0], score_QC], axis=1)
        row_QC = jnp.concatenate([best[1], row_QC], axis=1)
    score_QK, place_QK = jax.lax.top_k(score_QC, k)  # Stable: equal scores keep their order.
    return score_QK, jnp.take_along_axis(row_QC, place_QK, axis=1)


def _local_best(query_QD, block_ND, limits, mask_QN, k, step):
    """Returns the best rows of a device's part of a block.

    ``limits`` are the part's first row and the number of all rows; later rows are padding.
    """
    num_queries, (num_rows, dim) = query_QD.shape[0], block_ND.shape
    num_steps = num_rows // step

    def scores_of(index, block_RD):
        score_QR = _products(query_QD, block_RD)
        row_R = limits[0] + index * step + jnp.arange(step, dtype=jnp.int32)
        may_QR = row_R < limits[1]
        if mask_QN is not None:
            may_QR = may_QR & jax.lax.dynamic_slice_in_dim(mask_QN, index * step, step, axis=1)
        score_QR = jnp.where(may_QR, score_QR, _MINUS_INFINITY)
        return score_QR, score_QR.reshape(num_queries, step // _GROUP, _GROUP).max(-1)

    if num_steps == 1:
        score_QR, max_QG = scores_of(jnp.int32(0), block_ND)
        score_SQR, max_SQG = score_QR[None], max_QG[None]
    else:
        indices = jnp.arange(num_steps, dtype=jnp.int32)
        _, (score_SQR, max_SQG) = jax.lax.scan(
            lambda _, inputs: (None, scores_of(*inputs)),
            None,
            (indices, block_ND.reshape(num_steps, step, dim)),
        )
    groups = step // _GROUP  # of one step
    num_kept = min(k, num_steps * groups)
    max_QG = max_SQG.transpose(1, 0, 2).reshape(num_queries, num_steps * groups)
    # Sorted, so that ties go to the lower row.
    group_QW = jnp.sort(_places_of_highest(max_QG, num_kept), axis=1)
    score_SQGE = score_SQR.reshape(num_steps, num_queries, groups, _GROUP)
    query_Q1 = jnp.arange(num_queries)[:, None]
    score_QWE = score_SQGE[group_QW // groups, query_Q1, group_QW % groups]
    row_QWE = group_QW[:, :, None] * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)
    row_QC = row_QWE.reshape(num_queries, num_kept * _GROUP) + limits[0]
    score_QC = score_QWE.reshape(num_queries, num_kept * _GROUP)
    score_QK, place_QK = jax.lax.top_k(score_QC, min(k, num_kept * _GROUP))
    return score_QK, jnp.take_along_axis(row_QC, place_QK, axis=1)


def _places_of_highest(x_QN, k):
    """Returns the indices of the k highest numbers, faster than `jax.lax.top_k` on a GPU.

    The k highest numbers are in the k groups with the highest maxima, so only these are sorted.
    """
    num_queries, count = x_QN.shape
    if count <= 2 * k * _GROUP:
        return jax.lax.top_k(x_QN, k)[1]
    rest = (0, -count % _GROUP)
    x_QGE = jnp.pad(x_QN, ((0, 0), rest), constant_values=_MINUS_INFINITY)
    x_QGE = x_QGE.reshape(num_queries, -1, _GROUP)
    group_QK = jnp.sort(_places_of_highest(x_QGE.max(-1), k), axis=1)
    some_QC = jnp.take_along_axis(x_QGE, group_QK[:, :, None], axis=1).reshape(num_queries, -1)
    place_QK = jax.lax.top_k(some_QC, k)[1]
    group_QK = jnp.take_along_axis(group_QK, place_QK // _GROUP, axis=1)
    return group_QK * _GROUP + place_QK % _GROUP


def _products(query_QD, block_RD):
    if block_RD.dtype == jnp.bfloat16 and jax.default_backend() != "cpu":
        # Splitting a query into a high and a low half keeps more of its bits in one bf16 product.
        high_QD = query_QD.astype(jnp.bfloat16)
        low_QD = (query_QD - high_QD.astype(jnp.float32)).astype(jnp.bfloat16)
        both_2QR = jnp.einsum(
            "qd,rd->qr",
            jnp.concatenate([high_QD, low_QD]),
            block_RD,
            preferred_element_type=jnp.float32,
        )
        return both_2QR[: len(query_QD)] + both_2QR[len(query_QD) :]
    # HIGHEST, because a GPU would otherwise round fp32 operands to TF32.
    return jnp.einsum(
        "qd,rd->qr",
        query_QD,
        block_RD.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _padded(query_QD: np.ndarray) -> np.ndarray:
    rows = next(bucket for bucket in _QUERY_BUCKETS if bucket >= len(query_QD))
    return np.pad(query_QD, ((0, rows - len(query_QD)), (0, 0)))
