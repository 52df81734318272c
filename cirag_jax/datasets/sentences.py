"""Sentences of a passage: its own where it brings them, otherwise split by rules."""

import functools
from collections.abc import Sequence

from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]

from cirag_jax.types import Passage


def sentences_of(passage: Passage) -> tuple[str, ...]:
    """The sentences of ``passage``, in order.

    Boundaries that the passage brings are returned as they are (blank ones included, because gold
    sentence indices count them) and never split again.

    What the splitter returns is free of blank sentences and of surrounding whitespace, and loses
    nothing but whitespace.
    """
    if passage.sentences is not None:
        return passage.sentences
    return split_sentences(passage.text)


@functools.lru_cache(maxsize=1 << 16)
def split_sentences(text: str) -> tuple[str, ...]:
    """Splits English ``text`` with Wikimedia's sentencex; cached, since every epoch asks again."""
    try:
        parts = [part.strip() for part in segment("en", text)]
    except UnicodeEncodeError:  # half of a surrogate pair, which a server's JSON may hold
        parts = [text.strip()]
    return tuple(part for part in parts if part)


def source_sentence(head: str, relation: str, tail: str, sentences: Sequence[str]) -> int | None:
    """Index of the sentence that holds most of the triple's words.

    KiRAG's rule: count the words of the triple that a sentence contains as substrings (case
    ignored), take the largest count; the first sentence wins a tie. So a triple that shares no word
    with the passage belongs to its first sentence. None where there are no sentences.
    """
    if not sentences:
        return None
    if len(sentences) == 1:
        return 0
    words = f"{head} {relation} {tail}".lower().split()
    counts = [sum(word in sentence for word in words) for sentence in map(str.lower, sentences)]
    return counts.index(max(counts))
