"""Answering over files of other projects, and the files that are written for them."""

import json
import pathlib
import runpy

import ir_measures
import pytest

from cirag_jax import cli
from cirag_jax.datasets import export, formats
from tests import tiny
from tests.answering import lines
from tests.commands import model_server

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MAIN = runpy.run_path(str(_ROOT / "launch/answer.py"))["main"]


def answer(capsys, workdir, *flags, status=0):
    """Runs launch/answer.py with native_rag and a scripted reader; returns its output."""
    values = {
        "data.split": "dev", "data.corpus": "ircot_full", "native_rag.num_passages": 3,
        "native_rag.num_read": 2,
        "recall_at": "(1,3)", "reader.backend": "openai", "reader.model": "rules",
    }  # fmt: skip
    argv = [*(f"--config.{name}={value}" for name, value in values.items()), *flags]
    with (
        model_server.model_server(lambda text, _: ("Answer: saint potter", "stop")) as server,
        pytest.raises(SystemExit) as end,
    ):
        argv += [f"--config.reader.base_url={server.url}", f"--workdir={workdir}"]
        cli.run(_MAIN, "", ["answer.py", "--config=configs/methods/native_rag.py", *argv])
    captured = capsys.readouterr()
    assert end.value.code == status, captured.err
    return captured.err if status else json.loads(captured.out)


def test_answer_flashrag_folder_recall_equals_ir_measures(tmp_path, capsys):
    data, workdir = tmp_path / "data", tmp_path / "w"
    formats.write("flashrag", tiny.dataset(), data)
    found = answer(capsys, workdir, f"--config.data.dir={data}", "--config.retriever.kind=bm25")
    recall = found["recall"]["passage"]
    qrels = list(ir_measures.read_trec_qrels(str(workdir / "qrels.trec")))
    run = list(ir_measures.read_trec_run(str(workdir / "run.trec")))
    assert recall["num_questions"] == len({judged.query_id for judged in qrels}) == 4
    measures = {f"recall@{k}": ir_measures.R @ k for k in (1, 3)}
    measures |= {f"ndcg@{k}": ir_measures.nDCG @ k for k in (1, 3)}
    measures |= {"map": ir_measures.AP, "mrr": ir_measures.RR}
    scores = ir_measures.calc_aggregate(measures.values(), qrels, run)
    expected = {name: pytest.approx(scores[measure]) for name, measure in measures.items()}
    assert {name: recall[name] for name in measures} == expected
    assert 0 < recall["recall@1"] < 1

    flags = ["--format=flashrag", f"--data_dir={data}", f"--run={workdir}"]
    assert export.main([*flags, f"--out={tmp_path / 'results'}"]) == 0
    rankings = formats.open_reader(tmp_path / "results").rankings()
    rows = lines(workdir / "predictions.jsonl")
    assert rankings == {row["id"]: row["passages"] for row in rows}


def test_answer_reads_the_rankings_of_a_run_file(tmp_path, capsys):
    data = tiny.dataset_folder(tmp_path / "data")
    run = tmp_path / "other.run"
    names = [question.id for question in tiny.dataset().questions if question.split == "dev"]
    run.write_text("".join(f"{name} Q0 t{i} 1 {9 - i} x\n" for name in names for i in range(4)))
    flags = f"--config.data.dir={data}", "--config.retriever.kind=trec"
    answer(capsys, tmp_path / "w", *flags, f"--config.retriever.folder={run}")
    rows = lines(tmp_path / "w/predictions.jsonl")
    assert [row["passages"] for row in rows] == [["t0", "t1", "t2"]] * len(names)
    # The same workdir with another ranking is refused.
    run.write_text("".join(f"{name} Q0 p{i} 1 {9 - i} x\n" for name in names for i in range(4)))
    again = (*flags, f"--config.retriever.folder={run}")
    assert "retriever.run" in answer(capsys, tmp_path / "w", *again, status=2)
    run.write_text("z Q0 p0 1 1 x\n")
    found = answer(capsys, tmp_path / "v", *again, status=2)
    assert "ranks passages for none of the 4 questions" in found
    missing = answer(capsys, tmp_path / "u", *flags, status=2)
    assert "config.retriever.kind=trec needs a run file" in missing
