"""Search with FAISS: Flat, IVF, HNSW and IVF-PQ; Flat and IVF also on GPUs."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from cirag_jax.errors import UserError, import_optional
from cirag_jax.identity import version_that_counts
from cirag_jax.retrieval.search import empty_results
from cirag_jax.types import Config, Count, PositiveInt
from cirag_jax.validation import check_fields

FAISS_KINDS = ("faiss_flat", "faiss_ivf", "faiss_hnsw", "faiss_ivfpq")
COMPRESSED = "faiss_ivfpq"  # Keeps codes in memory; the vectors stay where they are.

TRAIN_ROWS_PER_LIST = 256  # Training rows for the k-means clustering of IVF.
_BLOCK = 1 << 16  # Rows read at a time, because the matrix may be on disk.
_TRAIN_BYTES = 1 << 29  # Maximum size of the training rows of IVF-PQ, unless it has many lists.
_FEWEST_ROWS_PER_LIST = 32
_CODE_BITS = 8  # Bits per part of a vector; fewer if there are fewer rows than codes.
RERANKED = 64  # Queries whose candidates are read together.


@dataclasses.dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options for storing and searching vectors (documented in configs/retrievers.py)."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    ivf_lists: Count = 0
    ivf_probes: PositiveInt = 32
    hnsw_links: PositiveInt = 32
    hnsw_ef_construction: PositiveInt = 200
    hnsw_ef_search: PositiveInt = 128
    pq_bytes: Count = 0
    pq_rerank: PositiveInt = 20
    stream: bool = False

    @classmethod
    def of(cls, config: Config) -> "IndexOptions":
        """Reads and validates the options in a ``configs.retrievers.retriever()`` block."""
        options = cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})
        check_fields(options, prefix="config.retriever.")
        return options


def packages() -> dict[str, str]:
    """Returns the release series of faiss, because it may change search results."""
    return {"faiss": version_that_counts("faiss", _faiss().__version__)}  # of faiss-cpu or -gpu


class FaissIndex:
    """Inner-product search by faiss, with the interface of `ExactIndex`.

    IVF and HNSW are approximate and may find fewer than k rows; the remaining places have row -1
    and score -inf. With ``allowed``, every kind searches exactly, because an approximate search
    would miss most of the allowed rows. ``index`` is a faiss index of all rows on the CPU.

    IVF-PQ finds ``pq_rerank`` candidates per result by their codes. It then reads the candidates
    from ``vectors_ND`` and ranks them by exact scores, with ties going to the lower row.

    Attributes:
      stored: the index of faiss, on the CPU.
    """

    def __init__(self, index: Any, kind: str, options: IndexOptions, vectors_ND: Any = None):
        self.stored = index
        self._kind = kind
        self._options = options
        self._vectors_ND = vectors_ND if kind == COMPRESSED else None
        self._index = index if kind == COMPRESSED else _to_gpu(index)

    @classmethod
    def build(cls, vectors_ND: Any, kind: str, options: IndexOptions) -> "FaissIndex":
        """Indexes a float32 matrix, or any object with a shape and row slices.

        ``kind`` is one of `FAISS_KINDS`.
        """
        faiss = _faiss()
        rows, dim = vectors_ND.shape
        if kind == "faiss_flat":
            index = faiss.IndexFlatIP(dim)
        elif kind == "faiss_ivf":
            lists = num_lists(rows, options)
            index = faiss.IndexIVFFlat(
                faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT
            )
            index.cp.min_points_per_centroid = 1  # Avoids warnings about small corpora.
            index.train(_sample(vectors_ND, lists * TRAIN_ROWS_PER_LIST))
        elif kind == "faiss_hnsw":
            index = faiss.IndexHNSWFlat(dim, options.hnsw_links, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = options.hnsw_ef_construction
        else:
            index = _train_compressed(vectors_ND, options)
        for start in range(0, rows, _BLOCK):
            index.add(np.ascontiguousarray(vectors_ND[start : start + _BLOCK], np.float32))
        return cls(index, kind, options, vectors_ND)

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str],
        kind: str,
        options: IndexOptions,
        vectors_ND: Any = None,
    ) -> "FaissIndex":
        """Reads a file that `save` wrote; IVF-PQ also needs the vectors."""
        faiss, before = _faiss(), None
        try:
            # Otherwise a damaged length could allocate more memory than the file has bytes.
            before = faiss.get_deserialization_vector_byte_limit()
            # faiss counts a table that it would need for another metric, of 1 KiB for each list and
            # byte of a code, next to the list's 4 bytes per dimension in the file.
            times = 1 + 256 if kind == COMPRESSED else 1
            faiss.set_deserialization_vector_byte_limit(times * os.path.getsize(file))
            index = faiss.read_index(os.fspath(file))
        except (OSError, RuntimeError, MemoryError) as error:
            reason = (str(error).strip().splitlines() or ["no memory"])[-1]
            raise UserError(f"faiss cannot read {os.fspath(file)} ({reason}).") from None
        finally:
            if before is not None:
                faiss.set_deserialization_vector_byte_limit(before)
        return cls(index, kind, options, vectors_ND)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the index as one file.

        Raises:
          OSError: the disk is full (faiss's own writer would not report this).
        """
        with open(file, "wb") as out:
            # Pieces of 1 MiB, like faiss's own buffers.
            writer = _faiss().PyCallbackIOWriter(out.write, 1 << 20)
            _faiss().write_index(self.stored, writer)

    def __len__(self) -> int:
        return int(self.stored.ntotal)

    def vectors(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the stored rows as float32 [len(rows), D]."""
        if self._vectors_ND is not None:
            return np.asarray(self._vectors_ND[np.asarray(rows, np.int64)]).astype(np.float32)
        if self._kind == "faiss_ivf":
            self.stored.make_direct_map()  # Only the first call has an effect.
        return self.stored.reconstruct_batch(np.asarray(rows, np.int64))

    def search(
        self, query_QD: np.ndarray, k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``row_QK`` int32 and ``score_QK`` float32, as `ExactIndex.search` does."""
        query_QD = np.ascontiguousarray(query_QD, np.float32)
        k = min(k, len(self))
        if not len(query_QD) or not k:
            return empty_results(len(query_QD), k)
        if allowed is not None:
            return self._search_allowed(query_QD, k, allowed)
        if self._kind == COMPRESSED:
            return self._search_compressed(query_QD, k)
        score_QK, row_QK = self._index.search(query_QD, k, params=self._parameters())
        row_QK = row_QK.astype(np.int32)
        return row_QK, np.where(row_QK < 0, -np.inf, score_QK).astype(np.float32)

    def _search_allowed(
        self, query_QD: np.ndarray, k: int, allowed: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        row_QK, score_QK = empty_results(len(query_QD), k)
        for query, may in enumerate(allowed):
            row_R = np.unique(np.asarray(may, np.int32))
            score_R = self.vectors(row_R) @ query_QD[query]
            best = np.argsort(-score_R, kind="stable")[:k]
            row_QK[query, : len(best)] = row_R[best]
            score_QK[query, : len(best)] = score_R[best]
        return row_QK, score_QK

    def _search_compressed(self, query_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        row_QK, score_QK = empty_results(len(query_QD), k)
        count = min(k * self._options.pq_rerank, len(self))
        for start in range(0, len(query_QD), RERANKED):
            part_QD = query_QD[start : start + RERANKED]
            _, row_QC = self._index.search(part_QD, count, params=self._parameters())
            row_QC = np.sort(row_QC, axis=1)  # Ties go to the lower row.
            row_R, place_QC = np.unique(row_QC, return_inverse=True)
            place_QC = place_QC.reshape(row_QC.shape)
            vector_RD = self.vectors(np.maximum(row_R, 0))
            for query, query_D in enumerate(part_QD):
                score_C = vector_RD[place_QC[query]] @ query_D
                score_C[row_QC[query] < 0] = -np.inf  # IVF found fewer candidates.
                best = np.argsort(-score_C, kind="stable")[:k]
                score_QK[start + query] = score_C[best]
                row_QK[start + query] = row_QC[query, best]
        return row_QK, score_QK

    def _parameters(self) -> Any:
        if self._kind in ("faiss_ivf", COMPRESSED):
            return _faiss().SearchParametersIVF(nprobe=self._options.ivf_probes)
        if self._kind == "faiss_hnsw":
            return _faiss().SearchParametersHNSW(efSearch=self._options.hnsw_ef_search)
        return None


def num_lists(rows: int, options: IndexOptions) -> int:
    """Returns the number of lists of IVF."""
    return min(options.ivf_lists or max(round(4 * rows**0.5), 1), max(rows, 1))


def code_bytes(dim: int, options: IndexOptions) -> int:
    """Returns the bytes per vector of IVF-PQ: by default, one for every eight dimensions."""
    if options.pq_bytes == 0:
        return next(size for size in range(max(dim // 8, 1), 0, -1) if dim % size == 0)
    if dim % options.pq_bytes:
        raise UserError(
            f"config.retriever.pq_bytes={options.pq_bytes} must divide the {dim} dimensions of the "
            "encoder's vectors"
        )
    return options.pq_bytes


def _train_compressed(vectors_ND: Any, options: IndexOptions) -> Any:
    """Returns an empty IVF-PQ index, whose lists and codes are trained on evenly spaced rows."""
    faiss = _faiss()
    rows, dim = vectors_ND.shape
    lists = num_lists(rows, options)
    bits = min(_CODE_BITS, max(rows.bit_length() - 1, 1))
    index = faiss.IndexIVFPQ(
        faiss.IndexFlatIP(dim),
        dim,
        lists,
        code_bytes(dim, options),
        bits,
        faiss.METRIC_INNER_PRODUCT,
    )
    index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
    index.train(_sample(vectors_ND, training_rows(rows, dim, options)))
    return index


def training_rows(rows: int, dim: int, options: IndexOptions) -> int:
    """Returns the number of rows on which IVF-PQ is trained."""
    lists = num_lists(rows, options)
    size = max(_TRAIN_BYTES // (4 * dim), lists * _FEWEST_ROWS_PER_LIST)
    return min(size, lists * TRAIN_ROWS_PER_LIST, rows)


def _sample(vectors_ND: Any, size: int) -> np.ndarray:
    """Reads at most ``size`` evenly spaced rows, one block at a time."""
    rows, dim = vectors_ND.shape
    chosen = np.unique(np.linspace(0, rows - 1, min(size, rows)).astype(np.int64))
    sample = np.empty((len(chosen), dim), np.float32)
    for start in range(0, rows, _BLOCK):
        inside = (chosen >= start) & (chosen < start + _BLOCK)
        sample[inside] = vectors_ND[start : start + _BLOCK][chosen[inside] - start]
    return sample


def _faiss() -> Any:
    return import_optional("faiss", "config.retriever.kind=faiss_...", "faiss")


def _to_gpu(index: Any) -> Any:
    """Returns a copy on all GPUs if faiss supports this, otherwise the index itself."""
    faiss = _faiss()
    if not getattr(faiss, "get_num_gpus", lambda: 0)() or isinstance(index, faiss.IndexHNSW):
        return index
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, options)
