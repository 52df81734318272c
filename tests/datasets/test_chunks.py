"""Chunks: their sizes, overlap and sentences."""

import itertools
import random

import pytest

from cirag_jax.datasets import chunks
from cirag_jax.datasets.chunks import ChunkSettings
from cirag_jax.errors import UserError


def spans(sizes, *settings):
    sentences = [" ".join(["w"] * size) for size in sizes]
    return [list(one) for one in chunks.spans(sentences, ChunkSettings(*settings))]


def test_spans_whole_sentences_overlap():
    assert spans([4] * 6, 4, 12, 4) == [[0, 1, 2], [2, 3, 4], [4, 5]]
    assert spans([4] * 6, 4, 12, 0) == [[0, 1, 2], [3, 4, 5]]
    assert spans([4, 4], 4, 12, 4) == [[0, 1]]  # A short text is one chunk.
    assert spans([], 4, 12, 4) == []


def test_spans_short_last_chunk_is_extended_backwards():
    assert spans([4] * 4, 8, 12, 0) == [[0, 1, 2], [2, 3]]


def test_spans_long_sentence_is_a_separate_chunk():
    assert spans([4, 30, 4], 4, 12, 4) == [[0], [1], [2]]
    assert spans([4, 4, 30, 4], 4, 12, 4) == [[0, 1], [2], [3]]


def test_spans_default_sizes_are_those_of_the_paper():
    """If sentences have ten words, 25 fit in a chunk and five in its overlap."""
    assert [(one[0], one[-1] + 1) for one in spans([10] * 26)] == [(0, 25), (13, 26)]
    assert [(one[0], one[-1] + 1) for one in spans([10] * 60)] == [(0, 25), (20, 45), (40, 60)]


def test_spans_tokens_make_shorter_chunks_than_words():
    """A word of two tokens makes chunks of half as many words."""
    sentences = [" ".join(["word"] * 10)] * 60
    by_words = chunks.spans(sentences, ChunkSettings())
    by_tokens = chunks.spans(sentences, ChunkSettings(), lambda text: 2 * len(text.split()))
    assert max(map(len, by_words)) == 25 and max(map(len, by_tokens)) == 12


@pytest.mark.parametrize("size", [(64, 128, 25), (128, 256, 50), (256, 512, 100)])
def test_spans_cover_all_sentences_within_the_sizes(size):
    rng = random.Random(0)
    least, most, overlap = size
    for _ in range(100):
        sizes = [rng.randrange(1, least) for _ in range(rng.randrange(1, 40))]
        found = spans(sizes, *size)
        assert sorted({s for span in found for s in span}) == list(range(len(sizes)))
        assert all(a[0] < b[0] and a[-1] < b[-1] for a, b in itertools.pairwise(found))
        words = [sum(sizes[s] for s in span) for span in found]
        assert max(words) <= most and (len(found) == 1 or min(words) >= least)
        for a, b in itertools.pairwise(found[:-1]):
            assert sum(sizes[s] for s in set(a) & set(b)) <= overlap


def test_chunk_settings_contradictory_sizes_are_refused():
    with pytest.raises(UserError, match="config.chunks: expected overlap <= least <= most"):
        ChunkSettings(64, 32, 10)
