"""A database of documents in overlapping chunks of complete sentences (section 4.1, A.8)."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cirag_jax.datasets.chunks import ChunkSettings, Size, num_words, spans
from cirag_jax.errors import UserError
from cirag_jax.grade.records import Document
from cirag_jax.types import Passage

Place = tuple[str, int]  # (document, sentence) or (chunk, sentence)


class Chunk(NamedTuple):
    """A passage with a range of sentences of a document."""

    passage: Passage
    document: str
    sentences: range


def chunk(document: Document, settings: ChunkSettings, size: Size = num_words) -> tuple[Chunk, ...]:
    """Returns a document's chunks, in order."""
    ranges = spans(document.sentences, settings, size)
    return tuple(_chunk(document, n, span, len(ranges)) for n, span in enumerate(ranges, 1))


def _chunk(document: Document, number: int, span: range, count: int) -> Chunk:
    sentences = document.sentences[span.start : span.stop]
    name = document.id if count == 1 else f"{document.id}@{number}"
    return Chunk(Passage(name, document.title, " ".join(sentences), sentences), document.id, span)


def _by_id(chunks: Iterable[Chunk]) -> dict[str, Passage]:
    by_id: dict[str, Chunk] = {}
    for chunk in chunks:
        other = by_id.setdefault(chunk.passage.id, chunk)
        if other is not chunk:
            raise UserError(
                f"the documents {other.document!r} and {chunk.document!r} both have a chunk "
                f"{chunk.passage.id!r}; give one of them another id."
            )
    return {name: chunk.passage for name, chunk in by_id.items()}


class Database:
    """The chunks of documents, and the places of the documents' sentences in the chunks."""

    def __init__(
        self, documents: Iterable[Document], settings: ChunkSettings, size: Size = num_words
    ):
        self.chunks = tuple(c for document in documents for c in chunk(document, settings, size))
        self._chunks_with: dict[Place, list[Chunk]] = {}
        for part in self.chunks:
            for sentence in part.sentences:
                self._chunks_with.setdefault((part.document, sentence), []).append(part)
        self.passages: Mapping[str, Passage] = _by_id(self.chunks)

    def places(self, document: str, sentence: int) -> list[Place]:
        """Returns the chunks that contain a sentence, and the sentence's index in each chunk."""
        chunks = self._chunks_with[document, sentence]
        return [(part.passage.id, sentence - part.sentences.start) for part in chunks]

    def evidence(self, sentences: Sequence[Place]) -> tuple[Place, ...]:
        """Returns one place for each of ``sentences``, using few chunks.

        Chunks overlap. From the chunks with a sentence, the chunk with the largest number of
        ``sentences`` is chosen.
        """
        options = [self.places(*place) for place in dict.fromkeys(sentences)]
        counts = collections.Counter(name for places in options for name, _ in places)
        return tuple(max(places, key=lambda place: counts[place[0]]) for places in options)
