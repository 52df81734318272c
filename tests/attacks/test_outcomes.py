"""Damaged results in journals, which must be reported."""

import contextlib
import json
import re
import shutil
import sqlite3

import pytest
from hypothesis import example

from cirag_jax.commands import (
    backends,
    comparison,
    evaluate_extraction,
    evaluate_integrator,
    evaluate_reader,
    identity,
    judge,
)
from cirag_jax.commands.answer import answer
from cirag_jax.commands.extract import extract_corpus
from cirag_jax.commands.generate_questions import generate_questions
from cirag_jax.config_files import load_config
from cirag_jax.datasets import jsonl
from cirag_jax.distill.trajectories import write_trajectories
from cirag_jax.errors import UserError
from cirag_jax.methods.cirag.prompts import render_decision
from cirag_jax.reports import trace
from cirag_jax.runtime.records import read_records
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.triples.store import TripleStore
from cirag_jax.types import Dataset, Passage, Question, Step, Trajectory, Triple
from tests import tiny
from tests.attacks.hostile import MUTATIONS, attack, attempt, mutate_json
from tests.grade.articles import Model, write_articles
from tests.reports import made_up

TRIPLE = Triple("Ule", "feeds", "Tarn", "p0", 0)
STEP = Step("What does Ule feed?", ("p0",), (TRIPLE,), (0.5,), "It feeds Tarn.", (TRIPLE,), None)


class Reader(Model):
    """A model that answers, decides, judges and extracts one triple."""

    def reader(self, shown):
        return "Thought: It feeds it. Answer: Tarn"

    def integrator(self, shown):
        return render_decision(STEP, "ascii")

    def judge(self, shown):
        return '{"implies": true}'

    def extractor(self, shown):
        if "Named entities:" in shown:
            return json.dumps({"triples": [["Ule", "feeds", "Tarn"]]})
        return json.dumps({"named_entities": ["Ule"]})


def _questions(root):
    """Creates the workdir of a complete run, and returns its config."""
    pytest.importorskip("sklearn")
    pytest.importorskip("networkx")
    config = load_config("configs/grade.py")
    config.update_from_flattened_dict(
        {
            "documents": str(write_articles(root / "articles")),
            "encoder.model": str(tiny.model_folder(root / "encoder")),
            "clusters.reduction": "pca",
            "clusters.most_components": 1,
        }
    )
    (root / "work").mkdir()
    generate_questions(config.lock(), root / "work")
    return config


def _triples(root):
    """Creates the workdir of a run that ended before it stored triples; returns its config."""
    config = load_config("configs/extract.py")
    (root / "data").mkdir()
    rows = [{"id": f"p{n}", "title": "Ule", "text": "Ule feeds Tarn."} for n in range(2)]
    (root / "data" / "corpus.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config.data.dir = str(root / "data")
    (root / "work").mkdir()

    def full(*_):
        raise UserError("the disk is full")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="full"):
        patch.setattr(TripleStore, "commit", full)
        extract_corpus(config.lock(), root / "work")
    return config


def _run_once(run, name, root, **fields):
    """Runs a config of configs/, and returns it."""
    config = load_config(f"configs/{name}.py")
    config.update_from_flattened_dict(fields)
    (root / "work").mkdir()
    run(config.lock(), root / "work")
    return config


def _data(root):
    """Creates a dataset with one question, and returns its folder."""
    corpus = {"p0": Passage("p0", "Ule", "", ("Ule feeds Tarn.", "Nobody likes it."))}
    question = Question(
        "q1", STEP.query, ("Tarn",), split="dev", fold="dev_report", supporting=("p0",),
        supporting_sentences=(("p0", 0),), context=("p0",),
    )  # fmt: skip
    jsonl.write_dataset(Dataset("d", (question,), corpus, {"p0": (TRIPLE,)}), root / "data")
    return str(root / "data")


def _answers(root):
    fields = {"data.dir": _data(root), "data.split": "dev", "reader.backend": "transformers"}
    return _run_once(answer, "methods/direct", root, **fields)


def _readings(root):
    return _run_once(
        evaluate_reader.evaluate, "reader_eval", root, folders=_data(root), **_FEW_SAMPLES
    )


def _extractions(root):
    fields = {"data.dir": _data(root), "data.fold": "dev_report"}
    return _run_once(evaluate_extraction.evaluate, "extractor_eval", root, **fields, **_FEW_SAMPLES)


def _decisions(root):
    file = root / "trajectories.jsonl"
    write_trajectories(file, [Trajectory("q1", STEP.query, "annotations", (STEP,), "stopped")])
    fields = {"trajectories": str(file), "query_cosine": False}
    return _run_once(
        evaluate_integrator.evaluate, "integrator_eval", root, **fields, **_FEW_SAMPLES
    )


def _verdicts(root):
    made_up.write_journal(root / JOURNAL, [(made_up.QUESTION, made_up.PREDICTION)])
    return _run_once(judge.evaluate, "judge", root, runs=str(root), **_FEW_SAMPLES)


_FEW_SAMPLES = {"bootstrap_samples": 2}
# Preparation, command, journal, and the model of the original run.
COMMANDS = {
    "questions": (_questions, generate_questions, JOURNAL, Model),
    "extract": (_triples, extract_corpus, JOURNAL, Reader),
    "answer": (_answers, answer, JOURNAL, Reader),
    "reader": (_readings, evaluate_reader.evaluate, "base.sqlite", Reader),
    "extractor": (_extractions, evaluate_extraction.evaluate, "base.sqlite", Reader),
    "integrator": (_decisions, evaluate_integrator.evaluate, "base.sqlite", Reader),
    "judge": (_verdicts, judge.evaluate, "judge.sqlite", Reader),
}
# Commands, and prefixes of the programs whose results are damaged.
STEPS = [("questions", s) for s in ("claim", "triples", "clusters", "same", "question")]
STEPS += [(command, "") for command in COMMANDS if command != "questions"]


