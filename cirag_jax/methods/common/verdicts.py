"""Parsing replies that should be a single word.

A word inside prose does not count, since the prose may say the opposite.
"""

import re

_LEADING = re.compile(
    r"\W*(?:answer\s*[:=]\W*)?([^\W\d_]+)"
    r"""(?=["'”’*_`)\]}]*(?:\s*\Z|[.,:;!]|\s*[\n–—(]|\s-\s))""",
    re.IGNORECASE,
)


def without_thoughts(text: str) -> str:
    """Returns the text after ``</think>``; empty if the thoughts do not end."""
    reply = text.rpartition("</think>")[2]
    return "" if reply.lstrip().startswith("<think>") else reply


def leading_word(text: str) -> str:
    """Returns the word, in lower case, that is the text or precedes punctuation; else empty."""
    match = _LEADING.match(text)
    return match[1].casefold() if match else ""
