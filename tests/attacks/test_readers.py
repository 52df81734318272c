"""Files that others write: datasets, prompts, trajectories, metrics, archives."""

import dataclasses
import io
import json
import pathlib
import zipfile

import pytest

from cirag_jax.datasets import jsonl
from cirag_jax.datasets.benchmarks.files import FoundFile, OfficialFile
from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.datasets.documents import read_documents
from cirag_jax.distill import trajectories
from cirag_jax.errors import UserError
from cirag_jax.llm.prompts_file import read_prompts
from cirag_jax.runtime import codec
from cirag_jax.training import metrics
from cirag_jax.types import Step, Trajectory
from tests import tiny
from tests.attacks.hostile import (
    CHANGES,
    DAMAGES,
    TEXTS,
    attack,
    damaged,
    garbled,
    held,
    untouched,
)

_DATASET = tiny.dataset()
_PASSAGE, _QUESTION = next(iter(_DATASET.corpus.values())), _DATASET.questions[0]
_TRIPLE = _DATASET.triples[_PASSAGE.id][0]
_STEP = Step("who?", (_PASSAGE.id,), (_TRIPLE,), (0.5,), "thought", (_TRIPLE,), "next?", "response")
_TRAJECTORY = Trajectory(
    _QUESTION.id, _QUESTION.question, "annotations", (_STEP,), "stopped", solved=True
)

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
    "documents.txt": "Ada was born in London.",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("readers")
    jsonl.write_dataset(_DATASET, root)
    for name, record in RECORDS.items():
        if not (root / name).exists():
            (root / name).write_text(json.dumps(record) + "\n")
    return root


def _read_dataset(root: pathlib.Path):
    found = jsonl.read_dataset(root)
    # What is taken can be written, and is then the same.
    again = root.parent / "again"
    jsonl.write_dataset(found, again)
    written = jsonl.read_dataset(again)
    assert (written.questions, written.corpus) == (found.questions, found.corpus)
    _scan_corpus(root)


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
        codec.dump(codec.encode(found)).encode() for found in trajectories.read_trajectories(root)
    ],
    "trajectories.json": trajectories.read_sidecar,
    "documents.txt": lambda root: read_documents(root / "documents.txt"),
}


def _scan_corpus(root: pathlib.Path):
    with CorpusScan(str(root)) as corpus:
        assert len(corpus) == len(list(corpus))


@pytest.mark.parametrize("more", ['{"id": "b"', '{"id": "a", "title": "t", "text": "x"}'])
def test_a_corpus_that_is_refused_is_closed(tmp_path, more):
    line = '{"id": "a", "title": "t", "text": "x"}\n'
    (tmp_path / "corpus.jsonl").write_text(line)
    _scan_corpus(tmp_path)
    (tmp_path / "corpus.jsonl").write_text(line + more)
    with pytest.raises(UserError, match="corpus.jsonl:2"):
        _scan_corpus(tmp_path)


def _attack(folder: pathlib.Path, name: str, content: bytes) -> None:
    before = (folder / name).read_bytes()
    try:
        (folder / name).write_bytes(content)
        with untouched(folder):
            held(lambda: READS[name](folder))
    finally:
        (folder / name).write_bytes(before)


@pytest.mark.parametrize("name", READS)
@attack(15, DAMAGES)
def test_other_bytes(folder, name, damages):
    _attack(folder, name, damaged((folder / name).read_bytes(), damages))


@pytest.mark.parametrize("name", [name for name in READS if name != "documents.txt"])
@attack(25, CHANGES)
def test_other_values(folder, name, changes):
    rest = (folder / name).read_bytes().split(b"\n", 1)[1]
    _attack(folder, name, garbled(RECORDS[name], changes) + b"\n" + rest)


@attack(20, TEXTS)
def test_documents_of_any_text(folder, text):
    _attack(folder, "documents.txt", text.encode("utf-8", "surrogatepass"))


@attack(40, CHANGES, DAMAGES)
def test_metrics_of_a_run_that_goes_on(folder, changes, damages):
    path = folder / "metrics.jsonl"
    good = b'{"step": 1, "seconds": 0.5}\n'
    path.write_bytes(good + garbled(RECORDS["metrics.jsonl"], changes) + b"\n" + good[:9])
    seconds = held(lambda: metrics.truncate(path, 10))
    assert seconds is not None and seconds >= 0.5  # the line that is whole counts
    json.dumps(seconds, allow_nan=False)
    path.write_bytes(damaged(good * 3, damages))
    held(lambda: metrics.truncate(path, 10))
    with metrics.MetricWriter(folder, 20, 5, stream=io.StringIO()) as writer:
        writer.write(6, {"train/loss": 1.0})
    last = path.read_text("utf-8").splitlines()[-1]
    assert json.loads(last)["step"] == 6


# ----------------------------------------------------------------------------------------- archives

_OFFICIAL = OfficialFile("dev.json", "https://example.org/x.zip", archive="x.zip")
_BENCHMARK = [{"_id": "a", "question": "who?", "answer": "Ada", "context": [["t", ["s"]]]}] * 3


def _records(path: pathlib.Path, *, archived: bool) -> None:
    list(FoundFile(_OFFICIAL, path, archived).records())


@attack(40, DAMAGES)
def test_an_archive_with_other_bytes(folder, damages):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/dev.json", json.dumps(_BENCHMARK))
    path = folder.parent / "x.zip"
    path.write_bytes(damaged(buffer.getvalue(), damages))
    held(lambda: _records(path, archived=True))


@attack(30, CHANGES)
def test_a_benchmark_with_other_values(folder, changes):
    path = folder.parent / "dev.json"
    path.write_bytes(garbled(_BENCHMARK, changes))
    held(lambda: _records(path, archived=False))


@attack(40, DAMAGES)
def test_a_table_with_other_bytes(folder, damages):
    path = folder.parent / "x.csv"
    path.write_bytes(damaged(b'question,answer\n"who, then?",Ada\nwhere?,"in ""Tarn"""\n', damages))
    held(lambda: list(FoundFile(OfficialFile("x.csv", "-"), path, False).records()))


@pytest.mark.parametrize("number", [b"9" * 5000, b"[" * 100_000])
def test_a_number_and_a_depth_that_python_refuses(folder, number):
    path = folder.parent / "dev.json"
    path.write_bytes(b'[{"a": ' + number)
    assert held(lambda: _records(path, archived=False) or True) is None
