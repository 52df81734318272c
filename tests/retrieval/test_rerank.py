import numpy as np
import pytest

from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.rerank import BiEncoderReranker
from configs import retrievers
from tests import tiny


class _Noting:
    """An encoder that notes which passages it encodes."""

    def __init__(self, encoder):
        self._encoder = encoder
        self.identity, self.dim = encoder.identity, encoder.dim
        self.passages = []

    def encode(self, texts, kind="passage", progress=None):
        if kind == "passage":
            self.passages.append(list(texts))
        return self._encoder.encode(texts, kind, progress)


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    config = retrievers.encoder()
    config.model = str(tiny.model_folder(tmp_path_factory.mktemp("tiny") / "model"))
    return open_encoder_for(config.lock())


def test_scores_are_cosines_in_the_order_of_the_texts(tiny_encoder):
    queries, texts = ["who is saint", "corum"], [["a", "b", "corum", "a"], ["b"]]
    scores = BiEncoderReranker(tiny_encoder).score(queries, texts)
    for query, group, score in zip(queries, texts, scores, strict=True):
        expected = tiny_encoder.encode(group) @ tiny_encoder.encode([query], "query")[0]
        np.testing.assert_allclose(score, expected, atol=1e-6)
        assert score.dtype == np.float32
    none = BiEncoderReranker(tiny_encoder).score(["a"], [[]])
    assert [s.shape for s in none] == [(0,)]


def test_a_text_is_embedded_once(tiny_encoder):
    encoder = _Noting(tiny_encoder)
    reranker = BiEncoderReranker(encoder)
    first = reranker.score(["q"], [["a", "b"]])
    second = reranker.score(["q", "r"], [["b", "c"], ["a", "c"]])
    assert encoder.passages == [["a", "b"], ["c"]]
    np.testing.assert_array_equal(second[0][0], first[0][1])


def test_what_is_remembered_is_bounded(tiny_encoder):
    encoder = _Noting(tiny_encoder)
    reranker = BiEncoderReranker(encoder, max_texts=3)
    expected = {t: BiEncoderReranker(tiny_encoder).score(["q"], [[t]])[0][0] for t in "abcdefgh"}
    for group in (["a", "b"], ["b", "c"], ["c", "d"], list("abcdefgh"), ["h"]):
        (scores,) = reranker.score(["q"], [group])
        np.testing.assert_allclose(scores, [expected[t] for t in group], atol=1e-6)
    assert encoder.passages[:3] == [["a", "b"], ["c"], ["c", "d"]]