@pytest.fixture(scope="module")
def complete_runs(tmp_path_factory):
    """For each command: its root folder, config, function and journal."""
    cases = {}
    with pytest.MonkeyPatch.context() as patch:
        # These models have no weights.
        patch.setattr(identity, "model_identity", lambda name: {"name": str(name)})
        for name, (prepare, command, file, model) in COMMANDS.items():
            open_model = model()
            patch.setattr(backends, "open_backend", lambda config, spent, m=open_model: m)
            root = tmp_path_factory.mktemp(name)
            cases[name] = root, prepare(root), command, file
        yield cases


def _damage(complete_runs, command, step, change):
    """Damages a result; returns the journal, the program's id, and a function to resume the run."""
    root, config, run, name = complete_runs[command]
    shutil.rmtree(root / "copy", ignore_errors=True)
    work = shutil.copytree(root / "work", root / "copy")
    with contextlib.closing(sqlite3.connect(work / name)) as db:
        rows = "SELECT id, outcome FROM programs WHERE id LIKE ? AND outcome IS NOT NULL"
        program, text = db.execute(f"{rows} ORDER BY id", (f"{step}%",)).fetchone()
        other = change(text)
        db.execute("UPDATE programs SET outcome = ? WHERE id = ?", (other, program))
        db.commit()
    return work / name, program, lambda: run(config, work)


def _with_nan(text):
    """Replaces the first value with NaN."""
    value = json.loads(text)
    place = next(iter(value)) if isinstance(value, dict) else 0
    value[place] = float("nan")
    return json.dumps(value)


BROKEN = {
    "cut": lambda text: text[:-2],
    "no JSON": lambda text: "zz",
    "null": lambda text: "null",
    "NaN": lambda text: "NaN",
    "NaN inside": _with_nan,
    "other type": lambda text: '"x"',
    "fields missing": lambda text: "{}",
}
# Invalid JSON is detected when a journal is read, by all its records or by its results only. Valid
# JSON of another type is detected by each step.
UNREADABLE = [(*step, how) for step in (("judge", ""), ("extract", "")) for how in BROKEN]
MISTYPED = [(*step, how) for step in STEPS for how in ("cut", "other type", "fields missing")]


@pytest.mark.parametrize(("command", "step", "how"), dict.fromkeys(UNREADABLE + MISTYPED))
def test_damaged_result_is_named(complete_runs, command, step, how):
    file, program, resume = _damage(complete_runs, command, step, BROKEN[how])
    message = f"{file}: the result of {program!r} is damaged ("
    with pytest.raises(UserError, match=re.escape(message)):
        resume()


@pytest.mark.parametrize(
    ("step", "other"),
    [
        # There are six claims.
        ("triples", '{"triples": [["Ule", "feeds", "Tarn", 6]], "problems": []}'),
        ("triples", '{"triples": [["Ule", "feeds", "Tarn", -1]], "problems": []}'),
        ("clusters", "[[0, 1, 6]]"),
    ],
)
def test_index_out_of_range_is_named(complete_runs, step, other):
    file, program, resume = _damage(complete_runs, "questions", step, lambda text: other)
    with pytest.raises(UserError, match=re.escape(f"{file}: the result of {program!r} is damaged")):
        resume()


def test_contradictory_extraction_is_named(complete_runs):
    def change(text):
        outcome = json.loads(text)
        return json.dumps({**outcome, "cause": None if outcome["cause"] else "answer: no_json"})

    for command in ("extract", "extractor"):
        file, program, resume = _damage(complete_runs, command, "", change)
        with pytest.raises(UserError, match=re.escape(f"{file}: the result of {program!r} is dam")):
            resume()


def test_surrogate_in_triple_is_named(complete_runs):  # found by `make attack`
    def change(text):
        changed = text.replace('[["', r'[["\ud800', 1)
        assert changed != text
        return changed

    file, program, resume = _damage(complete_runs, "extract", "", change)
    with pytest.raises(UserError, match=re.escape(f"{file}: the result of {program!r} is damaged")):
        resume()


def _read_trace(file):
    trace.write_trace(file, file.with_name("trace.html"))


def _read_comparison(file):
    return [comparison.answered_of(record) for record in read_records(file)]


@pytest.mark.parametrize(
    ("read", "column", "what"),
    [
        (_read_trace, "outcome", "result"),
        (_read_comparison, "outcome", "result"),
        (_read_comparison, "input", "input"),
    ],
)
def test_damaged_row_of_finished_run_is_named(tmp_path, read, column, what):
    pairs = made_up.many(2)
    file = made_up.write_journal(tmp_path / JOURNAL, pairs)
    read(file)
    name = pairs[1][0].id
    with contextlib.closing(sqlite3.connect(file)) as db:
        other = '{"question": 3, "answer": 4}'
        db.execute(f"UPDATE programs SET {column} = ? WHERE id = ?", (other, name))
        db.commit()
    with pytest.raises(UserError, match=re.escape(f"{file}: the {what} of {name!r} is damaged (")):
        read(file)


# The first step is omitted, because changed claims must be embedded, which takes seconds.
@pytest.mark.parametrize(("command", "step"), STEPS[1:])
@example((False, [(54, ""), (103, "")]))  # parts of triples
@attack(4, MUTATIONS)
def test_mutated_json(complete_runs, command, step, changes):
    def change(text):
        return mutate_json(json.loads(text), changes).decode("utf-8", "replace")

    attempt(_damage(complete_runs, command, step, change)[2])
