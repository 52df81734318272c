import faiss
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.retrieval import search as search_lib
from cirag_jax.retrieval.search import ExactIndex


def _vectors(rows, seed):
    x = np.random.default_rng(seed).normal(size=(rows, 16)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_search_equals_faiss():
    vectors, queries = _vectors(300, 0), _vectors(150, 1)  # More queries than one call processes.
    index = faiss.IndexFlatIP(16)
    index.add(vectors)  # pyright: ignore[reportCallIssue]
    expected_scores, expected_rows = index.search(queries, 7)  # pyright: ignore[reportCallIssue]
    rows, scores = ExactIndex(vectors).search(queries, 7)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-6)


def test_search_returns_only_allowed_rows():
    vectors, queries = _vectors(50, 0), _vectors(2, 1)
    allowed = [np.array([3, 8]), np.arange(50)]
    rows, scores = ExactIndex(vectors).search(queries, 4, allowed)
    assert set(rows[0][:2]) == {3, 8} and list(rows[0][2:]) == [-1, -1]
    assert np.isneginf(scores[0][2:]).all()
    np.testing.assert_array_equal(rows[1], np.argsort(-(vectors @ queries[1]))[:4])


def test_search_few_rows_and_no_queries():
    rows, _ = ExactIndex(_vectors(3, 0)).search(_vectors(1, 1), 10)
    assert rows.shape == (1, 3)
    assert ExactIndex(_vectors(3, 0)).search(_vectors(0, 1), 2)[0].shape == (0, 2)


def _whole_numbers(rows, seed):
    """Returns vectors with many equal products, which are exact in fp32 and in bf16."""
    return np.random.default_rng(seed).integers(-2, 3, size=(rows, 16)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 8])
def test_vectors_are_in_the_requested_order(monkeypatch, devices, dtype):
    monkeypatch.setattr(search_lib, "BLOCK_ROWS", 40)
    vectors = _whole_numbers(700, 0)
    mesh = sharding.make_mesh(devices=jax.devices()[:devices]) if devices > 1 else None
    index = ExactIndex(vectors, dtype=dtype, mesh=mesh)
    rows = [699, 3, 41, 3, 0, 350, 40]
    found = index.vectors(rows)
    assert found.dtype == np.float32 and index.vectors([]).shape == (0, 16)
    np.testing.assert_array_equal(found, vectors[rows])


def _sorted(vectors, queries, k, allowed=None):
    """Returns the reference: all scores in a stable sort."""
    scores = (queries @ vectors.T).astype(np.float32)
    if allowed is not None:
        for row, may in enumerate(allowed):
            scores[row, np.setdiff1d(np.arange(len(vectors)), may)] = -np.inf
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, rows, axis=1)
    return np.where(np.isneginf(best), -1, rows), best


@pytest.fixture
def small_blocks(monkeypatch):
    """Sets limits that split a few rows into several blocks of several steps."""
    monkeypatch.setattr(search_lib, "BLOCK_ROWS", 500)
    monkeypatch.setattr(search_lib, "_CPU_STEP_ROWS", 128)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    ("rows", "k", "dtype"),
    [
        *((1, 3, "float32"), (63, 5, "float32"), (64, 64, "float32"), (1000, 1, "float32")),
        *((1300, 30, "float32"), (1300, 30, "bfloat16")),
        *((9001, 130, "float32"), (9001, 130, "bfloat16")),
    ],
)
def test_search_in_blocks_equals_a_stable_sort(small_blocks, devices, rows, k, dtype):
    vectors, queries = _whole_numbers(rows, 0), _whole_numbers(9, 1)
    mesh = sharding.make_mesh(fsdp=2, devices=jax.devices()[:devices]) if devices > 1 else None
    index = ExactIndex(vectors, dtype=dtype, mesh=mesh)
    expected_rows, expected_scores = _sorted(vectors, queries, k)
    found_rows, found_scores = index.search(queries, k)
    np.testing.assert_array_equal(found_rows, expected_rows)
    np.testing.assert_array_equal(found_scores, expected_scores)
    assert found_rows.dtype == np.int32 and found_scores.dtype == np.float32


