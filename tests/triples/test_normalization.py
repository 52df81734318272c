import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirag_jax.triples.normalization import merge_sources, normalize, triple_key
from cirag_jax.types import Triple


@pytest.mark.parametrize(
    ("text", "ascii", "unicode"),
    [
        ("God's Gift to Women", "god s gift to women", "god s gift to women"),
        ("Aldri annet enn bråk", "aldri annet enn br k", "aldri annet enn bråk"),
        ("  15 November,  1911 ", "15 november 1911", "15 november 1911"),
        ("STRASSE straße", "strasse stra e", "strasse strasse"),
        ("ﬁn—de\u00a0siècle", "n de si cle", "fin de siècle"),
        ("Ελλάδα 東京", "", "ελλάδα 東京"),
        ("हिन्दी", "", "हिन्दी"),
        ("«?»", "", ""),
    ],
)
def test_normalize_both_forms(text, ascii, unicode):
    assert normalize(text, "ascii") == ascii
    assert normalize(text, "unicode") == unicode


@given(st.text())
def test_normalize_is_idempotent(text):
    for normalization in ("ascii", "unicode"):
        once = normalize(text, normalization)
        assert normalize(once, normalization) == once
        assert once == " ".join(once.split())
    assert set(normalize(text)) <= set("abcdefghijklmnopqrstuvwxyz0123456789 ")


@given(st.text(st.characters(categories=["L", "N"]), min_size=1))
def test_normalize_unicode_ignores_case_and_compatibility_forms(text):
    normalization = normalize(text, "unicode")
    assert normalization == normalize(unicodedata.normalize("NFD", text), "unicode")
    assert normalization == normalize(unicodedata.normalize("NFKC", text).casefold(), "unicode")


@given(st.text(st.characters(max_codepoint=127)))
def test_normalize_forms_agree_on_ascii(text):
    assert normalize(text, "ascii") == normalize(text, "unicode")


def test_triple_key_of_other_scripts_is_distinct():
    keys = [triple_key(Triple(head, "is", "!?"), "ascii") for head in ("東京", "京都", "Oslo")]
    assert keys == [("東京", "is", "!?"), ("京都", "is", "!?"), ("oslo", "is", "!?")]


def test_merge_sources_collects_all_sources():
    first = Triple("God's gift", "directed by", "Curtiz", "p1", 0)
    merged = merge_sources(
        [
            first,
            Triple("Tarn", "is", "town", "p1", 1),
            Triple("god s GIFT", "directed by", "curtiz", "p2", 3),
            Triple("God's gift", "directed by", "Curtiz", "p1", 0),
        ]
    )
    assert [found.triple for found in merged] == [first, Triple("Tarn", "is", "town", "p1", 1)]
    assert merged[0].sources == (("p1", 0), ("p2", 3))
    assert merged[1].sources == (("p1", 1),)


def test_merge_sources_depends_on_the_form():
    pair = [Triple("bråk", "is", "a", "p"), Triple("br-k", "is", "a", "q")]
    assert len(merge_sources(pair, "ascii")) == 1 and len(merge_sources(pair, "unicode")) == 2
