"""Where a text is cut into overlapping chunks of whole sentences (GRADE, section 4.1 and A.8).

The paper gives lengths and overlap in tokens, which in its code are words. A cut within a sentence
would leave a gold sentence whole in no chunk, so sentences stay whole and neighbours share as many
of them as fit in the overlap.
"""

import dataclasses
from collections.abc import Sequence

from cirag_jax.errors import UserError, check_at_least


@dataclasses.dataclass(frozen=True)
class ChunkSettings:
    """Sizes in words; beside these the paper has 64 to 128 with 25, and 256 to 512 with 100.

    Attributes:
      least: words of a chunk; a text that has fewer is one chunk.
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


def spans(sentences: Sequence[str], settings: ChunkSettings) -> list[range]:
    """The sentences of every chunk, in order; a last one that were too short reaches back."""
    sizes = [len(sentence.split()) for sentence in sentences]
    found: list[range] = []
    start = 0
    while start < len(sizes):
        end, words = start, 0
        while end < len(sizes) and (end == start or words + sizes[end] <= settings.most):
            words += sizes[end]
            end += 1
        found.append(range(start, end))
        if end == len(sizes):
            break
        start, repeated = end, 0
        while start - 1 > found[-1].start and repeated + sizes[start - 1] <= settings.overlap:
            start -= 1
            repeated += sizes[start]
        # A long sentence must follow what is repeated, or nothing new would be told.
        while start < end and sum(sizes[start : end + 1]) > settings.most:
            start += 1
    if len(found) > 1:
        before, last = found[-2:]
        first = last.start
        while first > before.start + 1:
            words = sum(sizes[first : last.stop])
            if words >= settings.least or words + sizes[first - 1] > settings.most:
                break
            first -= 1
        found[-1] = range(first, last.stop)
    return found