@pytest.mark.parametrize("devices", [1, 8])
def test_search_every_block_returns_only_allowed_rows(small_blocks, devices):
    vectors, queries = _whole_numbers(2100, 0), _whole_numbers(3, 1)
    allowed = [np.array([2099, 0, 777]), np.arange(5, 2100, 3), np.zeros(0, np.int32)]
    mesh = sharding.make_mesh(devices=jax.devices()[:devices]) if devices > 1 else None
    found = ExactIndex(vectors, mesh=mesh).search(queries, 12, allowed)
    for got, expected in zip(found, _sorted(vectors, queries, 12, allowed), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_search_sharded_equals_unsharded():
    vectors, queries = _vectors(5000, 0), _vectors(40, 1)
    alone = ExactIndex(vectors).search(queries, 25)
    sharded = ExactIndex(vectors, mesh=sharding.make_mesh()).search(queries, 25)
    np.testing.assert_array_equal(alone[0], sharded[0])
    np.testing.assert_allclose(alone[1], sharded[1], rtol=1e-6, atol=1e-7)


def test_index_rows_are_on_every_device_in_their_dtype():
    index = ExactIndex(_vectors(1024, 0), dtype="bfloat16", mesh=sharding.make_mesh())
    (block,) = index._blocks
    assert block.dtype == jnp.bfloat16
    assert {s.data.shape for s in block.addressable_shards} == {(128, 16)}
    assert len({s.device for s in block.addressable_shards}) == 8


def test_search_single_query_is_not_a_full_batch(monkeypatch):
    shapes = []
    search_block = search_lib._search_block
    monkeypatch.setattr(
        search_lib,
        "_search_block",
        lambda best, query_QD, *rest: (
            shapes.append(query_QD.shape[0]) or search_block(best, query_QD, *rest)
        ),
    )
    index = ExactIndex(_vectors(100, 0))
    for queries in (1, 5, 33, 130):
        index.search(_vectors(queries, 1), 2)
    assert shapes == [1, 8, 128, 128, 8]


@pytest.mark.parametrize("count", [640, 8192, 300_001])
def test_places_of_highest_equal_a_stable_sort(count):
    """There are many ties, and higher numbers are rarer; 300,001 numbers are grouped twice."""
    x_QN = np.floor(np.random.default_rng(count).exponential(2.0, (20, count)), dtype=np.float32)
    found_QK = search_lib._places_of_highest(jnp.asarray(x_QN), 5)
    np.testing.assert_array_equal(found_QK, np.argsort(-x_QN, axis=1, kind="stable")[:, :5])


def test_products_with_bfloat16_rows_keep_the_query_exact(monkeypatch):
    """On an accelerator, only the stored rows are rounded to bf16."""
    vectors, queries = _vectors(300, 0), _vectors(20, 1)
    rounded = np.asarray(jnp.asarray(vectors, jnp.bfloat16), np.float32)
    monkeypatch.setattr(search_lib.jax, "default_backend", lambda: "gpu")
    scores = search_lib._products(jnp.asarray(queries), jnp.asarray(vectors, jnp.bfloat16))
    np.testing.assert_allclose(scores, queries @ rounded.T, atol=3e-5)


class _Counted:
    """A matrix that records the slices that are read."""

    def __init__(self, vectors):
        self.vectors, self.shape, self.read = vectors, vectors.shape, []

    def __getitem__(self, rows):
        self.read.append(rows)
        return self.vectors[rows]


@pytest.fixture
def small_streams(small_blocks, monkeypatch):
    monkeypatch.setattr(search_lib, "STREAMED_ROWS", 500)
    monkeypatch.setattr(search_lib, "_CPU_STEP_ROWS", 384)
    monkeypatch.setattr(search_lib, "_READ_ROWS", 100)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    ("rows", "k", "dtype"),
    [(1, 3, "float32"), (63, 5, "bfloat16"), (9001, 130, "float32"), (9001, 130, "bfloat16")],
)
def test_search_streamed_equals_a_stable_sort(small_streams, devices, rows, k, dtype):
    vectors, queries = _whole_numbers(rows, 0), _whole_numbers(150, 1)
    mesh = sharding.make_mesh(fsdp=2, devices=jax.devices()[:devices]) if devices > 1 else None
    index = ExactIndex(vectors, dtype=dtype, mesh=mesh, stream=True)
    for _ in range(2):  # The buffers are used again.
        for got, expected in zip(
            index.search(queries, k), _sorted(vectors, queries, k), strict=True
        ):
            np.testing.assert_array_equal(got, expected)


def test_search_streamed_equals_memory_to_the_digit(small_streams):
    vectors, queries = _vectors(9001, 0), _vectors(40, 1)
    memory = ExactIndex(vectors).search(queries, 25)
    streamed = ExactIndex(vectors, stream=True).search(queries, 25)
    for ours, theirs in zip(streamed, memory, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("devices", [1, 8])
def test_search_streamed_returns_only_allowed_rows(small_streams, devices):
    vectors, queries = _whole_numbers(2100, 0), _whole_numbers(3, 1)
    allowed = [np.array([2099, 0, 777]), np.arange(5, 2100, 3), np.zeros(0, np.int32)]
    mesh = sharding.make_mesh(devices=jax.devices()[:devices]) if devices > 1 else None
    found = ExactIndex(vectors, mesh=mesh, stream=True).search(queries, 12, allowed)
    for got, expected in zip(found, _sorted(vectors, queries, 12, allowed), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_search_streamed_reads_every_row_once_in_pieces(small_streams):
    source = _Counted(_whole_numbers(2100, 0))
    index = ExactIndex(source, stream=True)
    assert not source.read and index.nbytes == 0
    index.search(_whole_numbers(300, 1), 5)  # Three groups of queries share the rows.
    assert all(rows.stop - rows.start <= 100 for rows in source.read)
    assert [row for rows in source.read for row in range(rows.start, rows.stop)] == list(
        range(2100)
    )


def test_search_streamed_memory_does_not_grow_with_the_rows():
    class Zeros:
        def __init__(self, rows):
            self.shape = (rows, 4)

    sizes = [
        sum(buffer.nbytes for buffer in ExactIndex(Zeros(rows), stream=True)._buffers)
        for rows in (10**6, 21 * 10**6)
    ]
    assert max(sizes) <= 2 * search_lib._CPU_STEP_ROWS * 4 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_search_streamed_vectors_are_read_in_the_requested_order(dtype):
    source = _Counted(_whole_numbers(700, 0))
    rows = [699, 3, 41, 3, 0]
    found = ExactIndex(source, dtype=dtype, stream=True).vectors(rows)
    np.testing.assert_array_equal(found, source.vectors[rows])
    assert found.dtype == np.float32 and len(source.read) == 1


def test_search_streamed_damaged_row_is_refused(small_streams):
    vectors = _vectors(2100, 0)
    vectors[2000, 3] = np.nan
    with pytest.raises(UserError, match="not finite"):
        ExactIndex(vectors, stream=True).search(vectors[:1], 3)
