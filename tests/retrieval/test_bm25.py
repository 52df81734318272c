import numpy as np

from cirag_jax.retrieval.bm25 import BM25

TEXTS = ["the harbour of Olden", "a film about sailors", "sailors in the harbour", "nothing here"]


def test_ranks_by_shared_stems():
    rows = BM25(TEXTS).search(["sailor at a harbour", "films"], 2)
    assert rows[0][0] == 2 and rows[1][0] == 1


def test_respects_what_a_question_may_find():
    rows = BM25(TEXTS).search(["sailor harbour"], 3, [np.array([3, 0])])
    assert rows.tolist() == [[0, 3, -1]]


def test_a_query_of_stop_words_or_unknown_words_is_answered():
    rows = BM25(TEXTS).search(["the of a", "zzz"], 2)
    assert rows.shape == (2, 2)
