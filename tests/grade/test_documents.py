"""Reading and selecting documents."""

import json

import pytest

from cirag_jax.errors import UserError
from cirag_jax.grade import documents
from cirag_jax.grade.records import Document


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_read_articles_keeps_their_fields(tmp_path):
    row = {
        "title": "A",
        "text": "Ule rose. It fell.\n\nOsk too.",
        "source": "The Daily",
        "date": "x",
    }
    write(tmp_path / "documents.jsonl", row, {"id": "b", "text": "Osk."})
    result = documents.read(str(tmp_path))
    assert result == (
        Document("documents-1", "A", ("Ule rose.", "It fell.", "Osk too."), "The Daily", "x"),
        Document("b", "", ("Osk.",)),
    )
    assert documents.read(str(tmp_path / "documents.jsonl")) == result


def test_read_dataset_keeps_passages_and_sentences(tmp_path):
    row = {"id": "p", "title": "T", "text": "A. B.", "sentences": ["A. B.", " "]}
    write(tmp_path / "corpus.jsonl", row)
    assert documents.read(str(tmp_path)) == (Document("p", "T", ("A. B.", " ")),)


def test_read_text_files_as_whole_documents(tmp_path):
    (tmp_path / "ada_lovelace.txt").write_text("Ada wrote. " * 150)
    (tmp_path / "b.md").write_text("# Byron\n\nHe wrote\n\n## Life\n\nHe left.\n")
    ada, byron = documents.read(str(tmp_path))
    assert (ada.id, ada.title, len(ada.sentences)) == ("ada_lovelace.txt", "ada lovelace", 150)
    assert byron == Document("b.md", "Byron", ("He wrote", "He left."))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"title": "x"}], r"documents.jsonl:1: field 'text' is missing"),
        ([{"text": " "}], r"documents.jsonl:1: field 'text' is empty"),
        ([{"text": "a", "id": "1"}, {"text": "b", "id": "1"}],
         r"documents.jsonl:2: field 'id' repeats the id '1'"),
        ([], r"documents.jsonl is empty"),
    ],
)  # fmt: skip
def test_read_rejects_bad_lines(tmp_path, rows, message):
    write(tmp_path / "documents.jsonl", *rows)
    with pytest.raises(UserError, match=message):
        documents.read(str(tmp_path))


def test_read_rejects_missing_files(tmp_path):
    with pytest.raises(UserError, match="has no text"):
        documents.read(str(tmp_path))
    with pytest.raises(UserError, match="neither a folder nor a file"):
        documents.read(str(tmp_path / "gone"))


def test_select_counts_rejected_documents():
    def made(name, title, words):
        return Document(name, title, (" ".join([title] * words),))

    result = [made("a", "x", 5), made("b", "x", 5), made("c", "x", 6), made("d", "y", 1)]
    result += [made("e", "z", 99), Document("f", "", ())]
    kept, why = documents.select(result, 3, 50)
    assert [d.id for d in kept] == ["a", "c"]
    assert why == {"repeated": 1, "same_title": 1, "short": 2, "long": 1}
    assert len(documents.select(result[:-1], 0, 0)[0]) == 4
