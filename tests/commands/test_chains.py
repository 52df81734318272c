"""launch/distill.py --config=configs/chains.py: chains from which a reader answers correctly."""

import dataclasses
import json
import pathlib
import re
import runpy

import pytest

from cirag_jax import cli
from cirag_jax.datasets import jsonl
from cirag_jax.datasets.chain_files import FILE, read_chains
from cirag_jax.runtime.records import read_records
from cirag_jax.runtime.store import Journal
from tests import tiny, tiny_decoder
from tests.answering import lines
from tests.commands import model_server

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MAIN = runpy.run_path(str(_ROOT / "launch/distill.py"))["main"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {
        "data.dir": tiny.dataset_folder(root / "data"),
        "encoder.model": tiny.model_folder(root / "encoder"),
    }


@pytest.fixture(scope="module")
def server():
    """A reader whose answer is the tail of the evidence's fact about a patron."""

    def answer(text, wants_triples):
        found = re.search(r"'patron', '([^']+)'", text)
        return f"Answer: {found[1] if found else 'unknown'}", "stop"

    with model_server.model_server(answer) as running:
        yield running


def execute(capsys, folders, workdir, *more, status=0):
    values = [f"{key}={value}" for key, value in folders.items()]
    values += ["trace.choice=scores", "trace.max_length=2", "in_flight=3", *more]
    argv = ["--config=configs/chains.py", *(f"--config.{value}" for value in values)]
    with pytest.raises(SystemExit) as end:
        cli.run(_MAIN, "configs/trajectories.py", ["distill.py", *argv, f"--workdir={workdir}"])
    captured = capsys.readouterr()
    assert end.value.code == status, captured.err
    return json.loads(captured.out) if status == 0 else captured.err


def read_by(server):
    return ("reader.backend=openai", f"reader.base_url={server.url}", "reader.model=rules")


def test_chains_are_the_first_from_which_the_reader_answers(folders, server, tmp_path, capsys):
    result = execute(capsys, folders, tmp_path, *read_by(server))
    rows = lines(tmp_path / FILE)
    assert 0 < len(rows) <= 8 and result["kept"] == len(rows)  # Eight training questions.
    assert result["num_questions"] == 8 and result["kept"] + result["dropped"] == 8
    assert sum(result["kept_by_length"].values()) == sum(result["kept_by_rank"].values())
    assert result["built"] == 8 * 5 and result["without_triples"] == result["failures"] == 0
    assert result["complete"] and result["held_out"] == {}
    predictions = {r.id: r.outcome for r in read_records(tmp_path / "journal.sqlite")}
    for row in rows:
        attempts = predictions[row["question_id"]]["attempts"]
        assert all(a["answer"] != row["answer"] for a in attempts[: row["rank"]])
        assert attempts[row["rank"]]["answer"] == row["answer"]
        assert any(step[1] == "patron" for step in row["steps"])


def test_chains_killed_and_resumed_give_the_same_bytes(
    folders, server, tmp_path, capsys, monkeypatch
):
    execute(capsys, folders, tmp_path / "whole", *read_by(server))
    record, count = Journal.record, 0

    def record_or_kill(self, *args):
        nonlocal count
        count += 1
        if count == 25:
            raise KeyboardInterrupt
        return record(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", record_or_kill)
        execute(capsys, folders, tmp_path / "cut", *read_by(server), status=130)
    assert not (tmp_path / "cut" / FILE).exists()
    result = execute(capsys, folders, tmp_path / "cut", *read_by(server))
    assert result["complete"]
    assert (tmp_path / "cut" / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()


def test_chains_of_wrong_answers_are_dropped(folders, tmp_path, capsys):
    with model_server.model_server(lambda text, _: ("Answer: nobody", "stop")) as running:
        result = execute(capsys, folders, tmp_path, *read_by(running), "data.limit=2")
    assert (result["kept"], result["dropped"]) == (0, 2) and (tmp_path / FILE).read_text() == ""


def test_chains_questions_without_triples_or_chain_are_counted(folders, server, tmp_path, capsys):
    dataset = tiny.dataset()
    first, second = [q for q in dataset.questions if q.split == "train"][:2]
    gold = first.supporting or ()
    assert gold and not {*gold} & {*(second.supporting or ())}
    triples = {**dataset.triples, **dict.fromkeys(gold, ())}
    jsonl.write_dataset(dataclasses.replace(dataset, triples=triples), tmp_path / "data")
    changed = {**folders, "data.dir": tmp_path / "data"}
    more = (*read_by(server), "data.limit=2")
    result = execute(capsys, changed, tmp_path / "w", *more)
    assert (result["without_triples"], result["without_chain"]) == (1, 0)
    # No option has probability 1.
    result = execute(capsys, changed, tmp_path / "v", *more, "trace.min_probability=1.0")
    assert (result["without_triples"], result["without_chain"]) == (1, 1)
    assert result["kept"] == result["dropped"] == result["built"] == 0


def test_chains_letters_of_a_tiny_model_run(folders, tmp_path, capsys):
    decoder = tiny_decoder.folder(tmp_path / "decoder", max_position_embeddings=8192)
    more = ("trace.choice=letters", f"model={decoder}", "reader.max_tokens=8", "data.limit=2")
    result = execute(capsys, folders, tmp_path / "w", *more, "trace.beam=2", "trace.branches=2")
    assert (result["num_questions"], result["failures"]) == (2, 0) and result["built"] >= 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("trace.passages=retrieved",), "config.trace.passages=retrieved is not supported"),
        (("trace.evidence=triples",), "config.trace.evidence=triples is not supported"),
        (
            ("trace.choice=letters", "constructor.backend=openai", "constructor.base_url=http://x"),
            "constructor.*score",
        ),
        (("trace.beam=0",), "beam"),
    ],
)
def test_chains_bad_settings_are_refused(more, words, folders, tmp_path, capsys):
    assert re.search(words, execute(capsys, folders, tmp_path, *more, status=2))


