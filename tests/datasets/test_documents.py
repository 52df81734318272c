"""Passages from a user's own documents, and documents that cannot be read."""

import pytest

from cirag_jax.datasets.documents import (
    LENGTH,
    _count_words,
    from_texts,
    read_documents,
    read_files,
    split_document,
)
from cirag_jax.datasets.sentences import sentences_of
from cirag_jax.errors import UserError
from tests import tiny


def test_read_documents_folder_of_text_and_markdown(tmp_path):
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


def test_read_documents_dataset_folder_needs_no_questions(tmp_path):
    folder = tiny.dataset_folder(tmp_path / "data")
    (folder / "questions.jsonl").unlink()
    for path in (folder, folder / "corpus.jsonl"):
        found = read_documents(path)
        assert found.corpus == tiny.dataset().corpus and found.triples


def test_split_document_passages_have_whole_sentences():
    sentence = "The river " + "slowly " * 16 + "flows north."
    text = "\n\n".join([f"{sentence} " * 3, f"{sentence} " * 3, f"{sentence} " * 7])
    found = split_document("d", text, "River")
    assert [len(p.sentences or ()) for p in found] == [3, 3, 5, 2]  # Paragraphs stay together.
    assert all(len(p.text.split()) <= LENGTH for p in found)
    assert " ".join(p.text for p in found).split() == text.split()
    (long,) = split_document("d", "word " * 200, "t")  # A long sentence is not cut.
    assert len(long.text.split()) == 200


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("word " * 250, [100, 100, 50]),  # There is no full stop.
        ("\n".join(["- ten words of an item of a list these"] * 15), [100, 50]),
        ("\n".join(["12) ten words of an item of a list these"] * 15), [100, 50]),
        ("Cells:\n" + "\n".join(["| a | b |"] * 30), [96, 55]),
        ("漢字仮名" * 60, [100, 100, 40]),  # A script without spaces.
        ("x" * 50 * 210, [100, 100, 10]),  # One very long word.
    ],
)
def test_split_document_text_without_full_stop_is_cut(text, sizes):
    found = split_document("d", text, "t")
    assert [_count_words(passage.sentences or ()) for passage in found] == sizes
    assert "".join("".join(p.text.split()) for p in found) == "".join(text.split())


def test_split_document_windows_line_ends_are_equivalent(tmp_path):
    text = "# Ada  \n\nShe wrote notes\nin London.\n\n## Life\n\nShe left.\n"
    for name, end in (("a.md", "\n"), ("b.md", "\r\n"), ("c.md", "\r")):
        (tmp_path / name).write_bytes(text.replace("\n", end).encode())
    found = [(p.title, p.sentences) for p in read_documents(tmp_path).corpus.values()]
    assert found == 3 * [("Ada", ("She wrote notes in London.",)), ("Ada: Life", ("She left.",))]
    assert {(title, body) for _, title, body in read_files(tmp_path)} == {
        ("Ada", "\n\n\nShe wrote notes\nin London.\n\n\n\nShe left.\n")
    }


@pytest.mark.parametrize(
    ("line", "title"),
    [("## C#", "C#"), ("# Ada ##", "Ada"), ("# C# #", "C#"), ("# Ada\t#  ", "Ada"), ("## ##", "t")],
)
def test_split_document_only_separate_marks_close_a_heading(line, title):
    (passage,) = split_document("d", f"{line}\n\nText.", "t")
    assert passage.title == title and passage.text == "Text."


@pytest.mark.parametrize(
    ("fence", "end"),
    [("```", "```"), ("~~~ sh", "~~~~"), ("  ````python", "`````  "), ("```", "``` no\n```")],
)
def test_split_document_comment_in_code_is_no_heading(fence, end):
    text = f"# Ada\n\n{fence}\n# a comment\nrun\n{end}\n\n# Life\n\nShe left."
    code, life = split_document("d", text, "t")
    assert code.title == "Ada" and "# a comment run" in code.text
    assert (life.title, life.text) == ("Ada: Life", "She left.")


def test_split_document_inline_code_is_no_fence():
    found = split_document("d", "```x``` is code.\n\n# Life\n\nShe left.", "t")
    assert [passage.title for passage in found] == ["t", "Life"]


def test_from_texts_first_words_are_the_title():
    found = from_texts(["Ada Lovelace was born in London in 1815.", " "])
    (passage,) = found.corpus.values()
    assert (passage.id, passage.title) == ("document 1#1", "Ada Lovelace was born in London")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text \(byte 3\); save it as UTF-8"),
        ("a.txt", b"PK\0\0", r"a\.txt is not UTF-8 text \(byte 2\)"),
        ("a.txt", b" \n", "has no text"),
        ("a.pdf", b"x", "has no text; documents are .txt and .md files, or a corpus.jsonl"),
    ],
)
def test_read_documents_unreadable_path_is_reported(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_documents(tmp_path)
    with pytest.raises(UserError, match="neither a folder nor a file"):
        read_documents(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no text"):
        from_texts([""])
