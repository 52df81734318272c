"""Chunks of documents, and which chunks are the evidence of a question."""

import pytest

from cirag_jax.datasets.chunks import ChunkSettings
from cirag_jax.errors import UserError
from cirag_jax.grade.database import Database
from cirag_jax.grade.records import Document


def document(*sizes, name="d"):
    return Document(name, "T", tuple(" ".join([f"s{i}"] * n) for i, n in enumerate(sizes)))


def test_evidence_prefers_few_chunks():
    database = Database([document(*[4] * 6), document(4, name="e")], ChunkSettings(4, 12, 4))
    assert list(database.passages) == ["d@1", "d@2", "d@3", "e"]
    assert database.places("d", 2) == [("d@1", 2), ("d@2", 0)]
    assert database.evidence([("d", 2), ("d", 4), ("e", 0)]) == (("d@2", 0), ("d@2", 2), ("e", 0))
    assert database.evidence([("d", 2), ("d", 2)]) == (("d@1", 2),)
    assert database.passages["d@2"].sentences == document(*[4] * 6).sentences[2:5]


def test_database_rejects_clashing_chunk_ids():
    result = [document(*[4] * 6, name="a"), document(4, name="a@4"), document(4, name="a@2")]
    with pytest.raises(UserError, match="documents 'a' and 'a@2' both have a chunk 'a@2'; give"):
        Database(result, ChunkSettings(4, 12, 4))
    assert len(Database(result[:2], ChunkSettings(4, 12, 4)).passages) == 4
