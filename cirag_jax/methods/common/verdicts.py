"""What is read of a reply that should be one word; prose that holds the word may say the opposite.

A reply is hostile text: it is searched, never evaluated.
"""

import re

_LEADING = re.compile(
    r"\W*(?:answer\s*[:=]\W*)?([^\W\d_]+)"
    r"""(?=["'”’*_`)\]}]*(?:\s*\Z|[.,:;!]|\s*[\n–—(]|\s-\s))""",
    re.IGNORECASE,
)


def without_thoughts(text: str) -> str:
    """What a reasoning model says after ``</think>``; nothing where its thoughts have no end."""
    said = text.rpartition("</think>")[2]
    return "" if said.lstrip().startswith("<think>") else said


def leading_word(text: str) -> str:
    """The word that a text is, or that it begins with before a sign, in lower case; else empty."""
    found = _LEADING.match(text)
    return found[1].casefold() if found else ""
