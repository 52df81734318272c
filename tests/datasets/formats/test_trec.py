import gzip

import ir_measures
import pytest
from ir_measures import R

from cirag_jax.datasets import export
from cirag_jax.datasets.formats import trec
from cirag_jax.datasets.formats.files import Source
from cirag_jax.errors import UserError
from cirag_jax.evaluation.recall import recall_at
from tests.datasets.formats import writing

RANKINGS = {"q 1": ["p2", "p 1", "p5"], "q2": ["p3", "p4"]}


def files(tmp_path):
    trec.write_run(tmp_path / "a.trec", RANKINGS, "ours")
    trec.write_qrels(tmp_path / "q.trec", writing.dataset().questions)
    return tmp_path / "a.trec", tmp_path / "q.trec"


def judged(path):
    source = Source(path)
    (table,) = source.tables
    return {line[1:] for line in trec.judgements(source, table)}


def test_trec_round_trip(tmp_path):
    run, qrels = files(tmp_path)
    dataset = writing.dataset()
    ids = {q.id for q in dataset.questions}
    assert trec.read_run(run, ids, dataset.corpus) == RANKINGS
    assert judged(qrels) == {("q%201", "p%201", 1), ("q%201", "p3", 1), ("q2", "p4", 1)}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_trec_recall_equals_ir_measures(tmp_path, k):
    run, qrels = (str(path) for path in files(tmp_path))
    pairs = ir_measures.read_trec_qrels(qrels), ir_measures.read_trec_run(run)
    theirs = {m.query_id: m.value for m in ir_measures.iter_calc([R @ k], *pairs)}
    ours = {
        trec.escape(q.id): recall_at(RANKINGS[q.id], q.supporting or (), k)
        for q in writing.dataset().questions
        if q.supporting
    }
    assert theirs == ours and any(ours.values()) == (k > 1)


def test_trec_run_with_ties_is_ordered_as_by_ir_measures(tmp_path):
    text = "q Q0 a 1 0.5 x\nq Q0 b 2 0.5 x\nq Q0 c 3 -1e1 x\n\nq Q0 d 9 2 x\n"
    (tmp_path / "a.run.gz").write_bytes(gzip.compress(text.encode()))
    ranked = trec.read_run(tmp_path / "a.run.gz")["q"]
    assert ranked == ["d", "b", "a", "c"]
    for passage in ranked:
        qrels = [ir_measures.Qrel("q", passage, 1)]
        scores = ir_measures.calc_aggregate(
            [ir_measures.RR], qrels, list(ir_measures.read_trec_run(text))
        )
        assert scores[ir_measures.RR] == 1 / (ranked.index(passage) + 1)


def test_trec_repeated_passage_keeps_its_best_rank(tmp_path):
    trec.write_run(tmp_path / "a.trec", {"q": ["a", "b", "a"]}, "x")
    assert trec.read_run(tmp_path / "a.trec") == {"q": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q Q0 a 1 2.0\n", ":1: has 5 columns; a run has 6"),
        ("q Q0 a 1 2.0 x\nq Q0 b 2 many x\n", ":2: score must be a number, not 'many'"),
        ("q Q0 a 1 nan x\n", ":1: score must be a number, not 'nan'"),
        ("q Q0 a 1 2 x\nq Q0 a 2 1 x\n", ":2: ranks passage 'a' of question 'q' twice"),
        ("\n", "is empty"),
    ],
)
def test_trec_bad_run_names_file_and_line(tmp_path, text, message):
    (tmp_path / "a.trec").write_text(text)
    with pytest.raises(UserError, match=f"a.trec ?{message}"):
        trec.read_run(tmp_path / "a.trec")


def test_trec_bad_files_raise_user_error(tmp_path):
    (tmp_path / "q.trec").write_text("q 0 a\n")
    with pytest.raises(UserError, match="q.trec:1: has 3 columns; qrels have 4"):
        judged(tmp_path / "q.trec")
    (tmp_path / "q.trec").write_bytes(b"q 0 a 1\nq 0 \xff 1\n")
    with pytest.raises(UserError, match="q.trec is not valid UTF-8"):
        judged(tmp_path / "q.trec")
    with pytest.raises(UserError, match="none.trec does not exist"):
        trec.read_run(tmp_path / "none.trec")
    with pytest.raises(UserError, match="must be a file"):
        trec.read_run(tmp_path)


def test_trec_export_writes_run_and_qrels(tmp_path, capsys):
    from cirag_jax.datasets.jsonl import write_dataset

    write_dataset(writing.dataset(), tmp_path / "data")
    rows = [{"id": i, "answer": "", "passages": ids} for i, ids in RANKINGS.items()]
    writing.lines(tmp_path / "w/predictions.jsonl", *rows)
    flags = ["--format=trec", f"--data_dir={tmp_path / 'data'}", f"--run={tmp_path / 'w'}"]
    assert export.main([*flags, f"--out={tmp_path / 'out'}"]) == 0, capsys.readouterr().err
    assert trec.read_run(tmp_path / "out/run.trec", RANKINGS, writing.dataset().corpus) == RANKINGS
    assert (tmp_path / "out/qrels.trec").is_file()
