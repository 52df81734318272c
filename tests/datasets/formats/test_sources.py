import gzip
import zipfile

import pytest

from cirag_jax.datasets import formats, prepare
from cirag_jax.datasets.formats.files import Source, table_name
from cirag_jax.datasets.jsonl import read_dataset, write_dataset
from cirag_jax.errors import UserError
from tests.datasets.formats import writing

ROWS = [{"id": "1", "contents": "Brum\nAn island."}, {"id": "2", "contents": "Osk\nA county."}]


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("train.jsonl", "train"),
        ("a/train-00001-of-00002.parquet", "a/train"),
        ("corpus.jsonl.gz", "corpus"),
        ("test/data-00000-of-00001.arrow", "test"),
        ("wiki-18.jsonl.zip", "wiki-18"),
        (".corpus.jsonl", None),
        ("index.faiss", None),
        ("archive.zip", None),
        ("data.parquet.gz", None),
    ],
)
def test_table_name(name, table):
    assert table_name(name) == table


def test_rows_are_equal_in_every_container(tmp_path):
    text = "\ufeff" + "".join(f'{{"id": "{r["id"]}", "contents": "{r["id"]}é"}}\n\n' for r in ROWS)
    data = text.encode()
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    for name in ("c.jsonl.zip", "d.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("top/c.jsonl" if name == "d.zip" else "c.jsonl", data)
            archive.writestr("__MACOSX/._c.jsonl", b"x")
    tables = {name: list(Source(tmp_path).rows(name)) for name in ("a", "b", "c")}
    tables["d"] = list(Source(tmp_path / "d.zip").rows("c"))
    records = [row for _, row in tables["a"]]
    assert [record["contents"] for record in records] == ["1é", "2é"]
    assert all([row for _, row in rows] == records for rows in tables.values())
    assert [place.rpartition(":")[2] for place, _ in tables["b"]] == ["1", "3"]
    (single,) = Source(tmp_path / "b.jsonl.gz").tables
    assert len(list(Source(tmp_path / "b.jsonl.gz").rows(single))) == 2


@pytest.mark.parametrize("name", ["corpus.jsonl.gz", "corpus.jsonl.zip", "corpus.parquet"])
def test_truncated_archive_is_one_sentence(tmp_path, name):
    path = tmp_path / name
    rows = [{"id": str(i), "contents": f"{i * 7919}"} for i in range(300)]
    if name.endswith("parquet"):
        writing.parquet(path, *rows)
    elif name.endswith("gz"):
        writing.lines(path, *rows)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("corpus.jsonl", "".join(f"{row}\n" for row in rows))
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(UserError, match=rf"{name} (is damaged or truncated|cannot be read)"):
        list(Source(tmp_path).rows("corpus"))


def test_bad_lines_name_file_and_line(tmp_path):
    for data, message in (
        (b'{"id": "1"}\n{"id": \n', r"a.jsonl:2: invalid or truncated JSON"),
        (b'{"id": "1"}\n[1]\n', r"a.jsonl:2: must be a JSON object, not a list"),
        ('{"id": "é"}\n'.encode("latin-1"), r"a.jsonl:1: byte 9 is not valid UTF-8"),
        (b'{"id": "\\ud800"}\n', r"a.jsonl:1: "),
        (b"\n", r"a.jsonl has no records"),
    ):
        (tmp_path / "a.jsonl").write_bytes(data)
        with pytest.raises(UserError, match=message):
            list(Source(tmp_path).rows("a"))


def test_prepare_streams_passages_of_another_file(tmp_path, capsys):
    writing.lines(tmp_path / "wiki/wiki-18.jsonl.gz", *ROWS)
    own = {"cirag_jax": {"supporting": ["2"]}}
    row = {"id": "a", "question": "?", "golden_answers": ["x"], "metadata": own}
    writing.lines(tmp_path / "nq/test.jsonl", row)
    flags = [f"--source={tmp_path / 'nq'}", f"--out={tmp_path / 'out'}"]
    wiki = tmp_path / "wiki/wiki-18.jsonl.gz"
    assert prepare.main([*flags, f"--passages={wiki}"]) == 0, capsys.readouterr().err
    dataset = read_dataset(tmp_path / "out")
    assert dataset.name == "out" and list(dataset.corpus) == ["1", "2"]
    assert dataset.questions[0].supporting == ("2",)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source=none"], "none does not exist"),
        (["--source=.", "--config=x"], "--config needs --benchmark"),
        (["--benchmark=musique", "--format=beir"], "--format needs --source"),
        (["--source=empty"], "empty has none of the known formats"),
    ],
)
def test_prepare_bad_flags_are_refused(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert prepare.main([*flags, "--out=out"]) == 2
    assert message in capsys.readouterr().err


def test_own_folders_are_not_taken_for_others(tmp_path):
    write_dataset(writing.dataset(), tmp_path / "own")
    assert formats.is_own(tmp_path / "own")
    (tmp_path / "own/questions.jsonl").unlink()
    assert formats.is_own(tmp_path / "own") and formats.is_own(tmp_path / "none")
    writing.lines(tmp_path / "own/corpus.jsonl", *ROWS)
    assert not formats.is_own(tmp_path / "own")
