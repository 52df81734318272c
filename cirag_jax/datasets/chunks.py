"""Overlapping chunks of whole sentences (GRADE, section 4.1 and A.8).

The paper gives lengths in tokens, but its code counts words. Sentences are never cut, so every gold
sentence is complete in at least one chunk. Neighboring chunks share the sentences that fit in the
overlap.
"""

import dataclasses
from collections.abc import Sequence

from cirag_jax.errors import UserError
from cirag_jax.types import Count, PositiveInt
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class ChunkSettings:
    """Sizes in words; the paper also uses 64-128 with overlap 25, and 256-512 with overlap 100.

    Attributes:
      least: minimum size of a chunk; a shorter text is one chunk.
      most: maximum size of a chunk; a longer sentence is a chunk of its own.
      overlap: maximum overlap of a chunk with the previous one.
    """

    least: PositiveInt = 128
    most: int = 256
    overlap: Count = 50

    def __post_init__(self):
        check_fields(self, prefix="config.chunks.")
        if not self.overlap <= self.least <= self.most:
            raise UserError(
                "config.chunks: expected overlap <= least <= most, not "
                f"{self.overlap}, {self.least}, {self.most}."
            )


def spans(sentences: Sequence[str], settings: ChunkSettings) -> list[range]:
    """Returns the sentence indices of each chunk; a short last chunk is extended backward."""
    sizes = [len(sentence.split()) for sentence in sentences]
    chunks: list[range] = []
    start = 0
    while start < len(sizes):
        end, words = start, 0
        while end < len(sizes) and (end == start or words + sizes[end] <= settings.most):
            words += sizes[end]
            end += 1
        chunks.append(range(start, end))
        if end == len(sizes):
            break
        start, repeated = end, 0
        while start - 1 > chunks[-1].start and repeated + sizes[start - 1] <= settings.overlap:
            start -= 1
            repeated += sizes[start]
        # The overlap must leave room for the next sentence.
        while start < end and sum(sizes[start : end + 1]) > settings.most:
            start += 1
    if len(chunks) > 1:
        before, last = chunks[-2:]
        first = last.start
        while first > before.start + 1:
            words = sum(sizes[first : last.stop])
            if words >= settings.least or words + sizes[first - 1] > settings.most:
                break
            first -= 1
        chunks[-1] = range(first, last.stop)
    return chunks
