"""Sentences of passages, either as given in the dataset or split by rules."""

import functools
from collections.abc import Sequence

from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]

from cirag_jax.types import Passage


def sentences_of(passage: Passage) -> tuple[str, ...]:
    """Returns the sentences of a passage, in order.

    Sentences given in the dataset are returned unchanged, including blank ones, because gold
    sentence indices count them. Otherwise the text is split, and blank sentences are dropped.
    """
    if passage.sentences is not None:
        return passage.sentences
    return split_sentences(passage.text)


@functools.lru_cache(maxsize=1 << 16)
def split_sentences(text: str) -> tuple[str, ...]:
    """Splits English text with Wikimedia's sentencex; cached, because every epoch needs it."""
    try:
        parts = [part.strip() for part in segment("en", text)]
    except UnicodeEncodeError:  # Half of a surrogate pair, for example from a server's JSON.
        parts = [text.strip()]
    return tuple(part for part in parts if part)


def source_sentence(head: str, relation: str, tail: str, sentences: Sequence[str]) -> int | None:
    """Returns the index of the sentence with most of a triple's words, or None without sentences.

    This is KiRAG's rule: a word of the triple counts if the sentence contains it as a substring,
    ignoring case, and ties go to the first sentence. A triple that shares no word with the passage
    is therefore assigned to the first sentence.
    """
    if not sentences:
        return None
    if len(sentences) == 1:
        return 0
    words = f"{head} {relation} {tail}".lower().split()
    counts = [sum(word in sentence for word in words) for sentence in map(str.lower, sentences)]
    return counts.index(max(counts))
