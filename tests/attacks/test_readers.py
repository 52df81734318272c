"""Hostile input files: datasets, prompts, trajectories, metrics, archives."""

import copy
import dataclasses
import io
import json
import pathlib
import zipfile
from typing import cast

import pytest
from hypothesis import example
from ml_collections import ConfigDict

from cirag_jax.commands import follow, results, series
from cirag_jax.datasets import jsonl
from cirag_jax.datasets.benchmarks.files import FoundFile, OfficialFile
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.datasets.documents import read_documents
from cirag_jax.distill import trajectories
from cirag_jax.errors import UserError
from cirag_jax.evaluation.difficulty import AGGREGATES, CAUSES, NUM_BINS
from cirag_jax.grade import documents as articles
from cirag_jax.llm.prompts_file import read_prompts
from cirag_jax.reports import difficulty, figures
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.training import metrics
from cirag_jax.types import Step, Trajectory
from tests import tiny
from tests.attacks.hostile import (
    CORRUPTIONS,
    MUTATIONS,
    TEXTS,
    attack,
    attempt,
    corrupt,
    mutate_json,
    replaced,
    unchanged,
)

_DATASET = tiny.dataset()
_PASSAGE, _QUESTION = next(iter(_DATASET.corpus.values())), _DATASET.questions[0]
_TRIPLE = _DATASET.triples[_PASSAGE.id][0]
_STEP = Step("who?", (_PASSAGE.id,), (_TRIPLE,), (0.5,), "thought", (_TRIPLE,), "next?", "response")
_TRAJECTORY = Trajectory(
    _QUESTION.id, _QUESTION.question, "annotations", (_STEP,), "stopped", solved=True
)

_SHARE = {"value": 0.5, "low": 0.25, "high": 0.75, "num_questions": 2, "errors": 1}
_R = {"value": 0.1, "num_points": 4, "p": 0.5}
_SYSTEM = {
    "error": _SHARE,
    "matrix": {"2": [_SHARE] * NUM_BINS},
    "by_hops": {"2": _SHARE},
    "left_out": {"no answer": 1},
    "strongest": ["mean"],
    "failures": dict.fromkeys(CAUSES, _SHARE),
    "correlations": {
        how: {
            **{"bins": {"2": _R}, "mean": _R, "diagonal": _R},
            **{"questions": {"all": _R}, "hops": _R},
        }
        for how in AGGREGATES
    },
}
# Results of launch/compare.py, of training and of configs/difficulty.py in one.
_RESULT = {
    "complete": True,
    "dev/loss": 0.5,
    "settings": {
        **{"aggregate": "mean", "unit": "sentence", "data": "d", "score": "em"},
        **{"chunks": None, "judgements": None},
    },
    "num_questions": 2,
    "left_out": {},
    "hops": {"2": {"reason": "one question"}},
    "systems": {"a": _SYSTEM},
    "differences": {},
}

