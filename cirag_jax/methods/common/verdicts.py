"""Parsing of replies that should be a single word.

A word within prose is ignored, because the prose may say the opposite.
"""

import re

_LEADING = re.compile(
    r"\W*(?:answer\s*[:=]\W*)?([^\W\d_]+)"
    r"""(?=["'”’*_`)\]}]*(?:\s*\Z|[.,:;!]|\s*[\n–—(]|\s-\s))""",
    re.IGNORECASE,
)


def leading_word(text: str) -> str:
    """Returns the first word in lower case; empty unless punctuation or nothing follows."""
    match = _LEADING.match(text)
    return match[1].casefold() if match else ""
