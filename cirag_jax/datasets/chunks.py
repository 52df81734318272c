"""Overlapping chunks of whole sentences (GRADE, section 4.1 and A.8).

The paper and its code give the sizes of chunks in tokens (of tiktoken); the code counts words only
to filter articles. Sentences are never cut, so every gold sentence is complete in at least one
chunk. Neighboring chunks share the sentences that fit in the overlap.
"""

import dataclasses
from collections.abc import Callable, Sequence

from cirag_jax.errors import UserError
from cirag_jax.types import Count, PositiveInt
from cirag_jax.validation import check_fields


@dataclasses.dataclass(frozen=True)
class ChunkSettings:
    """Sizes of chunks; the paper also uses 64-128 with overlap 25, and 256-512 with overlap 100.

    Attributes:
      least: minimum size of a chunk; a shorter text is one chunk.
      most: maximum size of a chunk; a longer sentence is a chunk of its own.
      overlap: maximum overlap of a chunk with the previous one.
      tokenizer: the model whose tokens are counted (a folder, a .gguf file, package:NAME or a hub
        id); without a name, words are counted. A word of English prose has about 1.3 tokens.
    """

    least: PositiveInt = 128
    most: int = 256
    overlap: Count = 50
    tokenizer: str = ""

    def __post_init__(self):
        check_fields(self, prefix="config.chunks.")
        if not self.overlap <= self.least <= self.most:
            raise UserError(
                "config.chunks: expected overlap <= least <= most, not "
                f"{self.overlap}, {self.least}, {self.most}."
            )


Size = Callable[[str], int]  # Returns the size of a sentence, in words or tokens.


def num_words(text: str) -> int:
    """Returns the number of words."""
    return len(text.split())


def spans(sentences: Sequence[str], settings: ChunkSettings, size: Size = num_words) -> list[range]:
    """Returns the sentence indices of each chunk; a short last chunk is extended backward."""
    sizes = [size(sentence) for sentence in sentences]
    chunks: list[range] = []
    start = 0
    while start < len(sizes):
        end, total = start, 0
        while end < len(sizes) and (end == start or total + sizes[end] <= settings.most):
            total += sizes[end]
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
            total = sum(sizes[first : last.stop])
            if total >= settings.least or total + sizes[first - 1] > settings.most:
                break
            first -= 1
        chunks[-1] = range(first, last.stop)
    return chunks
