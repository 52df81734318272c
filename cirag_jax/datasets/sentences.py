"""Sentences of a passage: its own where it brings them, otherwise split by rules."""

import functools

from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue]

from cirag_jax.types import Passage


def sentences_of(passage: Passage, language: str = "en") -> tuple[str, ...]:
    """The sentences of ``passage``, in order.

    Boundaries that the passage brings are returned as they are (blank ones included, because gold
    sentence indices count them) and never split again.

    Args:
        passage: The passage.
        language: ISO 639-1 code for the splitter's rules; used only without own boundaries.

    Returns:
        The sentences; what the splitter returns is free of blank sentences and of surrounding
        whitespace, and loses nothing but whitespace.
    """
    if passage.sentences is not None:
        return passage.sentences
    return split_sentences(passage.text, language)


@functools.lru_cache(maxsize=1 << 16)
def split_sentences(text: str, language: str = "en") -> tuple[str, ...]:
    """Splits ``text`` with Wikimedia's sentencex; cached, since every epoch asks again."""
    parts = (part.strip() for part in segment(language, text))
    return tuple(part for part in parts if part)
