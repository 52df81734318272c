import faiss
import numpy as np

from cirag_jax.retrieval.search import ExactIndex, score_candidates


def _vectors(rows, seed):
    x = np.random.default_rng(seed).normal(size=(rows, 16)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_finds_what_faiss_finds():
    vectors, queries = _vectors(300, 0), _vectors(150, 1)  # More queries than one call takes.
    index = faiss.IndexFlatIP(16)
    index.add(vectors)  # pyright: ignore[reportCallIssue]
    expected_scores, expected_rows = index.search(queries, 7)  # pyright: ignore[reportCallIssue]
    rows, scores = ExactIndex(vectors).search(queries, 7)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-6)


def test_a_question_finds_only_what_it_may():
    vectors, queries = _vectors(50, 0), _vectors(2, 1)
    allowed = [np.array([3, 8]), np.arange(50)]
    rows, scores = ExactIndex(vectors).search(queries, 4, allowed)
    assert set(rows[0][:2]) == {3, 8} and list(rows[0][2:]) == [-1, -1]
    assert np.isneginf(scores[0][2:]).all()
    np.testing.assert_array_equal(rows[1], np.argsort(-(vectors @ queries[1]))[:4])


def test_fewer_rows_than_asked_for_and_no_queries():
    rows, _ = ExactIndex(_vectors(3, 0)).search(_vectors(1, 1), 10)
    assert rows.shape == (1, 3)
    assert ExactIndex(_vectors(3, 0)).search(_vectors(0, 1), 2)[0].shape == (0, 2)


def test_candidate_scores_are_inner_products_in_the_candidates_order():
    units, queries = _vectors(60, 0), _vectors(130, 1)
    rng = np.random.default_rng(2)
    candidates = [rng.integers(0, 60, rng.integers(0, 40)) for _ in queries]
    scores = score_candidates(queries, units, candidates)
    for query, rows, got in zip(queries, candidates, scores, strict=True):
        np.testing.assert_allclose(got, units[rows] @ query, rtol=1e-5, atol=1e-6)
