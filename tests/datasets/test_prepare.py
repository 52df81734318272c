import concurrent.futures
import fcntl
import json
import pathlib
import subprocess
import sys
import threading

import pytest

from cirag_jax.datasets import corpus, prepare
from cirag_jax.datasets.benchmarks import BENCHMARKS
from cirag_jax.datasets.jsonl import read_dataset

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def run(capsys, *flags):
    code = prepare.main(list(flags))
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("benchmark", "config", "corpus", "num_questions", "num_passages"),
    [
        ("hotpotqa", "distractor", "ircot_full", {"train": 2, "dev": 1}, 6),
        ("two_wiki", None, "ircot_full", {"train": 1, "dev": 1, "test": 1}, 5),
        ("two_wiki", None, "supporting_only", {"train": 1, "dev": 1, "test": 1}, 5),
        ("musique", "ans", "supporting_only", {"train": 1, "dev": 1, "test": 1}, 3),
        ("musique", "full", "per_question", {"train": 1, "dev": 2, "test": 2}, 5),
        ("multihop_rag", None, "ircot_full", {"test": 2}, 3),
        ("bamboogle", None, "ircot_full", {"test": 2}, 0),
        ("web_questions", None, "ircot_full", {"train": 1, "test": 2}, 0),
        ("nq_open", None, "ircot_full", {"train": 1, "dev": 2}, 0),
        ("popqa", None, "ircot_full", {"test": 2}, 0),
        ("asqa", None, "ircot_full", {"train": 1, "dev": 1}, 0),
        ("asqa", "short", "ircot_full", {"train": 1, "dev": 1}, 0),
        ("eli5", None, "ircot_full", {"train": 1, "dev": 1}, 0),
    ],
)
def test_prepare_folder_is_readable(
    tmp_path, capsys, benchmark, config, corpus, num_questions, num_passages
):
    out = tmp_path / "folder"
    flags = [f"--benchmark={benchmark}", f"--out={out}", f"--corpus={corpus}"]
    flags += [f"--config={config}"] if config else []
    code, stdout, _ = run(capsys, *flags, f"--manual_dir={FIXTURES / benchmark}")
    assert code == 0
    result = json.loads(stdout)
    assert result["num_questions"] == num_questions
    dataset = read_dataset(out, corpus=num_passages > 0)
    assert len(dataset.questions) == sum(num_questions.values())
    assert len(dataset.corpus) == result["num_passages"] == num_passages


def test_prepare_incomplete_context_becomes_none(tmp_path):
    dataset = prepare.prepare(
        "musique", tmp_path, manual_dir=FIXTURES / "musique", corpus="supporting_only"
    )
    train = dataset.questions[0]
    assert train.context is None  # Its second passage is not in the corpus.
    assert train.supporting is not None
    assert read_dataset(tmp_path).questions == dataset.questions


def test_prepare_limit_draws_questions_and_keeps_the_corpus(tmp_path):
    def draw(limit, seed, corpus):
        return prepare.prepare(
            "hotpotqa",
            tmp_path / f"{limit}{seed}{corpus}",
            manual_dir=FIXTURES / "hotpotqa",
            limit=limit,
            seed=seed,
            corpus=corpus,
        )

    full = draw(1, 0, "ircot_full")
    assert [question.split for question in full.questions] == ["train", "dev"]
    assert len(full.corpus) == 6
    assert draw(1, 0, "ircot_full") == full
    drawn = {draw(1, seed, "ircot_full").questions[0].id for seed in range(8)}
    assert drawn == {"h1", "h2"}
    selected = draw(1, 0, "selected_questions")
    assert {p for q in selected.questions for p in q.context or ()} == set(selected.corpus)


def test_prepare_seed_determines_sampled_passages(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SAMPLED", 1)
    drawn = [
        prepare.prepare(
            "hotpotqa",
            tmp_path / str(seed),
            manual_dir=FIXTURES / "hotpotqa",
            corpus="supporting_and_sampled",
            seed=seed,
        )
        for seed in (0, 1)
    ]
    assert [len(dataset.corpus) for dataset in drawn] == [5, 6]


def test_prepare_bad_input_exits_with_2(tmp_path, capsys):
    code, stdout, stderr = run(
        capsys, "--benchmark=musique", f"--out={tmp_path}", f"--manual_dir={tmp_path / 'none'}"
    )
    assert (code, stdout) == (2, "")
    assert stderr == f"prepare: manual_dir {tmp_path / 'none'} is not a folder.\n"


def test_prepare_argument_invalid_utf8_is_refused(tmp_path, capsys):
    out = tmp_path / "caf\udce9"
    flags = ["--benchmark=hotpotqa", f"--manual_dir={FIXTURES / 'hotpotqa'}", f"--out={out}"]
    code, _, stderr = run(capsys, *flags)
    assert code == 2 and stderr.endswith("caf\\udce9' is not valid UTF-8\n") and not out.exists()


def test_prepare_negative_limit_is_refused(tmp_path, capsys):
    code, _, stderr = run(capsys, "--benchmark=musique", f"--out={tmp_path}", "--limit=-1")
    assert (code, stderr) == (2, "prepare: --limit=-1 must not be negative.\n")


def test_prepare_unwritable_folder_is_named(tmp_path, capsys, monkeypatch):
    flags = ["--benchmark=musique", "--config=ans", f"--manual_dir={FIXTURES / 'musique'}"]
    (tmp_path / "file").write_text("")
    code, _, stderr = run(capsys, *flags, f"--out={tmp_path / 'file'}")
    assert code == 2
    told = f"prepare: {tmp_path / 'file' / 'tfds'} cannot be written (Not a directory)."
    assert stderr.splitlines()[-1] == told

    def full(self, **_):
        raise RuntimeError("write() failed: No space left on device;\nwriting x")

    monkeypatch.setattr(BENCHMARKS["musique"], "download_and_prepare", full)
    code, _, stderr = run(capsys, *flags, f"--out={tmp_path / 'full'}")
    assert code == 2 and stderr.endswith("(write() failed: No space left on device; writing x).\n")


def test_prepare_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "cirag_jax.datasets.prepare", "--benchmark=hotpotqa"]
    flags = [f"--manual_dir={FIXTURES / 'hotpotqa'}", f"--out={tmp_path}"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "hotpotqa_distractor"


def test_prepare_waits_for_others_with_the_same_tfds_folder(tmp_path, monkeypatch):
    """Each builds the files again, so another one must not read them at the same time."""
    waiting, order, flock = threading.Event(), [], fcntl.flock

    def announce(file, operation):
        waiting.set()
        flock(file, operation)

    monkeypatch.setattr(prepare.fcntl, "flock", announce)
    monkeypatch.setattr(prepare, "prepare_builder", lambda *_: order.append("built"))
    monkeypatch.setattr(prepare, "to_dataset", lambda _: 1 / 0)
    with (tmp_path / ".lock").open("a") as file:
        flock(file, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            other = pool.submit(prepare.prepare, "two_wiki", tmp_path / "out", data_dir=tmp_path)
            assert waiting.wait(10)
            order.append("released")
            flock(file, fcntl.LOCK_UN)
            assert isinstance(other.exception(), ZeroDivisionError)
    assert order == ["released", "built"]