_DOCUMENTS = ("documents.txt", "documents.md", "documents.html")
# A record of each kind of file.
RECORDS = {
    "questions.jsonl": dataclasses.asdict(_QUESTION),
    "corpus.jsonl": dataclasses.asdict(_PASSAGE),
    "openie.jsonl": {
        "passage_id": _PASSAGE.id,
        "triples": [[_TRIPLE.head, _TRIPLE.relation, _TRIPLE.tail]],
        "triple_sentences": [0],
    },
    "prompts.jsonl": {
        "id": "a",
        "messages": [{"role": "user", "content": "x", "observation": "y"}],
        "temperature": 0.5,
        "stop": ["z"],
        "json_schema": {"type": "object"},
    },
    "trajectories.jsonl": codec.encode(_TRAJECTORY),
    "trajectories.json": {"prompt": {"units": "triple"}, "sources": ["x"]},
    "metrics.jsonl": {"step": 1, "seconds": 0.5, "train/loss": 1.0},
    **dict.fromkeys(
        _DOCUMENTS, "---\ntitle: Ada\n---\n# L\n| a |\n|-|\n| b |\n<p>[x](y)</p> $*1*$ [^1]"
    ),
    "documents.jsonl": {
        **{"id": "a", "title": "t", "text": "Ada was born. So was Bo.", "source": "s"},
        **{"date": "1852", "sentences": ["Ada was born.", "So was Bo."]},
    },
    "difficulty.jsonl": {"id": "a", "hops": 2, "difficulty": {"mean": 0.5}},
    "result.json": _RESULT,
    "config.json": {
        **{"methods": ["direct", "x=cirag:paper"], "repeats": 2, "checkpoint": "w"},
        **{"optimizer": {"learning_rate": 0.1}, "model": {"spec": "m"}},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("readers")
    jsonl.write_dataset(_DATASET, root)
    for name, record in RECORDS.items():
        if not (root / name).exists():
            is_text = name in _DOCUMENTS
            (root / name).write_text(str(record) if is_text else json.dumps(record) + "\n")
    (root / "direct").mkdir()
    (root / "direct" / JOURNAL).touch()
    return root


def _read_dataset(root: pathlib.Path):
    dataset = jsonl.read_dataset(root)
    # An accepted dataset can be written and read again.
    copy_folder = root.parent / "again"
    jsonl.write_dataset(dataset, copy_folder)
    written = jsonl.read_dataset(copy_folder)
    assert (written.questions, written.corpus) == (dataset.questions, dataset.corpus)
    _scan_corpus(root)


def _read_difficulty(root: pathlib.Path, draws: bool = False):
    """Reads a difficulty result as the page of several runs does, by default without heat maps."""
    with pytest.MonkeyPatch.context() as patch:
        if not draws:
            patch.setattr(difficulty, "heat_maps", lambda result: ())
        return results._difficulty(str(root), {"a": {"a": cast(Record, None)}})


def _follow(root: pathlib.Path):
    def wait(seconds):
        raise UserError("it has not ended")

    config = ConfigDict({"checkpoint": str(root), "metric": "dev/loss", "follow": True})
    follow._Follower(config, root / "evaluated", lambda *_: {}).watch(wait)


def _read_result(root: pathlib.Path):
    _read_difficulty(root)
    results._unfinished([("a", root)])
    result = series.finished(root, ConfigDict(RECORDS["config.json"]))
    if result is not None:
        rows = {("1",): series.figures(result, "dev/loss")}
        series.best_of({key: next(iter(row.values())) for key, row in rows.items()}, "dev/loss")
        series.table(rows, ("step",))
    _follow(root)


def _read_config(root: pathlib.Path):
    _follow(root)
    results._runs_inside(str(root))
    assert isinstance(results._recorded_repeats(str(root)), int | None)
    series.finished(root, ConfigDict(RECORDS["config.json"]))


READS = {
    "questions.jsonl": _read_dataset,
    "corpus.jsonl": _read_dataset,
    "openie.jsonl": _read_dataset,
    "prompts.jsonl": lambda root: [
        codec.dump(codec.encode_request(request)).encode()
        for request in read_prompts(
            root / "prompts.jsonl", {"max_tokens": 5}, check_schemas=False
        ).values()
    ],
    "trajectories.jsonl": lambda root: [
        codec.dump(codec.encode(row)).encode() for row in trajectories.read_trajectories(root)
    ],
    "trajectories.json": trajectories.read_sidecar,
    "documents.txt": lambda root: read_documents(root / "documents.txt"),
    "documents.md": lambda root: read_documents(root / "documents.md"),
    "documents.html": lambda root: read_documents(root / "documents.html"),
    "documents.jsonl": lambda root: articles.select(articles.read(str(root)), 1, 9),
    "difficulty.jsonl": _read_difficulty,
    "result.json": _read_result,
    "config.json": _read_config,
}


def _scan_corpus(root: pathlib.Path):
    with CorpusScan(str(root)) as corpus:
        assert len(corpus) == len(list(corpus))


@pytest.mark.parametrize("more", ['{"id": "b"', '{"id": "a", "title": "t", "text": "x"}'])
def test_rejected_corpus_is_closed(tmp_path, more):
    line = '{"id": "a", "title": "t", "text": "x"}\n'
    (tmp_path / "corpus.jsonl").write_text(line)
    _scan_corpus(tmp_path)
    (tmp_path / "corpus.jsonl").write_text(line + more)
    with pytest.raises(UserError, match="corpus.jsonl:2"):
        _scan_corpus(tmp_path)


@pytest.mark.parametrize("value", [0.5, 10**400, "x", [], None])
def test_difficulty_with_any_value_is_drawn_or_rejected(folder, tmp_path, value):
    result_json = copy.deepcopy(_RESULT)
    result_json["systems"]["a"]["matrix"]["2"][1] = {**_SHARE, "value": value}
    for name, content in (("difficulty.jsonl", {"id": "a"}), ("result.json", result_json)):
        (tmp_path / name).write_text(json.dumps(content))
    result = attempt(lambda: _read_difficulty(tmp_path, draws=True))
    figures.pyplot().close("all")
    assert (result is not None) == (value in (0.5, None))


def _attack(folder: pathlib.Path, name: str, content: bytes) -> None:
    with replaced(folder / name, content), unchanged(folder):
        attempt(lambda: READS[name](folder))


@pytest.mark.parametrize("name", READS)
@attack(15, CORRUPTIONS)
def test_corrupt_bytes(folder, name, damages):
    _attack(folder, name, corrupt((folder / name).read_bytes(), damages))


@pytest.mark.parametrize("name", [name for name in READS if name not in _DOCUMENTS])
@attack(25, MUTATIONS)
def test_mutated_json(folder, name, changes):
    other_lines = (folder / name).read_bytes().split(b"\n", 1)[1]
    _attack(folder, name, mutate_json(RECORDS[name], changes) + b"\n" + other_lines)


@pytest.mark.parametrize("name", _DOCUMENTS)
@attack(20, TEXTS)
def test_documents_with_any_text(folder, name, text):
    _attack(folder, name, text.encode("utf-8", "surrogatepass"))


@attack(40, MUTATIONS, CORRUPTIONS)
def test_metrics_of_resumed_run(folder, changes, damages):
    path = folder / "metrics.jsonl"
    good = b'{"step": 1, "seconds": 0.5}\n'
    path.write_bytes(good + mutate_json(RECORDS["metrics.jsonl"], changes) + b"\n" + good[:9])
    seconds = attempt(lambda: metrics.truncate(path, 10))
    assert seconds is not None and seconds >= 0.5  # the first line is complete, so its time counts
    json.dumps(seconds, allow_nan=False)
    path.write_bytes(corrupt(good * 3, damages))
    attempt(lambda: metrics.truncate(path, 10))
    with metrics.MetricWriter(folder, 20, 5) as writer:
        writer.write(6, {"train/loss": 1.0})
    last = path.read_text("utf-8").splitlines()[-1]
    assert json.loads(last)["step"] == 6


_OFFICIAL = OfficialFile("dev.json", "https://example.org/x.zip", archive="x.zip")
_BENCHMARK = [{"_id": "a", "question": "who?", "answer": "Ada", "context": [["t", ["s"]]]}] * 3


def _records(path: pathlib.Path, *, archived: bool) -> None:
    list(FoundFile(_OFFICIAL, path, archived).records())


_PACKED = {"deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}


@pytest.mark.parametrize("packed", _PACKED)
@example([("over", 50, b"\xff" * 4)])  # the compressed data
@attack(20, CORRUPTIONS)
def test_archive_corrupt_bytes(folder, packed, damages):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", _PACKED[packed]) as archive:
        archive.writestr("data/dev.json", json.dumps(_BENCHMARK))
    path = folder.parent / "x.zip"
    path.write_bytes(corrupt(buffer.getvalue(), damages))
    attempt(lambda: _records(path, archived=True))


@attack(30, MUTATIONS)
def test_benchmark_mutated_json(folder, changes):
    path = folder.parent / "dev.json"
    path.write_bytes(mutate_json(_BENCHMARK, changes))
    attempt(lambda: _records(path, archived=False))


@attack(40, CORRUPTIONS)
def test_table_corrupt_bytes(folder, damages):
    path = folder.parent / "x.csv"
    path.write_bytes(corrupt(b'question,answer\n"who, then?",Ada\nwhere?,"in ""Tarn"""\n', damages))
    attempt(lambda: list(FoundFile(OfficialFile("x.csv", "-"), path, False).records()))


@pytest.mark.parametrize("number", [b"9" * 5000, b"[" * 100_000])
def test_json_beyond_python_limits_is_rejected(folder, number):
    path = folder.parent / "dev.json"
    path.write_bytes(b'[{"a": ' + number)
    assert attempt(lambda: _records(path, archived=False) or True) is None
