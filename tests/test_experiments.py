"""Experiments run in this process, on tiny models and data."""

import dataclasses

import jax

from cirag_jax.datasets import jsonl
from cirag_jax.retrieval.linked import LinkedIndex
from experiments import linked
from tests import tiny


def test_linked_experiment_table_has_row_per_setting(tmp_path, capsys, monkeypatch, one_device):
    model, made = tiny.model_folder(tmp_path / "m"), tiny.dataset()
    questions = [
        dataclasses.replace(q, fold="f" if q.split == "dev" else None) for q in made.questions
    ]
    jsonl.write_dataset(dataclasses.replace(made, questions=tuple(questions)), tmp_path / "d")
    # A separate process would keep this setting.
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    monkeypatch.setattr(
        "sys.argv",
        ["linked.py", "--checkpoint", str(model), "--data", str(tmp_path / "d"), "--fold", "f"]
        + ["--vectors", str(tmp_path / "v"), "--held_out", "2", "--pools", "--stops", "0"]
        + ["--change", "steps=1 epochs=1"],
    )
    explored, explore = [], LinkedIndex.explore

    def watched(self, questions, score, allowed=None, *args, **more):
        explored.append((self._steps, allowed is not None))
        return explore(self, questions, score, allowed, *args, **more)

    monkeypatch.setattr(LinkedIndex, "explore", watched)
    with jax.numpy_dtype_promotion("standard"):
        linked.main()
    assert [steps for steps, in_pools in explored if in_pools] == [5, 1]
    told = capsys.readouterr()
    header, _, *rows = told.out.splitlines()
    heads = [row.split("|")[1].strip() for row in rows]
    assert heads == [
        f"{head}{where}"
        for head in ("as configured", "steps=1 epochs=1")
        for where in ("", ", own context")
    ]
    assert {row.count("|") for row in rows} == {header.count("|")}
    assert f"d, {heads[2]}, the first 2: read 2.00, recall " in told.err
    assert f"d, {heads[3]}, stops below 0: read 8.00, recall 100.0, exact 0.0" in told.err
