"""Estimates the disk space and memory of an index, from its number of passages and dimensions."""

from pathlib import Path
from typing import Any

from cirag_jax.datasets import demo
from cirag_jax.datasets.jsonl import CORPUS, LARGE_CORPUS
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.io import say
from cirag_jax.reports import tables
from cirag_jax.retrieval import faiss_index, search
from cirag_jax.retrieval.faiss_index import COMPRESSED, IndexOptions
from cirag_jax.types import Config

GIB = 2**30
# Python, JAX with its compiled functions, and faiss, without the encoder; an exact search uses
# neither faiss nor a shard of vectors. These and the copies of scores are from measurements on a
# CPU (experiments/benchmarks/large_index.py).
_PROCESS = 550 << 20
_EXACT_SEARCH = 420 << 20
_COPIES_OF_SCORES = 6
_BYTES_PER_PASSAGE = 20  # The places and ids of passages that stay on disk.
_ID_BYTES = 12  # A line of ids.jsonl.
_RESULTS = 10  # Results per query.


def plan_index(config: Config, dim: int) -> dict[str, Any]:
    """Prints and returns the estimates for every way to search vectors (docs/retrieval.md).

    Args:
      config: a config of configs/index.py with ``examples``, the number of passages; null counts
        those of ``config.data.dir``.
      dim: dimensions of the encoder's vectors.

    Returns:
      ``disk_bytes`` of the index folder, and ``memory_bytes`` while it is searched and built, by
      way to search, without the encoder.
    """
    options = IndexOptions.of(config.retriever)
    rows, is_large = _count(config)
    ways = {
        "exact": "exact",
        "exact, stream": "stream",
        **{kind: kind for kind in faiss_index.FAISS_KINDS},
    }
    estimates = {
        name: {
            "disk_bytes": rows * (dim * _width(options) + _ID_BYTES)
            + _faiss_bytes(way, rows, dim, options),
            "memory_bytes": _memory(way, rows, dim, options, is_large),
            "build_memory_bytes": _build_memory(way, rows, dim, options, is_large),
        }
        for name, way in ways.items()
    }
    result = {
        "component": "index",
        "passages": rows,
        "dimension": dim,
        "dtype": options.dtype,
        "kinds": estimates,
    }
    cells = [
        (name, *(f"{bytes_ / GIB:.1f}" for bytes_ in sizes.values()))
        for name, sizes in estimates.items()
    ]
    say(
        f"index of {rows:,} passages, {dim} dimensions, {options.dtype}; GiB without the "
        "encoder:\n\n"
        + tables.markdown([("kind", "disk", "memory of search", "memory of build"), *cells])
    )
    return result


def _count(config: Config) -> tuple[int, bool]:
    """Returns the number of passages, and whether they stay on disk."""
    if config.examples:
        check_at_least(1, config, "examples")
        return config.examples, config.examples * 500 >= LARGE_CORPUS  # About 500 bytes each.
    if config.data.dir is None:
        return len(demo.build().corpus), False
    file = Path(config.data.dir).expanduser() / CORPUS
    try:
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip()), file.stat().st_size >= LARGE_CORPUS
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); set --config.examples to the number of "
            "passages"
        ) from None


def _width(options: IndexOptions) -> int:
    return 2 if options.dtype == "bfloat16" else 4


def _faiss_bytes(way: str, rows: int, dim: int, options: IndexOptions) -> int:
    """Returns the size of faiss's index, in memory and on disk."""
    lists = 4 * faiss_index.num_lists(rows, options) * dim
    if way == "faiss_flat":
        return 4 * rows * dim
    if way == "faiss_ivf":
        return rows * (4 * dim + 8) + lists
    if way == "faiss_hnsw":
        return rows * (4 * dim + 4 * 2 * options.hnsw_links)
    return rows * (faiss_index.code_bytes(dim, options) + 8) + lists if way == COMPRESSED else 0


def _memory(way: str, rows: int, dim: int, options: IndexOptions, is_large: bool) -> int:
    corpus = _BYTES_PER_PASSAGE * rows if is_large else 0
    if way == "exact":
        vectors = rows * dim * _width(options)
        return _EXACT_SEARCH + corpus + vectors + _scores(min(rows, search.BLOCK_ROWS))
    if way == "stream":
        block = min(rows, search.streamed_rows())
        return _EXACT_SEARCH + corpus + 2 * block * dim * _width(options) + _scores(block)
    base = _PROCESS + corpus + _faiss_bytes(way, rows, dim, options)
    if way == COMPRESSED:
        candidates = faiss_index.RERANKED * _RESULTS * options.pq_rerank
        return base + candidates * dim * (4 + _width(options))
    return base


def _scores(block_rows: int) -> int:
    """Returns the size of a block's scores for a full batch of queries, while they are sorted."""
    return _COPIES_OF_SCORES * 4 * search.QUERIES * block_rows


def _build_memory(way: str, rows: int, dim: int, options: IndexOptions, is_large: bool) -> int:
    """Returns the memory of a build, which holds one shard of vectors and texts."""
    corpus = _BYTES_PER_PASSAGE * rows if is_large else 0
    base = _PROCESS + corpus + _faiss_bytes(way, rows, dim, options)
    if way == COMPRESSED:
        return base + 2 * 4 * dim * faiss_index.training_rows(rows, dim, options)
    if way == "faiss_ivf":
        lists = faiss_index.num_lists(rows, options)
        return base + 4 * dim * min(rows, lists * faiss_index.TRAIN_ROWS_PER_LIST)
    return base
