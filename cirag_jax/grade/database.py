"""The database: documents in overlapping chunks of whole sentences (section 4.1, A.8)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cirag_jax.datasets.chunks import ChunkSettings, spans
from cirag_jax.errors import UserError
from cirag_jax.grade.records import Document
from cirag_jax.types import Passage

Place = tuple[str, int]  # a document and a sentence of it, or a chunk and a sentence of it


class Chunk(NamedTuple):
    """A passage, and which sentences of its document it has."""

    passage: Passage
    document: str
    sentences: range


def chunk(document: Document, settings: ChunkSettings) -> tuple[Chunk, ...]:
    """A document's chunks, in order."""
    found = spans(document.sentences, settings)
    return tuple(_passage(document, n, span, len(found)) for n, span in enumerate(found, 1))


def _passage(document: Document, number: int, span: range, count: int) -> Chunk:
    sentences = document.sentences[span.start : span.stop]
    name = document.id if count == 1 else f"{document.id}@{number}"
    return Chunk(Passage(name, document.title, " ".join(sentences), sentences), document.id, span)


def _by_id(chunks: Iterable[Chunk]) -> dict[str, Passage]:
    found: dict[str, Chunk] = {}
    for one in chunks:
        other = found.setdefault(one.passage.id, one)
        if other is not one:
            raise UserError(
                f"the documents {other.document!r} and {one.document!r} both have a chunk "
                f"{one.passage.id!r}; give one of them another id."
            )
    return {name: one.passage for name, one in found.items()}


class Database:
    """The chunks of documents, and where in them a sentence of a document stands."""

    def __init__(self, documents: Iterable[Document], settings: ChunkSettings):
        self.chunks = tuple(c for document in documents for c in chunk(document, settings))
        self._holding: dict[Place, list[Chunk]] = {}
        for one in self.chunks:
            for sentence in one.sentences:
                self._holding.setdefault((one.document, sentence), []).append(one)
        self.passages: Mapping[str, Passage] = _by_id(self.chunks)

    def places(self, document: str, sentence: int) -> list[Place]:
        """The chunks that hold a sentence, with its place in each."""
        found = self._holding[document, sentence]
        return [(one.passage.id, sentence - one.sentences.start) for one in found]

    def evidence(self, sentences: Sequence[Place]) -> tuple[Place, ...]:
        """For every sentence of documents one place in a chunk, in few chunks.

        Chunks overlap: of those that hold a sentence, the one that holds most of the sentences is
        taken, so that to have found one is to have found what it is evidence for.
        """
        options = [self.places(*place) for place in dict.fromkeys(sentences)]
        counts: dict[str, int] = {}
        for found in options:
            for name, _ in found:
                counts[name] = counts.get(name, 0) + 1
        return tuple(max(found, key=lambda place: counts[place[0]]) for found in options)
