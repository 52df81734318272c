"""Articles joined from passages, and the gold texts of questions."""

from cirag_jax.datasets.articles import Articles, join
from cirag_jax.datasets.chains import passage_text
from cirag_jax.datasets.chunks import ChunkSettings
from cirag_jax.grade.database import Database
from cirag_jax.grade.records import Document
from cirag_jax.types import Passage, Question


def passage(name, *sentences):
    return Passage(name, "A", " ".join(sentences), sentences)


def test_join_shared_sentences_occur_once():
    parts = [
        passage("news/a#1", "Ule rose.", "It fell.", "It is far."),
        passage("news/a#2", "It fell.", "It is far.", "Osk too."),
        passage("news/a#3", "Osk rose."),
    ]
    article = join(parts)
    assert article.places == {
        "news/a#1": range(3),
        "news/a#2": range(1, 4),
        "news/a#3": range(4, 5),
    }
    assert article.text() == "A. Ule rose. It fell. It is far. Osk too. Osk rose."
    assert article.text(range(1, 3)) == "A. It fell. It is far."


def test_gold_texts_chunks_of_generated_benchmark_are_its_passages():
    sentences = tuple(" ".join(f"w{10 * i + j}" for j in range(10)) + "." for i in range(70))
    settings = ChunkSettings()
    passages = Database([Document("news/a", "A", sentences)], settings).passages
    assert len(passages) == 4
    articles = Articles(passages)
    assert articles.of("news/a@2").sentences == sentences
    question = Question("q", "?", ("x",), supporting=("news/a@2",))
    texts = [passage_text(passages[f"news/a@{n}"]) for n in (1, 2, 3)]
    # The first and the third passage overlap with the second.
    assert articles.gold_texts(question, "chunk", settings) == [tuple(texts)]


CORPUS = {
    passage.id: passage
    for passage in (
        Passage("a#1", "A", "One two. Three four five.", ("One two.", "Three four five.")),
        Passage("b", "B", "Six seven."),
        Passage("a#2", "A", "Eight. Nine ten.", ("Eight.", "", "Nine\nten.")),
        Passage("c#x", "C", "Eleven."),
        Passage("c#y", "C", "Twelve."),
        Passage("e", "E", ""),
    )
}
SETTINGS = ChunkSettings(3, 5, 3)


def gold(unit, supporting, sentences=None):
    question = Question("q", "?", ("x",), supporting=supporting, supporting_sentences=sentences)
    return Articles(CORPUS).gold_texts(question, unit, SETTINGS)


def test_gold_texts_of_passages_and_articles():
    assert gold("passage", ("a#2", "b", "a#2")) == [("A. Eight. Nine ten.",), ("B. Six seven.",)]
    whole = "A. One two. Three four five. Eight. Nine ten."
    assert gold("article", ("a#2", "a#1", "c#x")) == [(whole,), ("C. Eleven.",)]


def test_gold_texts_of_chunks_contain_a_gold_sentence():
    first, second = "A. One two. Three four five.", "A. Three four five. Eight."
    third = "A. Eight. Nine ten."
    # The second sentence of a#1 is in two chunks; the third of a#2, after a blank one, is in one.
    assert gold("chunk", ("a#1",), (("a#1", 1),)) == [(first, second)]
    assert gold("chunk", ("a#1", "a#2"), (("a#1", 0), ("a#2", 2))) == [(first,), (third,)]
    # Without annotated sentences any chunk of the passage is gold.
    assert gold("chunk", ("a#1", "a#2"), (("a#1", 0),)) == [(first,), (second, third)]


def test_gold_texts_blank_passage_is_its_title():
    for unit in ("passage", "chunk", "article"):
        assert gold(unit, ("e",)) == [("E. ",)]
