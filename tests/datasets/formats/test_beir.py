import pytest

from cirag_jax.datasets import formats, prepare
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.datasets.jsonl import read_dataset
from cirag_jax.errors import UserError
from tests.datasets.formats import writing

CORPUS = (
    {"_id": "d1", "title": "Brum", "text": "An island.", "metadata": {}},
    {"_id": "d2", "text": '"Quoted" text'},
    {"_id": "d3", "title": None, "text": ""},
)
QUERIES = (
    {"_id": "q1", "text": "Where?", "metadata": {"answer": "Brum"}},
    {"_id": "q2", "text": "Who?"},
    {"_id": "q3", "text": "Unjudged?"},
)
QRELS = {
    "train": "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\n",
    "test": "query-id\tcorpus-id\tscore\nq2\td2\t2\nq2\td3\t1\n",
}


def beir(folder, qrels=QRELS):
    writing.lines(folder / "corpus.jsonl", *CORPUS)
    writing.lines(folder / "queries.jsonl", *QUERIES)
    (folder / "qrels").mkdir()
    for split, text in qrels.items():
        (folder / f"qrels/{split}.tsv").write_text(text)


def check(dataset):
    assert [(q.id, q.split, q.supporting, q.answers) for q in dataset.questions] == [
        ("q1", "train", ("d1",), ("Brum",)), ("q2", "test", ("d2", "d3"), ()),
    ]  # fmt: skip
    assert [(p.id, p.title, p.text) for p in dataset.corpus.values()] == [
        ("d1", "Brum", "An island."), ("d2", "", '"Quoted" text'), ("d3", "", ""),
    ]  # fmt: skip


def test_beir_folder_and_its_archive_are_read(tmp_path, caplog):
    beir(tmp_path / "rivers")
    check(formats.read(tmp_path / "rivers"))
    assert "1 queries without a judged passage were skipped" in caplog.text
    writing.archive(tmp_path / "rivers.zip", tmp_path / "rivers")
    check(formats.read(tmp_path / "rivers.zip"))


def test_beir_prepare_writes_a_dataset_folder(tmp_path, capsys):
    beir(tmp_path / "rivers")
    writing.archive(tmp_path / "rivers.zip", tmp_path / "rivers")
    flags = [f"--source={tmp_path / 'rivers.zip'}", f"--out={tmp_path / 'out'}"]
    assert prepare.main(flags) == 0, capsys.readouterr().err
    check(read_dataset(tmp_path / "out"))
    assert prepare.main([*flags, "--split=test", "--corpus=supporting_and_sampled"]) == 0
    dataset = read_dataset(tmp_path / "out")
    assert [q.id for q in dataset.questions] == ["q2"] and {"d2", "d3"} <= dataset.corpus.keys()


def test_beir_corpus_alone_is_scanned(tmp_path):
    beir(tmp_path / "rivers")
    with CorpusScan(str(tmp_path / "rivers")) as scan:
        assert [p.id for p in scan] == ["d1", "d2", "d3"] and "d2" in scan


def test_beir_trec_qrels_and_compressed_tables_are_read(tmp_path):
    beir(tmp_path, {})
    writing.lines(tmp_path / "corpus.jsonl.gz", *CORPUS)
    (tmp_path / "corpus.jsonl").unlink()
    (tmp_path / "qrels/train.qrels").write_text("q1 0 d1 1\nq1 0 d2 0\n")
    (tmp_path / "qrels/test.txt").write_text("q2 0 d2 2\nq2 0 d3 1\n")
    check(formats.read(tmp_path))


def test_mteb_parquet_folders_are_read(tmp_path):
    corpus = [{name: row.get(name) for name in ("_id", "title", "text")} for row in CORPUS]
    writing.parquet(tmp_path / "corpus/corpus-00000-of-00002.parquet", *corpus[:1])
    writing.parquet(tmp_path / "corpus/corpus-00001-of-00002.parquet", *corpus[1:])
    writing.parquet(tmp_path / "queries/queries-00000-of-00001.parquet", *QUERIES)
    for split, text in QRELS.items():
        rows = [line.split("\t") for line in text.splitlines()]
        records = [{"query-id": q, "corpus-id": d, "score": int(score)} for q, d, score in rows[1:]]
        writing.parquet(tmp_path / f"data/{split}-00000-of-00001.parquet", *records)
    check(formats.read(tmp_path))


def test_bright_domains_are_read(tmp_path):
    for domain in ("biology", "pony"):
        documents = [{"id": "a/1", "content": f"{domain} one"}, {"id": "b", "content": "two"}]
        examples = [
            {"id": "0", "query": "?", "gold_ids": ["b"], "excluded_ids": ["N/A"],
             "gold_answer": "x"},
        ]  # fmt: skip
        writing.parquet(tmp_path / f"documents/{domain}-00000-of-00001.parquet", *documents)
        writing.parquet(tmp_path / f"examples/{domain}-00000-of-00001.parquet", *examples)
    dataset = formats.read(tmp_path)
    assert [(q.id, q.type, q.supporting) for q in dataset.questions] == [
        ("biology/0", "biology", ("biology/b",)), ("pony/0", "pony", ("pony/b",)),
    ]  # fmt: skip
    assert dataset.corpus["pony/a/1"].text == "pony one"


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("query-id\tcorpus-id\tscore\nq1\td1\n", "test.tsv:2: has 2 columns, but the header has 3"),
        ("query-id\tcorpus-id\tscore\nq1\td1\thigh\n", "test.tsv:2: field 'score' must be a numb"),
        ("query\tcorpus-id\tscore\nq1\td1\t1\n", "test.tsv:2: field 'query-id' is missing"),
    ],
)
def test_beir_bad_qrels_name_file_and_line(tmp_path, qrels, message):
    beir(tmp_path, {"test": qrels})
    with pytest.raises(UserError, match=message):
        formats.read(tmp_path)


def test_beir_gold_missing_in_the_corpus_is_unknown(tmp_path, caplog):
    beir(tmp_path, {"test": "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td9\t1\n"})
    assert formats.read(tmp_path).questions[0].supporting is None
    assert "1 questions have a gold passage that the corpus does not have" in caplog.text
