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


def test_answer_flashrag_folder_recall_equals_ir_measures(tmp_path, capsys):
    data, workdir = tmp_path / "data", tmp_path / "w"
    formats.write("flashrag", tiny.dataset(), data)
    values = {
        "data.dir": data, "data.split": "dev", "data.corpus": "ircot_full",
        "retriever.kind": "bm25", "native_rag.num_passages": 3, "recall_at": "(1,3)",
        "reader.backend": "openai", "reader.model": "rules",
    }  # fmt: skip
    argv = [f"--config.{name}={value}" for name, value in values.items()]
    with (
        model_server.model_server(lambda text, _: ("Answer: saint potter", "stop")) as server,
        pytest.raises(SystemExit) as end,
    ):
        argv += [f"--config.reader.base_url={server.url}", f"--workdir={workdir}"]
        cli.run(_MAIN, "", ["answer.py", "--config=configs/methods/native_rag.py", *argv])
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    recall = json.loads(captured.out)["recall"]["passage"]
    qrels = list(ir_measures.read_trec_qrels(str(workdir / "qrels.trec")))
    run = list(ir_measures.read_trec_run(str(workdir / "run.trec")))
    assert recall["num_questions"] == len({judged.query_id for judged in qrels}) == 4
    for k in (1, 3):
        scores = ir_measures.calc_aggregate([ir_measures.R @ k], qrels, run)
        assert scores[ir_measures.R @ k] == recall[f"recall@{k}"]
    assert 0 < recall["recall@1"] < 1

    flags = ["--format=flashrag", f"--data_dir={data}", f"--run={workdir}"]
    assert export.main([*flags, f"--out={tmp_path / 'results'}"]) == 0
    rankings = formats.open_reader(tmp_path / "results").rankings()
    rows = lines(workdir / "predictions.jsonl")
    assert rankings == {row["id"]: row["passages"] for row in rows}
