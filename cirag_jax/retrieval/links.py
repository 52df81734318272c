"""Links between passages: a text links to every passage whose title it names.

An encyclopedia calls things by their titles, so that the passage of a question's next hop is often
named, word for word, in the fact before it.
"""

import re
from collections.abc import Iterable, Sequence

from cirag_jax.types import Passage

# A title of one word is a name only if it is written so and not short: "Selena", not "Run" or "It".
_LEAST_LETTERS = 4


class TitleIndex:
    """Finds the passages that a text names.

    A title is known with and without what stands in parentheses at its end ("Tuos (film)"). Words
    are compared without case, but one of them must begin with a capital in the text. Where titles
    overlap the longer is meant.

    Args:
      passages: the corpus; several may share a title.
    """

    def __init__(self, passages: Sequence[Passage]):
        self._rows: dict[tuple[str, ...], list[int]] = {}
        for row, passage in enumerate(passages):
            plain = re.sub(r"\s*\([^()]*\)\s*$", "", passage.title)
            for title in dict.fromkeys((_folded(passage.title), _folded(plain))):
                if title:
                    self._rows.setdefault(title, []).append(row)
        self._longest = max(map(len, self._rows), default=0)

    def named(self, text: str) -> tuple[int, ...]:
        """Rows of the passages that ``text`` names, in the order of the text, each once."""
        words = re.findall(r"\w+", text)
        folded, found, place = _folded(text), dict[int, None](), 0
        while place < len(words):
            step = 1
            for size in range(min(self._longest, len(words) - place), 0, -1):
                rows = self._rows.get(folded[place : place + size])
                if rows and _is_name(words[place : place + size]):
                    found.update(dict.fromkeys(rows))
                    step = size
                    break
            place += step
        return tuple(found)


def _folded(text: str) -> tuple[str, ...]:
    return tuple(word.casefold() for word in re.findall(r"\w+", text))


def _is_name(words: Iterable[str]) -> bool:
    words = list(words)
    long_enough = len(words) > 1 or len(words[0]) >= _LEAST_LETTERS
    return long_enough and any(word[0].isupper() for word in words)
