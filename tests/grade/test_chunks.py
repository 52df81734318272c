"""Chunks by hand: sizes, overlap, and where evidence stands."""

import itertools
import random

import pytest

from cirag_jax.errors import UserError
from cirag_jax.grade.chunks import ChunkSettings, Database, chunk
from cirag_jax.grade.records import Document


def document(*sizes, name="d"):
    return Document(name, "T", tuple(" ".join([f"s{i}"] * n) for i, n in enumerate(sizes)))


def spans(sizes, *settings):
    return [list(one.sentences) for one in chunk(document(*sizes), ChunkSettings(*settings))]


def test_chunks_are_whole_sentences_and_overlap():
    assert spans([4] * 6, 4, 12, 4) == [[0, 1, 2], [2, 3, 4], [4, 5]]
    assert spans([4] * 6, 4, 12, 0) == [[0, 1, 2], [3, 4, 5]]
    assert spans([4, 4], 4, 12, 4) == [[0, 1]]  # one that is short is one chunk


def test_a_short_last_chunk_reaches_back():
    assert spans([4] * 4, 8, 12, 0) == [[0, 1, 2], [2, 3]]


def test_a_long_sentence_is_a_chunk_of_its_own():
    assert spans([4, 30, 4], 4, 12, 4) == [[0], [1], [2]]


def test_no_sentence_is_lost_and_sizes_hold():
    rng = random.Random(0)
    for _ in range(300):
        sizes = [rng.randrange(1, 30) for _ in range(rng.randrange(1, 40))]
        least, most = 32, 64
        found = spans(sizes, least, most, 12)
        assert sorted({s for span in found for s in span}) == list(range(len(sizes)))
        assert all(a[0] < b[0] and a[-1] < b[-1] for a, b in itertools.pairwise(found))
        words = [sum(sizes[s] for s in span) for span in found]
        assert max(words) <= most and (len(found) == 1 or min(words) >= least)
        for a, b in itertools.pairwise(found[:-1]):
            assert sum(sizes[s] for s in set(a) & set(b)) <= 12


def test_evidence_takes_few_chunks_and_counts_sentences_in_them():
    database = Database([document(*[4] * 6), document(4, name="e")], ChunkSettings(4, 12, 4))
    assert list(database.passages) == ["d@1", "d@2", "d@3", "e"]
    assert database.places("d", 2) == [("d@1", 2), ("d@2", 0)]
    assert database.evidence([("d", 2), ("d", 4), ("e", 0)]) == (("d@2", 0), ("d@2", 2), ("e", 0))
    assert database.evidence([("d", 2), ("d", 2)]) == (("d@1", 2),)
    assert database.passages["d@2"].sentences == document(*[4] * 6).sentences[2:5]


def test_sizes_that_contradict_each_other():
    with pytest.raises(UserError, match="config.chunks: overlap must not exceed least"):
        ChunkSettings(64, 32, 10)
