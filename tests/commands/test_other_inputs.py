"""Models that were trained with other inputs than a run has, and stores of another corpus."""

import dataclasses

import pytest

from cirag_jax.commands import opening, task
from cirag_jax.config_files import load_config
from cirag_jax.datasets import triple_files
from cirag_jax.datasets.corpus import Corpus
from cirag_jax.errors import UserError
from cirag_jax.models.io import workdir
from cirag_jax.triples.store import Record, TripleStore, content_hash
from cirag_jax.types import Dataset, Passage, Triple

PASSAGES = [Passage(f"p{i}", f"title {i}", "text") for i in range(4)]
KIRAG = {"model": "Llama", "prompt": "1", "dialect": "kirag"}
TAUGHT = {
    "num_candidates": [30],
    "num_passages": [10],
    "max_steps": [4],
    "encoder": ["bge"],
    "triples": ["Qwen, dialect=openie"],
}


@pytest.fixture
def store(tmp_path):
    """A store with the triples of the first two passages, of two extractors."""
    facts = tuple(
        Record(p.id, content_hash(p), (Triple("a", "b", "c", p.id, 0),)) for p in PASSAGES
    )
    with TripleStore.create(tmp_path / "triples.sqlite") as made:
        made.commit([facts[0]], {"model": "Qwen", "prompt": "1"})
        made.commit([facts[1]], KIRAG)
    return str(tmp_path)


def warnings_of(capsys, monkeypatch, name, meta, *overrides):
    monkeypatch.setattr(workdir, "check_role", lambda *_: meta)
    monkeypatch.setattr(workdir, "training_record", lambda spec: meta if spec == "W" else {})
    config = load_config(f"configs/methods/{name}", [f"--config.{o}" for o in overrides])
    needs = task.method_settings(config).needs
    opening.warn_of_other_inputs(
        config, task.Task(needs, Dataset("d", (), {}, {}), (), Corpus("none", ()))
    )
    return capsys.readouterr().err


def test_extractors_of_store_names_models_and_dialects(store, tmp_path):
    assert triple_files.extractors_of(store) == ("Llama, dialect=kirag", "Qwen, dialect=openie")
    assert triple_files.extractors_of(None) == ()
    (tmp_path / "openie.jsonl").write_text("")
    assert triple_files.extractors_of(str(tmp_path / "openie.jsonl")) == ()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cirag.num_passages=5"], "config.cirag.num_passages 10 (now 5)"),
        (["cirag.max_steps=2"], "config.cirag.max_steps 4 (now 2)"),
        (["cirag.num_candidates=20"], "config.cirag.num_candidates 30 (now 20)"),
        (["encoder.model=NV"], "config.encoder.model bge (now NV)"),
        (
            ["triples=online", "extractor.model=L", "extractor.dialect=kirag"],
            "triples of Qwen, dialect=openie (now L, dialect=kirag)",
        ),
    ],
)
def test_integrator_of_other_trajectories_is_warned_of(capsys, monkeypatch, overrides, message):
    same = ["integrator.adapter=W", "encoder.model=bge"]
    meta = {"component": "integrator", "inputs": TAUGHT}
    assert warnings_of(capsys, monkeypatch, "cirag.py", meta, *same) == ""
    err = warnings_of(capsys, monkeypatch, "cirag.py", meta, *same, *overrides)
    assert err.startswith("WARNING: W was trained with other inputs: ") and message in err
    assert err.count("(now") == 1
    assert warnings_of(capsys, monkeypatch, "cirag.py", {}, *same, *overrides) == ""


def test_integrator_with_more_candidates_is_warned_of_once(capsys, monkeypatch):
    meta = {"component": "integrator", "inputs": TAUGHT, "num_candidates": 30}
    overrides = ["integrator.adapter=W", "encoder.model=bge", "cirag.num_candidates=40"]
    assert warnings_of(capsys, monkeypatch, "cirag.py", meta, *overrides) == ""


def test_integrator_of_two_datasets_accepts_the_triples_of_each(capsys, monkeypatch):
    inputs = {**TAUGHT, "encoder": ["bge", "NV"]}
    meta = {"component": "integrator", "inputs": inputs}
    overrides = ["integrator.adapter=W", "encoder.model=NV"]
    assert warnings_of(capsys, monkeypatch, "cirag.py", meta, *overrides) == ""
    overrides[1] = "encoder.model=E5"
    err = warnings_of(capsys, monkeypatch, "cirag.py", meta, *overrides)
    assert "config.encoder.model bge or NV (now E5)" in err


def test_aligner_of_other_triples_is_warned_of(capsys, monkeypatch, store):
    overrides = ["rankers.aligner.kind=aligner", "rankers.aligner.model=W", f"triples={store}"]
    both = "Llama, dialect=kirag and Qwen, dialect=openie"
    meta = {"component": "aligner", "inputs": {"triples": [both]}}
    assert warnings_of(capsys, monkeypatch, "kirag.py", meta, *overrides) == ""
    meta["inputs"]["triples"] = ["Llama, dialect=kirag"]
    err = warnings_of(capsys, monkeypatch, "kirag.py", meta, *overrides)
    assert f"W was trained with other inputs: triples of Llama, dialect=kirag (now {both})" in err


def test_store_of_another_corpus_is_refused_and_of_a_part_warned_of(store, capsys):
    corpus = {p.id: p for p in PASSAGES}
    assert set(triple_files.read_triples(store, corpus)) == {"p0", "p1"}
    assert "has no entry for 2 of 4 passages of the corpus" in capsys.readouterr().err
    others = {"x": dataclasses.replace(PASSAGES[0], id="x")}
    with pytest.raises(UserError, match="has none of the 1 passages of the corpus, but 2 others"):
        triple_files.read_triples(store, others)
    changed = {"p0": dataclasses.replace(PASSAGES[0], text="new"), "p1": PASSAGES[1]}
    with pytest.raises(UserError, match=r"'p0' has changed since .* \(1 of 2 passages\)"):
        triple_files.read_triples(store, changed)
