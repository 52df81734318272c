"""Articles from passages, chunks by hand, and what must be found for a question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirag_jax.datasets.articles import SIZES, Articles, Size, join, spans
from cirag_jax.grade.chunks import ChunkSettings, chunk
from cirag_jax.grade.records import Document
from cirag_jax.types import Passage, Question


def words(first, last):
    return " ".join(f"w{i}" for i in range(first, last))


@pytest.mark.parametrize(
    ("num_words", "wanted"),
    [
        (0, [(0, 0)]),
        (40, [(0, 40)]),
        (256, [(0, 256)]),
        (257, [(0, 256), (129, 257)]),  # One word is left: the chunk has 128 nevertheless.
        (334, [(0, 256), (206, 334)]),  # From here on the last one begins where it should.
        (460, [(0, 256), (206, 460)]),
        (470, [(0, 256), (206, 462), (342, 470)]),
    ],
)
def test_chunks_of_the_paper(num_words, wanted):
    assert spans(num_words, SIZES["128-256"]) == wanted


@given(st.integers(0, 3000), st.sampled_from(sorted(SIZES)))
def test_chunks_cover_a_text_within_their_sizes(num_words, name):
    size = SIZES[name]
    found = spans(num_words, size)
    assert found[0][0] == 0 and found[-1][1] == num_words
    for start, end in found:
        assert min(size.least, num_words) <= end - start <= size.most
    for (_, end), (start, _) in zip(found, found[1:], strict=False):
        assert end - start >= size.overlap


def test_an_article_holds_what_its_parts_share_once():
    parts = [
        Passage("news/a#1", "A", words(0, 20)),
        Passage("news/a#2", "A", words(12, 40)),
        Passage("news/a#3", "A", words(37, 50)),  # Three words are alike by chance.
    ]
    article = join(parts)
    assert article.places == {"news/a#1": (0, 20), "news/a#2": (12, 40), "news/a#3": (40, 53)}
    assert article.text() == f"A. {words(0, 40)} {words(37, 50)}"
    assert article.text((2, 4)) == "A. w2 w3"


def test_chunks_of_a_generated_benchmark_are_joined():
    """In two chunks of whole sentences, of which the second repeats one of six words."""
    document = Document("news/a", "A", (words(0, 6), words(6, 12), words(12, 20)))
    chunks = chunk(document, ChunkSettings(6, 14, 6))
    passages = {one.passage.id: one.passage for one in chunks}
    assert [len(p.text.split()) for p in passages.values()] == [12, 14]
    assert Articles(passages).of("news/a@2").words == tuple(words(0, 20).split())


CORPUS = {
    passage.id: passage
    for passage in (
        Passage("a#1", "A", "One two. Three four five.", ("One two.", "Three four five.")),
        Passage("b", "B", "Six seven."),
        Passage("a#2", "A", "Eight. Nine ten.", ("Eight.", "Nine ten.")),
        Passage("c#x", "C", "Eleven."),
        Passage("c#y", "C", "Twelve."),
        Passage("d", "D", "One.Two three four five.", ("One.", "Two three four five.")),
    )
}
SIZE = Size(2, 4, 1)  # Of the eight words of "a": 0-4, 3-7 and 6-8.


def gold(unit, supporting, sentences=None):
    question = Question("q", "?", ("x",), supporting=supporting, supporting_sentences=sentences)
    return Articles(CORPUS).gold_texts(question, unit, SIZE)


def test_passages_and_articles():
    assert gold("passage", ("a#2", "b", "a#2")) == [("A. Eight. Nine ten.",), ("B. Six seven.",)]
    whole = "A. One two. Three four five. Eight. Nine ten."
    assert gold("article", ("a#2", "a#1", "c#x")) == [(whole,), ("C. Eleven.",)]


def test_chunks_that_hold_words_of_a_gold_sentence():
    first, second, third = (
        "A. One two. Three four",
        "A. four five. Eight. Nine",
        "A. Nine ten.",
    )
    assert spans(8, SIZE) == [(0, 4), (3, 7), (6, 8)]
    # The second sentence of a#1 ends in the second chunk; that of a#2 is Nine ten.
    assert gold("chunk", ("a#1",), (("a#1", 1),)) == [(first, second)]
    assert gold("chunk", ("a#1", "a#2"), (("a#1", 0), ("a#2", 1))) == [(first,), (second, third)]
    # Without annotation any chunk of the passage will do.
    assert gold("chunk", ("a#1", "a#2"), (("a#1", 0),)) == [(first,), (second, third)]


def test_sentences_that_are_not_the_text_leave_the_passage():
    """The text has four words, its sentences have five: no place in the text is known."""
    assert spans(4, Size(1, 2, 0)) == [(0, 2), (2, 4)]
    question = Question("q", "?", ("x",), supporting=("d",), supporting_sentences=(("d", 0),))
    found = Articles(CORPUS).gold_texts(question, "chunk", Size(1, 2, 0))
    assert found == [("D. One.Two three", "D. four five.")]


def test_a_gold_passage_without_words_is_its_title():
    corpus = {"e": Passage("e", "E", "")}
    question = Question("q", "?", ("x",), supporting=("e",))
    for unit in ("passage", "chunk", "article"):
        assert Articles(corpus).gold_texts(question, unit) == [("E. ",)]
