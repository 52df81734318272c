"""launch/answer.py: results, resuming after kills, and bad input, with tiny models."""

import dataclasses
import itertools
import json
import pathlib
import random
import runpy
import shutil
import signal
import sqlite3

import pytest

from cirag_jax import cli
from cirag_jax.config_files import load_config
from cirag_jax.datasets import load
from cirag_jax.runtime import codec
from tests.answering import VOLATILE, arguments, execute, journalled, lines, tiny_folders

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_KILLS = 5
_MAIN = runpy.run_path(str(_ROOT / "launch/answer.py"))["main"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory, command):
    """Four runs: uninterrupted, repeated, with the user's own question, and native_rag."""
    root = tmp_path_factory.mktemp("runs")
    question = "--config.question=  who is the patron  of balum? "
    plans = [
        {"arguments": arguments(folders, root / "whole")},
        {"arguments": arguments(folders, root / "whole")},
        {"arguments": arguments(folders, root / "one", question)},
        {"arguments": arguments(folders, root / "native", method="native_rag")},
    ]
    return root, execute(command, root / "logs", plans)


@pytest.mark.slow
def test_answer_result_and_files_match_the_journal(runs):
    root, (run, again, *_) = runs
    assert run.status == 0, run.err
    result = run.result
    contract = {
        "em", "f1", "acc", "recall", "granularities", "calls", "prompt_tokens", "cached_tokens",
        "generated_tokens", "seconds", "num_questions", "failures", "complete",
    }  # fmt: skip
    assert contract <= result.keys()
    assert (result["num_questions"], result["answered"], result["failures"]) == (8, 8, 0)
    assert result["complete"] is True and result["errors"] == {}
    assert set(result["granularities"]) == {"triple", "sentence", "passage", "default"}
    assert sum(result["granularities"].values()) == 8 and 1 <= result["steps"] <= 2
    for granularity in ("passage", "sentence", "triple"):
        assert set(result["recall"][granularity]) >= {"recall@3", "recall@5", "num_questions"}
        assert result["recall"][granularity]["num_questions"] == 8
    assert json.loads((root / "whole" / "result.json").read_text())["calls"] == result["calls"]

    rows = lines(root / "whole" / "predictions.jsonl")
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(8)]
    fields = [
        "id", "answer", "granularity", "passages", "sentences", "triples", "calls", "tokens",
        "error",
    ]  # fmt: skip
    assert all(list(row) == fields for row in rows)
    assert all(row["error"] is None and row["passages"] and row["triples"] for row in rows)
    for name in ("retrieve", "extract", "rank", "generate"):
        assert result["calls"][name] == sum(row["calls"][name] for row in rows) > 0
    for name in ("prompt", "generated"):
        assert result[f"{name}_tokens"] == sum(row["tokens"][name] for row in rows) > 0
    timings = lines(root / "whole" / "timings.jsonl")
    assert [row["id"] for row in timings] == [row["id"] for row in rows]
    assert all(set(row) == {"id", "seconds", "cached_tokens"} for row in timings)
    assert all(row["seconds"] > 0 for row in timings)
    # Each request in the journal was made once.
    assert len(run.asked) == len(set(run.asked)) == sum(result["calls"].values())
    assert set(run.asked) == journalled(root / "whole")
    # The same command makes no requests and has the same result.
    assert again.status == 0 and again.asked == []
    assert {k: v for k, v in again.result.items() if k not in VOLATILE} == {
        k: v for k, v in result.items() if k not in VOLATILE
    }


@pytest.mark.slow
def test_answer_own_question_is_shown_with_evidence(runs):
    root, (_, _, run, _) = runs
    assert run.status == 0, run.err
    result, row = run.result, lines(root / "one" / "predictions.jsonl")[0]
    assert (result["num_questions"], result["complete"], result["em"]) == (1, True, None)
    assert result["answer"] == row["answer"]
    assert set(result["recall"].values()) == {None}
    assert len(lines(root / "one" / "predictions.jsonl")) == 1
    # Standard error has the answer with its evidence and steps.
    assert "Answer: " in run.err and "who is the patron of balum?" in run.err
    assert row["passages"][0] in run.err or "Evidence" in run.err
    assert len(run.out.splitlines()) == 1


@pytest.mark.slow
def test_answer_native_rag_answers_the_same_questions(runs):
    root, (*_, run) = runs
    assert run.status == 0, run.err
    assert run.result["calls"] == {"retrieve": 8, "generate": 8}
    assert run.result["num_questions"] == 8 and run.result["granularities"]["passage"] == 8
    rows = lines(root / "native" / "predictions.jsonl")
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(8)]
    assert all(len(row["passages"]) == 3 and not row["triples"] for row in rows)
    names = {name for name, _ in run.batches}
    assert names == {"RetrieveHandler", "GenerateHandler"}


