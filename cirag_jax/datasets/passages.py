"""Identity of passages without an official id."""

import hashlib
from collections.abc import Sequence

from cirag_jax.types import Passage


def passage_of(title: str, text: str, sentences: Sequence[str] | None = None) -> Passage:
    """Returns a passage whose id is a hash of its title and its text or sentences.

    Official ``sentences`` replace ``text``. They are stripped, but blank ones are kept, because
    official sentence indices count them.
    """
    if sentences is not None:
        sentences = tuple(sentence.strip() for sentence in sentences)
        text = " ".join(filter(None, sentences))
    identity = "\x1e".join((title, *(sentences if sentences is not None else (text,))))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return Passage(digest, title, text, None if sentences is None else tuple(sentences))
