"""Words of texts in any script, for BM25 and for links between titles."""

import itertools
import re
import unicodedata

# Thai, Lao, Burmese, Khmer and their neighbors are written without spaces between words.
_SOUTHEAST = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u1aaf\ua9e0-\ua9ff\uaa60-\uaa7f"
# So are Chinese and Japanese. Korean has spaces, but joins particles to words.
_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_EAST = f"{_HAN}\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff\ua000-\ua48f\u1100-\u11ff\uac00-\ud7a3"


def _marks() -> str:
    """Returns the ranges of combining marks: accents, vowel signs of Hindi, points of Arabic."""
    blocks = itertools.chain(range(0x300, 0x20000), range(0xE0100, 0xE01F0))
    codes = (code for code in blocks if unicodedata.category(chr(code))[0] == "M")
    runs = itertools.groupby(enumerate(codes), lambda pair: pair[1] - pair[0])
    spans = [[code for _, code in run] for _, run in runs]
    return "".join(f"{chr(span[0])}-{chr(span[-1])}" for span in spans)


# A character of `_JOINED` with its marks is a symbol.
_JOINED, _MARKS = f"{_SOUTHEAST}{_EAST}", _marks()
_SYMBOL = re.compile(f"[{_JOINED}]")
_SOUTHEAST_ASIAN = re.compile(f"[{_SOUTHEAST}]")
_IDEOGRAPH = re.compile(f"[{_HAN}]")
_RUN = re.compile(rf"[\w{_MARKS}]+")
_PART = re.compile(rf"[{_JOINED}][{_MARKS}]*|[^{_JOINED}]+")
_WORD = re.compile(r"\w\w+")


def words(text: str) -> list[str]:
    """Returns the words of a text; in scripts without spaces, its symbols."""
    if text.isascii():
        return _RUN.findall(text)
    return [part for run in _runs(text) for part in run]


def other_tokens(text: str) -> list[str]:
    r"""Returns tokens for BM25 in addition to the matches of ``\w\w+`` in lower case.

    Words with Unicode variants, other capitals or combining marks are normalized (NFKC, case
    folding). In scripts without spaces, the tokens are pairs of adjacent symbols, symbols that
    stand alone, and Chinese characters.
    """
    if text.isascii():
        return []
    tokens = (token for run in _runs(text) for token in _tokens(run))
    known = set(_WORD.findall(text.lower()))
    folded = (token.casefold() for token in tokens if len(token) > 1 or is_symbol(token))
    return [token for token in folded if token not in known]


def is_symbol(word: str) -> bool:
    """Returns whether a word is a symbol of a script without spaces."""
    return _SYMBOL.match(word) is not None


def is_southeast_asian(word: str) -> bool:
    """Returns whether a word is a symbol of Thai, Lao, Burmese, Khmer or a related script."""
    return _SOUTHEAST_ASIAN.match(word) is not None


def _runs(text: str) -> list[list[str]]:
    """Splits text at spaces and punctuation, and each part into symbols and other words."""
    # First NFC only, because NFKC would join the sign of "Acme™" to its word.
    found = _RUN.findall(unicodedata.normalize("NFC", text))
    return [_PART.findall(unicodedata.normalize("NFKC", run)) for run in found]


def _tokens(run: list[str]) -> list[str]:
    tokens = []
    for before, part, after in zip(["", *run], run, [*run[1:], ""], strict=False):
        if not is_symbol(part):
            tokens.append(part)
            continue
        if is_symbol(before):
            tokens.append(before + part)
        if _IDEOGRAPH.match(part) or not (is_symbol(before) or is_symbol(after)):
            tokens.append(part)
    return tokens
