"""Files of chains: our own, KiRAG's, and damaged ones."""

import json
import pickle

import pytest

from cirag_jax.config_files import load_config
from cirag_jax.datasets.chain_files import (
    ChainRecord,
    FileChain,
    chains_of_files,
    read_chains,
    write_chains,
)
from cirag_jax.datasets.chains import Chain, Unit
from cirag_jax.errors import UserError
from cirag_jax.training import aligner_batches
from cirag_jax.training.data.pools import chains_and_pools
from cirag_jax.types import Dataset, Passage, Question, Triple

STEPS = (Triple("A", "goes to", "B", "a"), Triple("B", "is in", "C", "b"))
UNITS = (Unit("<A; goes to; B>", "a"), Unit("<B; is in; C>", "b"))
OTHER = Triple("X", "is", "Y", "x")
KIRAG = {
    "id": "q",
    "question": "Where does A lead?",
    "answers": ["C"],
    "supporting_triples": [{"text": unit.text, "title": unit.passage_id} for unit in UNITS],
    "hard_negative_triples": {"d1": [{"text": "<N; is; M>", "title": "n"}], "d2": []},
}


def dataset(kind="bridge", triples=None):
    question = Question("q", "Where does A lead?", ("C",), type=kind, supporting=("a", "b"))
    corpus = {name: Passage(name, name, f"{name}.") for name in "abx"}
    found = {"a": (STEPS[0],), "b": (STEPS[1], OTHER._replace(passage_id="b")), "x": (OTHER,)}
    return Dataset("made", (question,), corpus, found if triples is None else triples)


def own_file(folder, **changes):
    record = ChainRecord(question_id="q", question="Where does A lead?", steps=STEPS, rank=2)
    for name, value in changes.items():
        setattr(record, name, value)
    write_chains(folder / "chains.jsonl", [record])
    return folder


def test_chains_of_a_workdir_are_read_as_written(tmp_path):
    assert read_chains(str(own_file(tmp_path))) == {"q": FileChain("q", UNITS)}
    assert read_chains(str(tmp_path / "chains.jsonl")) == read_chains(str(tmp_path))


def test_chains_of_files_steps_follow_each_other_except_in_comparisons(tmp_path):
    files, made = read_chains(str(own_file(tmp_path))), dataset()
    chains, negatives = chains_of_files(files, made, made.questions)
    assert chains == [Chain("q", "Where does A lead?", UNITS, ((), (0,)), False)]
    assert negatives == {}
    made = dataset("comparison")
    (chain,), _ = chains_of_files(files, made, made.questions)
    assert chain.comparison and chain.parents == ((), ())


def test_chains_and_pools_of_files_replace_annotations(tmp_path):
    files, made = read_chains(str(own_file(tmp_path, steps=STEPS[1:]))), dataset()
    (chain,), (pool,) = chains_and_pools(made, made.questions, "triple", "own", files)
    assert chain.steps == UNITS[1:]
    assert [unit.text for unit in pool] == ["<A; goes to; B>", "<B; is in; C>", "<X; is; Y>"]


def test_chains_and_pools_step_of_other_triples_is_dropped(tmp_path):
    files = read_chains(str(own_file(tmp_path)))
    made = dataset(triples={"a": (OTHER._replace(passage_id="a"),), "b": (STEPS[1],)})
    with pytest.raises(UserError, match="1 have triples that were not extracted"):
        chains_and_pools(made, made.questions, "triple", "own", files)


def test_chains_of_kirag_bring_their_negatives(tmp_path):
    file = tmp_path / "train_aligner.json"
    file.write_text(json.dumps([KIRAG]))
    made = dataset(triples={})
    (chain,), (pool,) = chains_and_pools(
        made, made.questions, "triple", "own", read_chains(str(file))
    )
    assert chain.steps == UNITS and pool == (Unit("<N; is; M>", "n"),)


def test_chains_and_pools_of_files_report_missing_questions(tmp_path, capsys):
    files, made = read_chains(str(own_file(tmp_path))), dataset()
    more = Question("r", "?", ("x",), supporting=("a",))
    chains_and_pools(made, (*made.questions, more), "triple", "own", files)
    assert "made: 1 of 2 questions have a chain" in capsys.readouterr().err
    with pytest.raises(UserError, match="no chain of the 1 questions of made; its first.*'q'"):
        chains_and_pools(made, [more], "triple", "own", files)


def _kirag(**changes):
    return json.dumps([{**KIRAG, **changes}])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.pkl", "", "c.pkl must be a chains.jsonl or KiRAG's"),
        ("c.json", "{}", "expected KiRAG's list"),
        ("c.json", "[]", "has no chains"),
        ("c.json", "[1]", "question 1"),
        ("c.json", _kirag(id=3), "question 1: field 'id'"),
        ("c.json", _kirag(supporting_triples=[]), "question 1: field 'the chain' is empty"),
        ("c.json", _kirag(supporting_triples=[{"text": ""}]), "supporting_triples"),
        ("c.json", _kirag(supporting_triples=[{"text": "t"}] * 2), "repeats 't'"),
        ("c.json", json.dumps([KIRAG, KIRAG]), "question 2: field 'question id' repeats 'q'"),
        ("c.json", "[{", "cannot be read"),
        ("c.jsonl", "", "is empty"),
        ("c.jsonl", '{"question_id": "q", "question": "?"}', ":1: field 'steps' is missing"),
        (
            "c.jsonl",
            '{"question_id": "q", "question": "?", "steps": [["a", "b", "c"]]}',
            ":1: field 'steps' has a triple without a passage",
        ),
        ("c.jsonl", '{"question_id": "q", "question": "?", "steps": [["a", "b"]]}', ":1: field"),
    ],
)
def test_read_chains_bad_file_is_refused(name, text, words, tmp_path):
    (tmp_path / name).write_bytes(pickle.dumps([KIRAG]) if name == "c.pkl" else text.encode())
    with pytest.raises(UserError, match=words):
        read_chains(str(tmp_path / name))


def test_read_chains_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="chains.jsonl does not exist; launch/distill.py"):
        read_chains(str(tmp_path))


def _config(*values):
    return load_config("configs/aligner.py", [f"--config.{value}" for value in values])


def test_chains_from_files_join_several_sources(tmp_path):
    for name, key in (("one", "q"), ("two", "r")):
        (tmp_path / name).mkdir()
        own_file(tmp_path / name, question_id=key)
    both = f"('{tmp_path / 'one'}', '{tmp_path / 'two'}')"
    chains = aligner_batches.chains_from_files(_config(f"data.chains={both}"))
    assert {*(chains or ())} == {"q", "r"}
    twice = f"('{tmp_path / 'one'}', '{tmp_path / 'one'}')"
    with pytest.raises(UserError, match="repeats 1 questions of an earlier entry .first: 'q'"):
        aligner_batches.chains_from_files(_config(f"data.chains={twice}"))
    with pytest.raises(UserError, match="chains of triples, but config.data.units=sentence"):
        aligner_batches.chains_from_files(_config("data.units=sentence", f"data.chains={both}"))
    assert aligner_batches.chains_from_files(_config()) is None
