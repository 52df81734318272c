"""A corpus that stays on disk."""

import dataclasses
import json

import numpy as np
import pytest

from cirag_jax.datasets import jsonl, passage_file
from cirag_jax.datasets.corpus import POLICIES, build_corpus
from cirag_jax.datasets.passage_file import IdTable, PassageFile, PassagesById
from cirag_jax.errors import UserError
from cirag_jax.retrieval.index import hash_corpus
from cirag_jax.types import Passage
from tests import tiny

_PASSAGES = [
    Passage("a", "A", "First."),
    Passage("\u00fc\u4e2d", "\u00dc", "Unicode \u2028 text.", ("Unicode", "text.")),
    Passage("c", "", ""),
]


def _write(path, passages, start=b"", end=b"\n"):
    lines = (json.dumps(dataclasses.asdict(p), ensure_ascii=False).encode() for p in passages)
    path.write_bytes(start + end.join(lines))
    return path


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n  \n"])
def test_passage_file_reads_single_passages(tmp_path, start, end):
    file = PassageFile(_write(tmp_path / "corpus.jsonl", _PASSAGES, start, end))
    assert list(file) == _PASSAGES and len(file) == 3
    assert [file[row] for row in range(-3, 3)] == [*_PASSAGES, *_PASSAGES]
    assert file[1:] == tuple(_PASSAGES[1:])
    assert [file.row(p.id) for p in _PASSAGES] == [0, 1, 2] and file.row("b") is None
    with pytest.raises(IndexError):
        file[3]
    file.close()


def test_passage_file_equal_hashes_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(passage_file, "_hash", len)
    passages = [Passage(name, "", name) for name in ("ab", "c", "de", "f", "gh")]
    file = PassageFile(_write(tmp_path / "corpus.jsonl", passages))
    assert [file.row(p.id) for p in passages] == [0, 1, 2, 3, 4] and file.row("xy") is None
    path = _write(tmp_path / "corpus.jsonl", [*passages, passages[3], passages[0]])
    with pytest.raises(UserError, match=r"corpus\.jsonl:6: field 'id' repeats the id 'f'"):
        PassageFile(path)


def test_id_table_rows_take_twelve_bytes():
    table = IdTable()
    for number in range(1000):
        table.add(str(number))
    assert table.finish() == [] and table.candidates("77") == [77] and table.candidates("x") == []
    arrays = [value for value in vars(table).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 12 * 1000


def test_passages_by_id_is_a_mapping_in_file_order(tmp_path):
    by_id = PassagesById(PassageFile(_write(tmp_path / "corpus.jsonl", _PASSAGES)))
    expected = {passage.id: passage for passage in _PASSAGES}
    assert dict(by_id.items()) == expected and list(by_id) == list(expected)
    assert by_id["c"] == _PASSAGES[2] and "b" not in by_id and by_id.get("b") is None
    with pytest.raises(KeyError):
        by_id["b"]


def test_large_corpus_gives_the_same_dataset(tmp_path, monkeypatch):
    folder = tiny.dataset_folder(tmp_path / "data")
    small = jsonl.read_dataset(folder)
    monkeypatch.setattr(jsonl, "LARGE_CORPUS", 0)
    large = jsonl.read_dataset(folder)
    assert isinstance(large.corpus, PassagesById)
    assert (large.questions, large.triples) == (small.questions, small.triples)
    assert dict(large.corpus.items()) == small.corpus
    for policy in POLICIES:
        ours, theirs = (build_corpus(d, d.questions[:3], policy) for d in (large, small))
        assert tuple(ours.passages) == theirs.passages
        assert hash_corpus(ours.passages) == hash_corpus(theirs.passages)
    assert isinstance(build_corpus(large, (), "ircot_full").passages, PassageFile)


def test_large_corpus_unknown_passage_is_refused(tmp_path, monkeypatch):
    folder = tiny.dataset_folder(tmp_path / "data")
    monkeypatch.setattr(jsonl, "LARGE_CORPUS", 0)
    record = {"id": "x", "question": "Who?", "answers": [], "supporting": ["none"]}
    (folder / "questions.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match="names passage 'none', which corpus.jsonl does not have"):
        jsonl.read_dataset(folder)
