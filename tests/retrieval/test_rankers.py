from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from cirag_jax.errors import UserError
from cirag_jax.models.io import workdir
from cirag_jax.retrieval.encoders import open_encoder_for
from cirag_jax.retrieval.rankers import (
    BiEncoderRanker,
    BM25Ranker,
    TripleText,
    check_ranker,
    encoder_config,
    text_of,
    triple_text_of,
)
from cirag_jax.types import Passage, Triple
from configs import retrievers
from configs.methods import blocks
from tests import tiny


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    config = retrievers.encoder()
    config.model = str(tiny.model_folder(tmp_path_factory.mktemp("tiny") / "model"))
    return open_encoder_for(config.lock())


def test_bi_encoder_scores_are_cosines_in_text_order(tiny_encoder):
    queries, texts = ["who is saint", "corum"], [["a", "b", "corum", "a"], ["b"]]
    scores = BiEncoderRanker(tiny_encoder).score(queries, texts)
    for query, group, score in zip(queries, texts, scores, strict=True):
        expected = tiny_encoder.encode(group) @ tiny_encoder.encode([query], "query")[0]
        np.testing.assert_allclose(score, expected, atol=1e-6)
        assert score.dtype == np.float32
    none = BiEncoderRanker(tiny_encoder).score(["a"], [[]])
    assert [s.shape for s in none] == [(0,)]


def test_text_of_triple_and_passage():
    triple = Triple("Ås  kyrka", "I", "Öst")
    assert text_of(triple) == "('s kyrka', 'i', 'st')"
    assert text_of(triple, TripleText("tuple", "unicode")) == "('ås kyrka', 'i', 'öst')"
    assert text_of(triple, TripleText("angle")) == "<Ås  kyrka; I; Öst>"
    passage = Passage("p", "Lund", "A town.")
    assert "Lund" in text_of(passage) and "A town." in text_of(passage)
    assert text_of("A (town)") == "A (town)"


def test_rankers_score_triples_passages_and_sentences(tiny_encoder):
    texts = (Triple("saint", "of", "x"), Passage("p", "corum", "who"), "a saint")
    written = tuple(text_of(text) for text in texts)
    for ranker in (BiEncoderRanker(tiny_encoder), BM25Ranker()):
        (mixed,), (plain,) = ranker.score(["saint"], [texts]), ranker.score(["saint"], [written])
        np.testing.assert_array_equal(mixed, plain)


def test_bm25_ranks_by_words():
    texts = ["a weaver sailed", "the town of weavers", "nothing here"]
    first, second, none = BM25Ranker().score(["town", "sailing", "x"], [texts, texts, []])
    assert first.argmax() == 1 and second.argmax() == 0 and none.shape == (0,)
    assert first[2] == 0 and first.dtype == np.float32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "oracle"}, "kind='oracle' is not one of bi_encoder, aligner"),
        ({"kind": "aligner"}, r"kind=aligner needs config\.rankers\.units\.model"),
        ({"kind": "cross_encoder"}, "kind=cross_encoder needs"),
        ({"triple_text": "json"}, "is not one of tuple, angle, plain, null"),
    ],
)
def test_check_ranker_bad_block_is_refused(fields, words):
    block = retrievers.ranker()
    block.update(fields)
    with pytest.raises(UserError, match=words):
        check_ranker(block, "units")


ANGLE = TripleText("angle")


@pytest.mark.parametrize(
    ("meta", "fields", "text", "assumed"),
    [
        (None, {}, TripleText("tuple", "unicode"), False),  # a frozen encoder, as in the paper
        (None, {"kind": "bm25"}, TripleText("tuple", "unicode"), False),
        (None, {"kind": "aligner"}, ANGLE, True),
        (None, {"triple_text": "angle"}, TripleText("angle", "unicode"), False),
        ({"triple_text": {"form": "angle", "normalization": "ascii"}}, {}, ANGLE, False),
        ({"triple_text": {"form": "tuple", "normalization": "ascii"}}, {}, TripleText(), False),
        ({"triple_text": None}, {}, TripleText("tuple", "unicode"), False),
        ({"units": "triple"}, {}, ANGLE, True),
        ({"units": "sentence"}, {}, TripleText("tuple", "unicode"), False),
        ({"component": "cross_encoder"}, {}, TripleText("tuple", "unicode"), True),
        ({"triple_text": None}, {"triple_text": "tuple"}, TripleText("tuple", "unicode"), False),
    ],
)
def test_triple_text_follows_the_training(tmp_path, monkeypatch, meta, fields, text, assumed):
    config: Any = ConfigDict({"encoder": retrievers.encoder(), "rankers": {"it": {}}})
    config.rankers.it = retrievers.ranker()
    config.rankers.it.update({"model": str(tmp_path), "normalization": "unicode", **fields})
    if meta is not None:
        (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(workdir, "ranker_meta", lambda _: {"component": "aligner", **(meta or {})})
    assert triple_text_of(config, "it") == (text, assumed)


class _Recording:
    """An encoder that records the texts of each role."""

    dim = 2

    def __init__(self):
        self.calls = []

    def encode(self, texts, kind="passage", progress=None):
        self.calls.append((kind, list(texts)))
        return np.array([[len(text), 1.0] for text in texts], np.float32)


def test_bi_encoder_ranker_embeds_triples_in_their_own_role():
    encoder = _Recording()
    passage, triple = Passage("p", "T", "text"), Triple("a", "is", "b")
    scores = BiEncoderRanker(encoder).score(["q", "r"], [[passage, triple, "x"], []])
    tuple_text = "('a', 'is', 'b')"
    assert encoder.calls == [
        ("passage", ["T. text", "x"]), ("triple", [tuple_text]), ("query", ["q", "r"])
    ]  # fmt: skip
    assert scores[0].tolist() == [8.0, len(tuple_text) + 1.0, 2.0] and scores[1].shape == (0,)


def test_ranker_has_its_own_instructions():
    config = blocks.method("cirag")
    config.encoder.instructions.query, config.encoder.dimensions = "retrieve: ", 99
    config.rankers.triples.instructions.triple = "fact: "
    own = encoder_config(config, "triples")
    assert own.instructions.to_dict() == {
        "query": "retrieve: ",
        "passage": None,
        "triple": "fact: ",
    }
    assert config.encoder.instructions.triple is None and own.dimensions == 99
    config.rankers.triples.model = "elsewhere"  # The encoder's settings are of another model.
    other = encoder_config(config, "triples")
    assert other.instructions.to_dict() == {"query": None, "passage": None, "triple": "fact: "}
    assert (other.model, other.dimensions) == ("elsewhere", None)


def test_check_ranker_instructions_of_other_kinds_are_refused():
    block = retrievers.ranker()
    block.kind, block.instructions.query = "bm25", "q: "
    with pytest.raises(UserError, match=r"instructions\.query needs .*kind=bi_encoder or aligner"):
        check_ranker(block, "triples")
