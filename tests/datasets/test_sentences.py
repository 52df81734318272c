import pytest

from cirag_jax.datasets.sentences import sentences_of, split_sentences
from cirag_jax.types import Passage


def test_sentences_own_boundaries_are_kept():
    own = ("One. Two. Three.", "", " four")
    assert sentences_of(Passage("p", "t", "One. Two. Three. four", own)) == own
    assert sentences_of(Passage("p", "t", "One. Two.", ())) == ()


def test_sentences_text_is_split_only_at_sentence_ends():
    text = "Dr. A. B. Venn was born in Merovia in c. 1920.  She wrote 3.5 books.\nShe died in 1988!"
    assert sentences_of(Passage("p", "t", text)) == (
        "Dr. A. B. Venn was born in Merovia in c. 1920.",
        "She wrote 3.5 books.",
        "She died in 1988!",
    )


@pytest.mark.parametrize(
    "text", ["", " \n ", "a", "a. b? c! d… e\n\n\nf", '"Go." he said. (So.) End']
)
def test_sentences_lose_only_whitespace(text):
    parts = split_sentences(text)
    assert all(part == part.strip() != "" for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_sentences_of_empty_text_are_empty():
    assert split_sentences("  ") == ()
