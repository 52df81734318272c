"""A user's own documents: what becomes a passage, and what is refused."""

import pytest

from cirag_jax.datasets.documents import LENGTH, from_texts, read_documents, split_document
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from tests import tiny


def test_a_folder_of_text_and_markdown(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "ada_lovelace.txt").write_text("\ufeffAda wrote notes. She lived in London.\n")
    (tmp_path / "deep" / "b.md").write_text("# Byron\n\nHe was a poet.\n\n## Life\n\nHe left.\n")
    (tmp_path / "c.pdf").write_text("not read")
    (tmp_path / ".hidden.txt").write_text("not read")
    found = read_documents(tmp_path)
    assert found.questions == () and found.triples == {}
    shown = [(p.id, p.title, p.sentences) for p in found.corpus.values()]
    assert shown == [
        ("ada_lovelace.txt#1", "ada lovelace", ("Ada wrote notes.", "She lived in London.")),
        ("deep/b.md#1", "Byron", ("He was a poet.",)),
        ("deep/b.md#2", "Byron: Life", ("He left.",)),
    ]
    assert all(sentences_of(p) == p.sentences for p in found.corpus.values())
    one = read_documents(tmp_path / "ada_lovelace.txt")
    assert list(one.corpus) == ["ada_lovelace.txt#1"]


def test_a_dataset_folder_needs_no_questions(tmp_path):
    folder = tiny.dataset_folder(tmp_path / "data")
    (folder / "questions.jsonl").unlink()
    for path in (folder, folder / "corpus.jsonl"):
        found = read_documents(path)
        assert found.corpus == tiny.dataset().corpus and found.triples


def test_passages_are_whole_sentences_of_about_a_hundred_words():
    sentence = "The river " + "slowly " * 16 + "flows north."
    text = "\n\n".join([f"{sentence} " * 3, f"{sentence} " * 3, f"{sentence} " * 7])
    found = split_document("d", text, "River")
    assert [len(p.sentences or ()) for p in found] == [3, 3, 5, 2]  # paragraphs stay together
    assert all(len(p.text.split()) <= LENGTH for p in found)
    assert " ".join(p.text for p in found).split() == text.split()
    (long,) = split_document("d", "word " * 300, "t")  # a sentence is never cut
    assert len(long.text.split()) == 300


def test_texts_have_their_first_words_for_a_title():
    found = from_texts(["Ada Lovelace was born in London in 1815.", " "])
    (passage,) = found.corpus.values()
    assert (passage.id, passage.title) == ("document 1#1", "Ada Lovelace was born in London")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text \(byte 3\); save it as UTF-8"),
        ("a.txt", b"PK\0\0", r"a\.txt is not UTF-8 text \(byte 2\)"),
        ("a.txt", b" \n", "has no text"),
        ("a.pdf", b"x", "has no text: documents are .txt and .md files, or a corpus.jsonl"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_documents(tmp_path)
    with pytest.raises(UserError, match="neither a folder nor a file"):
        read_documents(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no text"):
        from_texts([""])
