"""Questions of your own with launch/answer.py: its default workdir, and the reported time."""

import json
import pathlib
import runpy
import sys

import pytest

from cirag_jax import cli
from cirag_jax.runtime.records import read_passages
from cirag_jax.runtime.store import JOURNAL
from tests.answering import lines, tiny_folders

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch" / "answer.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def ask(folders, tmp_path, monkeypatch, capsys):
    """Runs launch/answer.py in an empty folder; returns its exit code, result and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "enable_compilation_cache", lambda: None)

    def run(*arguments, method="native_rag"):
        values = {"reader.model": folders["decoder"], "reader.prefix_tokens": 0}
        values |= {"reader.max_tokens": 4, "retriever.kind": "bm25"}
        flags = [f"--config.{key}={value}" for key, value in values.items()]
        config = f"--config=configs/methods/{method}.py"
        monkeypatch.setattr(sys, "argv", ["answer.py", config, *flags, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        out, err = capsys.readouterr()
        return end.value.code, json.loads(out) if out else None, err

    return run


def test_answer_question_again_after_changes_needs_no_other_workdir(ask, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("Ferries carry mail to Tarnow.")
    question = f"--config.documents={notes}", "--config.question=Who carries mail?"
    code, result, err = ask(*question)
    assert code == 0 and result["calls"] == {"retrieve": 1, "generate": 1}, err
    workdir = tmp_path / "runs" / "question"
    (notes / "a.txt").write_text("Trains carry mail to Tarnow.")
    (notes / "b.txt").write_text("No mail comes in winter.")
    code, _, err = ask(*question)
    assert code == 0, err
    shown = [passage.text for passage in read_passages(workdir / JOURNAL).values()]
    assert sorted(shown) == ["No mail comes in winter.", "Trains carry mail to Tarnow."]
    code, result, err = ask(*question, "--config.native_rag.num_read=1")
    assert code == 0 and result["num_questions"] == 1, err
    # The same command repeats no request.
    assert ask(*question, "--config.native_rag.num_read=1")[1]["seconds"] == result["seconds"]


@pytest.mark.slow
def test_answer_question_again_with_another_extractor_extracts_again(ask, folders, tmp_path):
    (tmp_path / "a.txt").write_text("Ferries carry mail.")
    values = {
        "documents": "a.txt", "question": "Who carries mail?", "triples": "online",
        "model": folders["decoder"], "constructor.prefix_tokens": 0, "constructor.max_tokens": 4,
        "extractor.model": folders["decoder"], "extractor.prefix_tokens": 0,
        "rankers.aligner.kind": "bm25",
    }  # fmt: skip
    for tokens in (4, 5):
        values["extractor.max_tokens"] = tokens
        flags = [f"--config.{key}={value}" for key, value in values.items()]
        code, result, err = ask(*flags, method="kirag")
        assert code == 0 and result["extraction"]["passages"] == 1, err


def test_answer_question_in_a_given_workdir_after_changes_is_refused(ask, tmp_path):
    (tmp_path / "a.txt").write_text("Ferries carry mail.")
    question = "--config.documents=a.txt", "--config.question=Who?", "--workdir=w"
    assert ask(*question)[0] == 0
    (tmp_path / "a.txt").write_text("Trains carry mail.")
    code, _, err = ask(*question)
    assert code == 2 and "other passages (the documents" in err


def test_answer_question_does_not_replace_answers_of_a_dataset(ask, folders, tmp_path):
    data = f"--config.data.dir={folders['data']}", "--config.data.split=train"
    assert ask(*data, "--config.data.limit=2")[0] == 0
    code, result, err = ask(*data, "--config.question=who is the patron of balum?")
    assert code == 0 and result["num_questions"] == 1, err
    assert len(lines(tmp_path / "runs" / "answer" / "predictions.jsonl")) == 2


def test_answer_seconds_of_a_question_exclude_earlier_questions_and_loading(ask, tmp_path):
    (tmp_path / "a.txt").write_text("Ferries carry mail.")
    for question in ("Who?", "Where?"):
        _, result, _ = ask("--config.documents=a.txt", f"--config.question={question}")
        (timing,) = lines(tmp_path / "runs" / "question" / "timings.jsonl")
        assert result["seconds"] == result["seconds_per_question"] == timing["seconds"] > 0


def test_answer_seconds_per_question_divide_by_all_questions_of_the_workdir(ask, folders):
    data = f"--config.data.dir={folders['data']}", "--config.data.split=train"
    data += ("--config.data.corpus=ircot_full", "--workdir=w")
    assert ask(*data, "--config.data.limit=3")[0] == 0
    _, result, _ = ask(*data, "--config.data.limit=1")
    assert result["num_questions"] == 1
    assert result["seconds_per_question"] == result["seconds"] / 3
