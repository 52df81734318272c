import numpy as np
import pytest

from cirag_jax.retrieval.bm25 import BM25

TEXTS = ["the harbour of Olden", "a film about sailors", "sailors in the harbour", "nothing here"]


def test_bm25_ranks_by_shared_stems():
    rows, _ = BM25(TEXTS).search(["sailor at a harbour", "films"], 2)
    assert rows[0][0] == 2 and rows[1][0] == 1


def test_bm25_returns_only_allowed_rows():
    rows, _ = BM25(TEXTS).search(["sailor harbour"], 3, [np.array([3, 0])])
    assert rows.tolist() == [[0, 3, -1]]


def test_bm25_query_without_known_words_scores_zero():
    rows, scores = BM25(TEXTS).search(["the of a", "zzz", ""], 2)
    assert rows.tolist() == [[0, 1]] * 3 and not scores.any()


@pytest.mark.parametrize("texts", [["the of", "a"], ["", "  "], ["?!"]])
def test_bm25_texts_without_words_are_indexed(tmp_path, texts):
    index = BM25(texts)
    index.save(tmp_path / "i")
    for found in (index, BM25.load(tmp_path / "i", len(texts))):
        rows, scores = found.search(["sailors", "the", ""], 2)
        assert rows.tolist() == [list(range(len(texts)))] * 3 and not scores.any()
        assert found.search(["sailors"], 1, [np.array([len(texts) - 1])])[0] == [[len(texts) - 1]]