def test_chains_questions_without_gold_passages_are_refused(folders, tmp_path, capsys):
    dataset = tiny.dataset()
    bare = tuple(dataclasses.replace(q, supporting=None) for q in dataset.questions)
    jsonl.write_dataset(dataclasses.replace(dataset, questions=bare), tmp_path / "data")
    message = execute(capsys, {**folders, "data.dir": tmp_path / "data"}, tmp_path / "w", status=2)
    assert "has gold passages" in message


def test_read_chains_of_a_workdir_gives_units(folders, server, tmp_path, capsys):
    execute(capsys, folders, tmp_path, *read_by(server))
    chains = read_chains(str(tmp_path))
    row = lines(tmp_path / FILE)[0]
    first = chains[row["question_id"]].steps[0]
    head, relation, tail, passage, _ = row["steps"][0]
    assert (first.text, first.passage_id) == (f"<{head}; {relation}; {tail}>", passage)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_chains_train_an_aligner(folders, server, tmp_path, capsys):
    execute(capsys, folders, tmp_path / "chains", *read_by(server))
    number = len(lines(tmp_path / "chains" / FILE))
    values = {
        "data.dir": folders["data.dir"], "data.chains": tmp_path / "chains",
        "model.spec": folders["encoder.model"], "dev.questions": 2, "batch_size": 2,
        "prefixes_per_question": 1, "num_negatives": 2, "num_steps": 2, "eval_every": 1,
        "query_max_length": 64, "unit_max_length": 32, "order": "printed",
    }  # fmt: skip
    argv = ["--config=configs/aligner.py", *(f"--config.{k}={v}" for k, v in values.items())]
    main = runpy.run_path(str(_ROOT / "launch/train.py"))["main"]
    with pytest.raises(SystemExit) as end:
        cli.run(main, "configs/aligner.py", ["train.py", *argv, f"--workdir={tmp_path / 'w'}"])
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    result = json.loads(captured.out)
    assert result["step"] == 2 and result["num_chains"] + result["num_dev_questions"] <= number + 2
    assert "6 questions have a chain" in captured.err