@pytest.mark.slow
def test_answer_killed_and_resumed_gives_the_same_bytes(runs, folders, tmp_path, command):
    """A run that is killed at five random writes repeats no recorded request.

    Only a request in flight at a kill is repeated, and it is the question's last request.
    """
    root, (whole, *_) = runs
    writes = sum(whole.result["calls"].values()) + 8  # responses and ends of questions
    rng = random.Random(4)
    points = [0, *sorted(rng.sample(range(1, writes - 1), _KILLS))]
    kills = [[b - a, rng.choice(("before", "after"))] for a, b in itertools.pairwise(points)]
    workdir, copies = tmp_path / "cut", tmp_path / "copies"
    plans = [
        {
            "arguments": arguments(folders, workdir),
            "stop": kill,
            "keep": [workdir, copies / str(index)],
        }
        for index, kill in enumerate([*kills, None])
    ]
    cut = execute(command, root / "cut", plans)
    assert [run.status for run in cut] == [-signal.SIGKILL] * _KILLS + [0], cut[-1].err

    recorded = [set(), *(journalled(copies / str(index)) for index in range(len(plans)))]
    num_repeated = 0
    for run, (before, after) in zip(cut, itertools.pairwise(recorded), strict=True):
        assert before <= after  # no response is lost
        assert not before & set(run.asked)  # no recorded request is repeated
        assert len(run.asked) == len(set(run.asked))
        lost = set(run.asked) - after
        last = {program: ordinal for program, ordinal, _ in run.asked}
        assert all(ordinal == last[program] for program, ordinal, _ in lost)
        num_repeated += len(lost)
    assert sum(len(run.asked) for run in cut) == len(whole.asked) + num_repeated
    assert recorded[-1] == set(whole.asked)
    assert all(recorded[i] < recorded[-1] for i in range(_KILLS))  # no kill came after the end

    expected = (root / "whole" / "predictions.jsonl").read_bytes()
    assert (workdir / "predictions.jsonl").read_bytes() == expected
    for name, value in whole.result.items():
        assert name in VOLATILE or cut[-1].result[name] == value, name


@pytest.mark.slow
def test_answer_interrupted_and_resumed_gives_the_same_bytes(runs, folders, tmp_path, command):
    root, (whole, *_) = runs
    plan = {"arguments": arguments(folders, tmp_path / "w"), "stop": [9, "after", signal.SIGINT]}
    (ended,) = execute(command, tmp_path / "first", [plan])
    assert (ended.status, ended.out) == (130, "") and "Traceback" not in ended.err
    said = "answer.py: interrupted; progress is saved; run the same command to resume"
    assert ended.err.splitlines()[-1].startswith(said)
    assert not (tmp_path / "w" / "result.json").exists()
    recorded = journalled(tmp_path / "w")
    assert 9 <= len(recorded) <= 10 and recorded < set(whole.asked)
    (ended,) = execute(command, tmp_path / "second", [{"arguments": plan["arguments"]}])
    assert (ended.status, len(ended.asked)) == (0, len(whole.asked) - len(recorded)), ended.err
    for name, value in whole.result.items():
        assert name in VOLATILE or ended.result[name] == value, name
    expected = (root / "whole" / "predictions.jsonl").read_bytes()
    assert (tmp_path / "w" / "predictions.jsonl").read_bytes() == expected


def fails(capsys, argv) -> str:
    """Runs a command that must exit with code 2; returns the last line of standard error."""
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/methods/cirag.py", ["answer.py", *argv])
    captured = capsys.readouterr()
    assert end.value.code == 2, captured.err
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "method=crag",
            "config.method='crag' is not a method; choose one of beam_retrieval, c2rag,",
        ),
        ("profile=squad", "config.profile='squad' is an unknown profile"),
        ("cirag.max_steps=-1", "max_steps=-1 must not be negative"),
        ("cirag.num_candidates=0", "num_candidates=0 must be at least 1"),
        (
            "cirag.granularities=('page',)",
            "granularities=('page',) must be a list of triple, sentence, passage",
        ),
        (
            "cirag.prompt_format=xml",
            "prompt_format='xml' is not one of multi_turn, paper, compact",
        ),
        ("cirag.beams=2", "unknown config key 'cirag.beams'"),
        ("data.limit=-1", "config.data.limit=-1 must not be negative"),
        ("data.split=autumn", "config.data.split=autumn matches no question"),
        ("data.corpus=everything", "config.data.corpus='everything' is not one of ircot_full"),
        ("question=   ", "config.question is empty"),
        ("stop_after_minutes=-1", "config.stop_after_minutes=-1.0 must not be negative"),
        ("in_flight=0", "in_flight=0 must be at least 1"),
        ("reader.max_tokens=-1", "config.reader.max_tokens must be at least 1"),
        ("reader.backend=cloud", "backend='cloud' is not one of jax, openai"),
        ("retriever.kind=psychic", "psychic"),
        (
            "rankers.triples.kind=oracle",
            "config.rankers.triples.kind='oracle' is not one of bi_encoder",
        ),
        ("rankers.triples.kind=cross_encoder", "needs config.rankers.triples.model"),
        ("triples=nowhere/at/all", "nowhere/at/all"),
        ("cache=/nowhere/at/all", "config.cache=/nowhere/at/all cannot be used"),
    ],
)
def test_answer_bad_setting_is_one_sentence(folders, tmp_path, capsys, override, words):
    message = fails(capsys, arguments(folders, tmp_path, f"--config.{override}"))
    assert words in message


