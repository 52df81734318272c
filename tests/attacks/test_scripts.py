"""Texts in all scripts: BM25 and title links must find the words that a text contains."""

import unicodedata

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st

from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.links import LinkWalk, TitleIndex
from cirag_jax.types import Passage
from tests.attacks.hostile import WORDS, attack, attempt

# Words of each script, and whether they are written without spaces.
_SCRIPTS = {
    "Chinese": (True, ("李白", "唐代詩人", "碎叶城", "長江", "吉尔吉斯斯坦", "𠮷野家", "々木")),
    "Japanese": (True, ("東京タワー", "トヨタ自動車", "ひらがな", "ﾄﾖﾀ", "がぎぐ", "か\u3099き")),
    "Korean": (False, ("서울특별시", "대한민국", "부산항", "한국어")),
    "Thai": (True, ("กรุงเทพ", "เชียงใหม่", "แม่น้ำ", "ประเทศไทย")),
    "Lao": (True, ("ວຽງຈັນ", "ຫຼວງພະບາງ", "ເມືອງ")),
    "Khmer": (True, ("ភ្នំពេញ", "សៀមរាប", "ប្រាសាទ", "កម្ពុជា")),
    "Burmese": (True, ("ရန်ကုန်", "မန္တလေး", "မြို့ကြီး")),
    "Hindi": (False, ("दिल्ली", "राजधानी", "मुंबई", "क्षत्रिय")),
    "Tamil": (False, ("சென்னை", "தமிழ்நாடு", "கோயில்")),
    "Arabic": (False, ("مُحَمَّد", "القاهرة", "مدينة", "كاتب")),
    "Hebrew": (False, ("יְרוּשָׁלַיִם", "ספר", "מלך")),
    "Persian": (False, ("می\u200cخواهم", "تهران", "شاعر")),
    "Cyrillic": (False, ("Москва", "ПУШКИН", "Ёлка", "Киї\u0301в")),
    "Greek": (False, ("Αθήνα", "ΟΔΥΣΣΕΥΣ", "λόγος")),
    "Latin": (
        False,
        ("Straße", "Köln", "cafe\u0301", "ﬁrst", "ＩＢＭ", "İstanbul", "Zürich", "x2y"),
    ),
    "Vietnamese": (False, ("Nguyễn", "Đà Nẵng", "Huê\u0301", "phở")),
}
_MARKS = (
    *("", " ", "🎉", "👩‍👩‍👧", "🇯🇵", "☕️", "…", "。", "،"),
    *("\u200f", "\u202e", "\u00ad", "\u3000", "ー"),
)
_PLACES = st.tuples(st.sampled_from(sorted(_SCRIPTS)), st.integers(0, 7), st.sampled_from(_MARKS))
_TEXTS = st.lists(st.lists(_PLACES, min_size=1, max_size=5), min_size=2, max_size=5)
_VARIANTS = {
    "same": str,
    **{form: lambda text, form=form: unicodedata.normalize(form, text) for form in ("NFC", "NFD")},
    "upper": str.upper,
    "lower": str.lower,
    "wide": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
}


def _word(place: tuple[str, int, str]) -> str:
    words = _SCRIPTS[place[0]][1]
    return words[place[1] % len(words)]


def _text(places: list[tuple[str, int, str]]) -> str:
    """Joins words with marks, and with spaces except between words of the same joined script."""
    parts = []
    for before, place in zip([None, *places], places, strict=False):
        joins = before is None or before[0] == place[0] and _SCRIPTS[place[0]][0]
        parts += ["" if joins else " ", _word(place), place[2]]
    return "".join(parts)


def _letters(text: str) -> set[str]:
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    return {char for char in folded.casefold() if char.isalnum()}


@pytest.mark.parametrize("variant", _VARIANTS)
@example([[("Chinese", 0, "")], [("Thai", 0, "")]], 0, 0, "")
@example([[("Latin", 1, "")], [("Latin", 2, "")]], 0, 0, "")  # an accent of either form
@example([[("Latin", 1, "")], [("Latin", 2, "")]], 1, 0, "")
@attack(40, _TEXTS, st.integers(0, 99), st.integers(0, 99), st.sampled_from(("", *WORDS)))
def test_bm25_finds_texts_with_a_word(variant, texts, row, place, noise):
    corpus = [_text(places) for places in texts]
    row %= len(corpus)
    word = _word(texts[row][place % len(texts[row])])
    query = f"{_VARIANTS[variant](word)} {noise if not _letters(noise) else ''}"
    index = attempt(lambda: BM25(corpus))
    assert index is not None
    rows, scores = index.search([query, word], len(corpus))
    found = rows[0][rows[0] >= 0].tolist()
    assert row in found, (query, corpus)
    assert all(_letters(corpus[other]) & _letters(query) for other in found)
    assert ((scores > 0) == (rows >= 0)).all()
    if variant in ("NFC", "NFD"):
        np.testing.assert_array_equal(rows[0], rows[1])
    others = np.array([other for other in range(len(corpus)) if other != row])
    assert row not in index.search([query], len(corpus), [others])[0]


@pytest.mark.parametrize("variant", ["same", "NFC", "NFD", "upper"])
@example([[("Chinese", 1, "")], [("Chinese", 0, "")]], 0, ("Chinese", 2, ""))
@attack(40, _TEXTS, st.integers(0, 99), _PLACES)
def test_links_find_titles_in_any_script(variant, texts, row, before):
    words = [[_word(place) for place in places] for places in texts]
    row %= len(words)
    titles = [" ".join(words_of_title) for words_of_title in words]
    is_joined = _SCRIPTS[before[0]][0] and before[0] == texts[row][0][0]
    text = _VARIANTS[variant](f"{_word(before)}{'' if is_joined else ' '}{titles[row]} {before[2]}")
    passages = [Passage(str(i), title, f"{text} 2") for i, title in enumerate(titles)]
    named = attempt(lambda: TitleIndex(passages).named(text))
    assert named is not None
    others = {word for i, title in enumerate(words) if i != row for word in title}
    is_name = len(titles[row]) >= 12 and any(c.isalpha() and not c.islower() for c in titles[row])
    if is_name and not others & {_word(before), *words[row]}:
        assert row in named, (text, titles)
    first = [list(range(len(passages)))] * 2
    for rows in LinkWalk(passages).search([text, "?"], first, 3):
        assert len(set(rows)) == min(3, len(passages))


@pytest.mark.parametrize("script", _SCRIPTS)
def test_links_title_of_script_is_found_in_running_text(script):
    is_joined, words = _SCRIPTS[script]
    title = max(words, key=len)
    other = next(word for word in words if word != title)
    text = (other + title + other) if is_joined else f"{other} {title} {other}"
    index = TitleIndex([Passage("a", title, ""), Passage("b", "Nothing Here", "")])
    for form in ("NFC", "NFD"):
        assert index.named(unicodedata.normalize(form, text)) == (0,)
