"""Ranking passages by their best unit, compared with a direct search over sentences."""

import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.index import open_retriever
from cirag_jax.types import Feedback, Passage, Triple
from configs import retrievers
from tests import tiny

_QUERIES = ["where was baldia born?", "patron of corum", "saint saint"]
_PASSAGES = [
    *tiny.dataset().corpus.values(),
    Passage("blank", "Blank", " ", (" ",)),
    Passage("two", "Corum", "", ("The patron of Corum is a saint.", "It lies by the sea.")),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    config = retrievers.encoder()
    config.model = str(tiny.model_folder(tmp_path_factory.mktemp("tiny") / "model"))
    return open_encoder_for(config.lock())


def _open(encoder, **fields):
    config = retrievers.retriever()
    config.update({"units": "sentence", **fields})
    return open_retriever(config, _PASSAGES, encoder)


def _best_scores(encoder, query):
    """Returns the score of the best sentence of each passage that has sentences."""
    best = {}
    for row, passage in enumerate(_PASSAGES):
        texts = [f"{passage.title}: {s}" for s in passage.sentences or (passage.text,) if s.strip()]
        if texts:
            scores = encoder.encode(texts, "passage") @ encoder.encode([query], "query")[0]
            best[row] = scores.max()
    return best


def test_unit_index_passage_score_is_its_best_sentence(encoder):
    assert all(p.sentences is not None for p in _PASSAGES)
    row_QK, score_QK = _open(encoder).search(_QUERIES, 5)
    for query, rows, scores in zip(_QUERIES, row_QK, score_QK, strict=True):
        best = _best_scores(encoder, query)
        expected = sorted(best, key=lambda row: -best[row])[:5]
        assert rows.tolist() == expected
        np.testing.assert_allclose(scores, [best[row] for row in expected], rtol=1e-5)


def test_unit_index_triples_find_their_passages(encoder):
    triples = {**tiny.dataset().triples, "two": (Triple("Corum", "has patron", "a saint"),)}
    config = retrievers.retriever()
    config.units = "triple"
    index = open_retriever(config, _PASSAGES, encoder, triples=triples)
    rows, _ = index.search(["<corum; has patron; a saint>"], len(_PASSAGES))
    assert rows[0, 0] == len(_PASSAGES) - 1
    with_triples = {row for row, p in enumerate(_PASSAGES) if triples.get(p.id)}
    assert set(rows[0].tolist()) == with_triples | {-1} and len(with_triples) > 2
    with pytest.raises(UserError, match="no passage has a sentence or a triple"):
        open_retriever(config, _PASSAGES, encoder)


def test_unit_index_returns_only_allowed_passages(encoder):
    blank, two = len(_PASSAGES) - 2, len(_PASSAGES) - 1
    allowed = [np.array(rows, np.int32) for rows in ([two, 0], [blank], [])]
    row_QK, score_QK = _open(encoder).search(_QUERIES, 3, allowed)
    assert set(row_QK[0].tolist()) == {two, 0, -1}
    assert (row_QK[1:] == -1).all() and np.isneginf(score_QK[1:]).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"units": "page"}, "units='page' is not one of triple, sentence, passage"),
        ({"kind": "bm25"}, "units=sentence needs config.retriever.kind=exact"),
        ({"folder": "x"}, "and no folder"),
    ],
)
def test_open_retriever_impossible_units_are_refused(encoder, fields, words):
    with pytest.raises(UserError, match=words):
        _open(encoder, **fields)


def test_unit_index_refuses_feedback(encoder):
    with pytest.raises(UserError, match="an index over units does not support relevance feedback"):
        _open(encoder).search(["q"], 1, None, [Feedback(1.0, ())])