def test_answer_unknown_preset_is_refused(folders, tmp_path, capsys):
    argv = arguments(folders, tmp_path)
    argv[0] = "--config=configs/methods/cirag.py:huge"
    assert "the presets are small, medium, paper" in fails(capsys, argv)


@pytest.mark.parametrize("damage", ["no triples", "broken corpus", "broken question", "no folder"])
def test_answer_bad_data_are_one_sentence(folders, tmp_path, capsys, damage):
    data = shutil.copytree(folders["data"], tmp_path / "data")
    words = {
        "no triples": "has triples; extract them",
        "broken corpus": "corpus.jsonl, line 3",
        "broken question": "questions.jsonl, line 2",
        "no folder": "data",
    }[damage]
    if damage == "no triples":
        (data / "openie.jsonl").unlink()
    elif damage == "no folder":
        shutil.rmtree(data)
    else:
        file, line = words.split(", line ")
        rows = (data / file).read_text().splitlines()
        rows[int(line) - 1] = rows[int(line) - 1][:-5]
        (data / file).write_text("\n".join(rows))
    argv = arguments({**folders, "data": data}, tmp_path / "w")
    message = fails(capsys, argv)
    assert words in message or words.replace(", line ", ":") in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cirag.num_candidates=5", "was started with cirag.num_candidates=4, not 5"),
        ("cirag.granularities=('passage',)", "was started with cirag.granularities="),
        ("seed=1", "was started with seed=0, not 1"),
        ("reader.max_tokens=7", "was started with reader.max_tokens=6, not 7"),
        ("data.limit=2", "was started with other passages (the documents"),
    ],
)
@pytest.mark.slow
def test_answer_changed_setting_in_same_workdir_is_refused(runs, folders, capsys, override, words):
    root, _ = runs
    before = (root / "whole" / "predictions.jsonl").read_bytes()
    message = fails(capsys, arguments(folders, root / "whole", f"--config.{override}"))
    assert words in message and "use another --workdir" in message
    assert (root / "whole" / "predictions.jsonl").read_bytes() == before


@pytest.mark.slow
def test_answer_changed_triples_in_same_workdir_are_refused(runs, folders, tmp_path, capsys):
    root, _ = runs
    data = shutil.copytree(folders["data"], tmp_path / "data")
    text = (data / "openie.jsonl").read_text("utf-8")
    (data / "openie.jsonl").write_text(text.replace("known for", "famous for", 1), "utf-8")
    message = fails(capsys, arguments({**folders, "data": data}, root / "whole"))
    assert "was started with other triples of its passages; use another --workdir" in message


@pytest.mark.slow
def test_answer_changed_method_in_same_workdir_is_refused(runs, folders, capsys):
    root, _ = runs
    argv = arguments(folders, root / "whole", method="native_rag")
    assert 'was started with method="cirag", not "native_rag"' in fails(capsys, argv)


def test_answer_stopped_run_marks_unanswered_questions(folders, tmp_path, capsys):
    """One question has a journal entry without an answer; the others have no entry."""
    argv = arguments(folders, tmp_path, "--config.stop_after_minutes=1e-9")
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/methods/cirag.py", ["answer.py", *argv])
    result = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert result["complete"] is False and result["answered"] == 0 and result["em"] is None
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        config = load_config("configs/methods/cirag.py", arguments(folders, tmp_path)[1:-1])
        question = load.select_questions(load.load_dataset(config.data), config.data)[0]
        row = (question.id, 0, codec.dump(dataclasses.asdict(question)))
        db.execute("INSERT INTO programs (id, place, input) VALUES (?, ?, ?)", row)
    db.close()
    with pytest.raises(SystemExit):
        cli.run(_MAIN, "configs/methods/cirag.py", ["answer.py", *argv])
    capsys.readouterr()
    rows = lines(tmp_path / "predictions.jsonl")
    assert [row["error"] for row in rows] == ["not answered yet"] * 8
    assert all(row["answer"] == "" and row["granularity"] is None for row in rows)
