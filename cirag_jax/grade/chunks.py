"""The database: documents in overlapping chunks of whole sentences (section 4.1, A.8)."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cirag_jax.errors import UserError, check_at_least
from cirag_jax.grade.records import Document
from cirag_jax.types import Passage

Place = tuple[str, int]  # a document and a sentence of it, or a chunk and a sentence of it


@dataclasses.dataclass(frozen=True)
class ChunkSettings:
    """Sizes in words; beside these the paper has 64 to 128 with 25, and 256 to 512 with 100.

    Attributes:
      least: words of a chunk; a document that has fewer is one chunk.
      most: words of a chunk; a longer sentence is a chunk of its own.
      overlap: words that a chunk repeats of the one before, at most.
    """

    least: int = 128
    most: int = 256
    overlap: int = 50

    def __post_init__(self):
        check_at_least(1, self, "least", prefix="config.chunks.")
        check_at_least(0, self, "overlap", prefix="config.chunks.")
        if not self.overlap <= self.least <= self.most:
            raise UserError(
                "config.chunks: overlap must not exceed least, and least not most "
                f"({self.overlap}, {self.least}, {self.most})."
            )


class Chunk(NamedTuple):
    """A passage, and which sentences of its document it has."""

    passage: Passage
    document: str
    sentences: range


def chunk(document: Document, settings: ChunkSettings) -> tuple[Chunk, ...]:
    """A document's chunks, in order; the last reaches further back where it would be too short."""
    sizes = [len(sentence.split()) for sentence in document.sentences]
    spans: list[range] = []
    start = 0
    while start < len(sizes):
        end, words = start, 0
        while end < len(sizes) and (end == start or words + sizes[end] <= settings.most):
            words += sizes[end]
            end += 1
        spans.append(range(start, end))
        if end == len(sizes):
            break
        start, repeated = end, 0
        while start - 1 > spans[-1].start and repeated + sizes[start - 1] <= settings.overlap:
            start -= 1
            repeated += sizes[start]
        # A long sentence must follow what is repeated, or nothing new would be told.
        while start < end and sum(sizes[start : end + 1]) > settings.most:
            start += 1
    last = spans[-1] if spans else range(0)
    first = last.start
    while len(spans) > 1 and first > spans[-2].start + 1:
        words = sum(sizes[first : last.stop])
        if words >= settings.least or words + sizes[first - 1] > settings.most:
            break
        first -= 1
    if spans:
        spans[-1] = range(first, last.stop)
    return tuple(
        _passage(document, number, span, len(spans)) for number, span in enumerate(spans, 1)
    )


def _passage(document: Document, number: int, span: range, count: int) -> Chunk:
    sentences = document.sentences[span.start : span.stop]
    name = document.id if count == 1 else f"{document.id}@{number}"
    return Chunk(Passage(name, document.title, " ".join(sentences), sentences), document.id, span)


class Database:
    """The chunks of documents, and where in them a sentence of a document stands."""

    def __init__(self, documents: Iterable[Document], settings: ChunkSettings):
        self.chunks = tuple(c for document in documents for c in chunk(document, settings))
        self._holding: dict[Place, list[Chunk]] = {}
        for one in self.chunks:
            for sentence in one.sentences:
                self._holding.setdefault((one.document, sentence), []).append(one)
        self.passages: Mapping[str, Passage] = {c.passage.id: c.passage for c in self.chunks}

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
