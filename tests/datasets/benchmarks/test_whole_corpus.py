"""Dataset folders with a complete corpus, on tiny invented files in the official formats."""

import bz2
import dataclasses
import gzip
import hashlib
import io
import json
import pathlib
import re
import shutil
import tarfile

import pytest

from cirag_jax.datasets import jsonl, prepare
from cirag_jax.datasets.benchmarks import corpora, whole_corpus
from cirag_jax.datasets.benchmarks.hotpotqa import HotpotQA
from cirag_jax.datasets.benchmarks.whole_corpus import Names
from cirag_jax.datasets.passage_file import PassagesById
from cirag_jax.types import Passage

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
STEM = "enwiki-20171001-pages-meta-current-withlinks-abstracts"
ARCHIVE = f"{STEM}.tar.bz2"


@pytest.fixture
def files(tmp_path):
    """Returns a function that copies a benchmark's official files."""

    def copy(benchmark):
        return pathlib.Path(shutil.copytree(FIXTURES / benchmark, tmp_path / "files"))

    return copy


def run(capsys, files, benchmark, out, *flags):
    config = ["--config=abstracts"] if benchmark == "hotpotqa" else []
    arguments = [f"--benchmark={benchmark}", f"--manual_dir={files}", f"--out={out}"]
    code = prepare.main([*arguments, *config, *flags])
    return code, *capsys.readouterr()


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def archive(*members):
    """Returns an archive of members (name, uncompressed content)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in members:
            content = bz2.compress(content) if name.endswith(".bz2") else content
            info = tarfile.TarInfo(f"{STEM}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return bz2.compress(packed.getvalue())


def unpack(folder):
    """Replaces the archive in a folder by what it contains."""
    with tarfile.open(folder / ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    (folder / ARCHIVE).unlink()


@pytest.mark.parametrize("form", ["archive", "folder"])
def test_prepare_abstracts_maps_gold_titles_to_page_ids(tmp_path, files, capsys, form):
    folder = files("hotpotqa")
    digest = hashlib.sha256((folder / ARCHIVE).read_bytes()).hexdigest()
    if form == "folder":
        unpack(folder)
    code, stdout, stderr = run(capsys, folder, "hotpotqa", tmp_path / "out")
    assert code == 0, stderr
    assert json.loads(stdout)["num_passages"] == 7
    dataset = jsonl.read_dataset(tmp_path / "out")
    assert list(dataset.corpus) == ["12", "25", "39", "303", "307", "330", "332"]
    assert dataset.corpus["25"] == Passage(
        "25",
        "Orla Venn",
        "Orla Venn (1920–1988) was a writer. She was born in Port Saffron, the capital of Merovia.",
        (
            "Orla Venn (1920–1988) was a writer.",
            "She was born in Port Saffron, the capital of Merovia.",
        ),
    )
    questions = {question.id: question for question in dataset.questions}
    assert questions["h1"].supporting == ("12", "25")
    assert questions["h1"].supporting_sentences == (("12", 0), ("25", 1))
    assert questions["h1"].context == ("12", "39", "25", "307")
    # A sentence beyond the abstract is dropped; the dev contexts lack gold passages.
    assert questions["h2"].supporting_sentences == (("25", 0), ("39", 0))
    # "The Clay Bell" is called "The clay bell" in the corpus.
    assert questions["h3"].supporting == ("303", "39", "307")
    assert questions["h4"].supporting is None and questions["h4"].context == ("12", "330")
    assert {question.setting for question in dataset.questions} == {"abstracts"}
    assert "skipped 1 passages without a text" in stderr
    sources = json.loads((tmp_path / "out" / "sources.json").read_text())
    assert (sources["num_passages"], sources["without_gold"]) == (7, 0)
    assert sources["files"][-1]["sha256"] == (digest if form == "archive" else None)


@pytest.mark.parametrize("benchmark", ["dpr_nq", "dpr_web_questions"])
@pytest.mark.parametrize("zipped", [False, True])
def test_prepare_dpr_gold_is_the_first_positive_passage(tmp_path, files, capsys, benchmark, zipped):
    folder = files(benchmark)
    if zipped:
        for file in (*folder.glob("*.json"), *folder.glob("*.tsv")):
            with gzip.open(f"{file}.gz", "wb") as packed:
                packed.write(file.read_bytes())
            file.unlink()
    code, stdout, stderr = run(capsys, folder, benchmark, tmp_path / "out")
    assert code == 0, stderr
    assert json.loads(stdout)["num_questions"] == {"train": 2, "dev": 1, "test": 2}
    dataset = jsonl.read_dataset(tmp_path / "out")
    assert dataset.corpus["1"] == Passage(
        "1", "The Glass Lantern", 'The "Lantern" is by Orla Venn.'
    )
    assert [q.supporting for q in dataset.questions] == [("2",), ("1",), ("3",), None, None]
    assert dataset.questions[1].answers == ("Orla Venn", "Venn")
    assert dataset.questions[3].answers == ("Norland", "Norland's coast")
    sources = json.loads((tmp_path / "out" / "sources.json").read_text())
    for file in sources["files"]:
        content = (folder / file["name"]).read_bytes()
        assert file["bytes"] == len(content)
        assert file["sha256"] == hashlib.sha256(content).hexdigest()


def test_prepare_whole_corpus_is_never_in_memory(tmp_path, files, capsys, monkeypatch):
    """Only the gold passages are remembered while the corpus is copied."""
    folder, alive = files("dpr_nq"), []
    rows = (f"{n}\ttext {n}\ttitle {n}\n" for n in range(1, 5001))
    (folder / "psgs_w100.tsv").write_text("id\ttext\ttitle\n" + "".join(rows))
    add = whole_corpus.Names.add

    def counting(self, name, found):
        add(self, name, found)
        alive.append(sum(value is not None for value in self._exact.values()))

    monkeypatch.setattr(whole_corpus.Names, "add", counting)
    monkeypatch.setattr(jsonl, "LARGE_CORPUS", 1000)
    code, stdout, stderr = run(capsys, folder, "dpr_nq", tmp_path / "out")
    assert code == 0, stderr
    assert len(alive) == 5000 and alive[-1] == 3
    dataset = jsonl.read_dataset(tmp_path / "out")
    assert isinstance(dataset.corpus, PassagesById) and len(dataset.corpus) == 5000


TSV = "psgs_w100.tsv"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id\ttext\ttitle\n1\tA\n", r"psgs_w100\.tsv:2: has 2 columns, but the header has 3"),
        ("id\ttext\ttitle\n1\tA\tB\n2\tA\tB\tC\n", r"psgs_w100\.tsv:3: has 4 columns"),
        ("id\ttext\ttitle\n1\tA\tB\n2\t\"A", r"psgs_w100\.tsv:3: has 2 columns"),
        ("1\tA\tB\n", r"psgs_w100\.tsv:1: must name the columns id, text and title, not '1, A, B'"),
        ("", r"psgs_w100\.tsv:1: must name the columns"),
        ("id\ttext\ttitle\n", r"psgs_w100\.tsv has no passages"),
        ("id\ttext\ttitle\n\tA\tB\n", r"psgs_w100\.tsv:2: column 'id' is empty"),
        (
            "id\ttext\ttitle\n1\tA\tB\n\n7\tA\tB\n",
            r"psgs_w100\.tsv:3: has 0 columns",
        ),
        (
            "id\ttext\ttitle\n1\t\"A\nB\"\tB\n2\tA\tB\n1\tC\tD\n",
            r"psgs_w100\.tsv:5: repeats the id '1' of \S+psgs_w100\.tsv:3\.",
        ),
        (
            "id\ttext\ttitle\n1\tA\tB\n2\tA\tB\n",
            r"psgs_w100\.tsv lacks a gold id of 1 of 3 questions, such as '3' of question 'dev_0';"
            " is it the official file",
        ),
        ("id\ttext\ttitle\n1\tA\tB\n2\t" + "x" * 200_000 + "\tB\n", "after 1 passages, the last"),
    ],
)  # fmt: skip
def test_prepare_bad_table_is_named(tmp_path, files, capsys, content, message):
    folder = files("dpr_nq")
    (folder / TSV).write_text(content)
    code, _, stderr = run(capsys, folder, "dpr_nq", tmp_path / "out")
    assert code == 2
    last = stderr.splitlines()[-1]
    assert re.search(message, last), last
    assert not any((tmp_path / "out").glob("*.jsonl"))


def test_prepare_table_of_invalid_utf8_is_named(tmp_path, files, capsys):
    folder = files("dpr_nq")
    (folder / TSV).write_bytes(b"id\ttext\ttitle\n1\tA\tB\n2\tcaf\xe9\tB\n")
    code, _, stderr = run(capsys, folder, "dpr_nq", tmp_path / "out")
    assert code == 2 and "not valid UTF-8" in stderr


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.97])
@pytest.mark.parametrize("benchmark", ["hotpotqa", "dpr_nq"])
def test_prepare_truncated_corpus_is_named(tmp_path, files, capsys, benchmark, cut):
    folder = files(benchmark)
    file = folder / ARCHIVE
    if benchmark == "dpr_nq":
        file = folder / f"{TSV}.gz"
        file.write_bytes(gzip.compress((folder / TSV).read_bytes()))
        (folder / TSV).unlink()
    content = file.read_bytes()
    file.write_bytes(content[: int(cut * len(content))])
    code, _, stderr = run(capsys, folder, benchmark, tmp_path / "out")
    assert code == 2
    last = stderr.splitlines()[-1]
    assert f"{file} is truncated or damaged after" in last and "download it again" in last
    assert not any((tmp_path / "out").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("readme.txt", b"x")], "has no passages"),
        ([("AA/wiki_00.bz2", b'{"id": 1, "title": "A"}\n')], "AA/wiki_00.bz2:1: field 'text' is"),
        (
            [("AA/wiki_00.bz2", lines({"id": 1, "title": "A", "text": [["A."]]}))],
            r"wiki_00.bz2:1: field 'text[0]' must be a string, not a list",  # The complete pages.
        ),
        (
            [("AA/wiki_00.bz2", lines({"id": 1, "title": "A", "text": ["A."]}) + b'{"id": 2, "t')],
            "AA/wiki_00.bz2:2: invalid or truncated JSON",
        ),
        (
            [
                ("AA/wiki_00.bz2", lines({"id": 1, "title": "A", "text": ["A."]})),
                ("AB/wiki_00.bz2", lines({"id": 1, "title": "B", "text": ["B."]})),
            ],
            "AB/wiki_00.bz2:1: repeats the id '1' of",
        ),
        (
            [("AA/wiki_00.bz2", lines({"id": 1, "title": "Hask", "text": ["A."]}))],
            "lacks a gold title of 3 of 3 questions, such as 'The Glass Lantern' of question 'h1'",
        ),
    ],
)
def test_prepare_bad_archive_is_named(tmp_path, files, capsys, members, message):
    folder = files("hotpotqa")
    (folder / ARCHIVE).write_bytes(archive(*members))
    code, _, stderr = run(capsys, folder, "hotpotqa", tmp_path / "out")
    assert code == 2 and message in stderr.splitlines()[-1]
    assert not any((tmp_path / "out").glob("*.jsonl"))


def test_prepare_missing_corpus_is_named(tmp_path, files, capsys):
    folder = files("dpr_nq")
    (folder / TSV).unlink()
    code, _, stderr = run(capsys, folder, "dpr_nq", tmp_path / "out")
    assert code == 2
    assert "does not contain psgs_w100.tsv.gz; download it from https://dl.fbaipublic" in stderr


def test_prepare_few_missing_gold_passages_become_unknown(
    tmp_path, files, capsys, monkeypatch, caplog
):
    monkeypatch.setattr(whole_corpus, "_MOST_MISSING", 0.4)
    folder = files("dpr_nq")
    (folder / TSV).write_text("id\ttext\ttitle\n1\tA\tB\n2\tA\tB\n")
    code, _, _ = run(capsys, folder, "dpr_nq", tmp_path / "out")
    assert code == 0 and "lacks a gold id of 1 of 3 questions" in caplog.text
    questions = jsonl.read_dataset(tmp_path / "out").questions
    assert [q.supporting for q in questions] == [("2",), ("1",), None, None, None]
    assert json.loads((tmp_path / "out" / "sources.json").read_text())["without_gold"] == 1
    assert "has 2 passages, but the official file has 21,015,324" in caplog.text


def test_prepare_complete_corpus_with_empty_passages_has_no_warning(
    tmp_path, files, capsys, monkeypatch, caplog
):
    """The official number of passages includes those without a text, which are skipped."""
    official = HotpotQA.CORPORA["abstracts"]
    file = dataclasses.replace(official.file, sha256=None)
    complete = dataclasses.replace(official, count=8, file=file)
    monkeypatch.setitem(HotpotQA.CORPORA, "abstracts", complete)
    assert run(capsys, files("hotpotqa"), "hotpotqa", tmp_path / "out")[0] == 0
    assert "official file has" not in caplog.text


def test_prepare_failed_again_leaves_no_questions(tmp_path, files, capsys):
    """A folder never has the questions of one run and the corpus of another."""
    folder = files("dpr_nq")
    assert run(capsys, folder, "dpr_nq", tmp_path / "out")[0] == 0
    (folder / TSV).write_text("id\ttext\ttitle\n1\tA\n")
    assert run(capsys, folder, "dpr_nq", tmp_path / "out")[0] == 2
    assert not (tmp_path / "out" / "questions.jsonl").exists()
    assert not list((tmp_path / "out").glob(".*.part"))


def test_prepare_policy_of_a_whole_corpus_is_refused(tmp_path, files, capsys):
    flags = ["--corpus=supporting_only"]
    code, _, stderr = run(capsys, files("dpr_nq"), "dpr_nq", tmp_path / "out", *flags)
    assert code == 2 and "--corpus=supporting_only does not apply to dpr_nq" in stderr


@pytest.mark.parametrize("answers", ["Norland", "[1]", "('a',)", "[" * 5000])
def test_prepare_answers_that_are_no_list_are_named(tmp_path, files, capsys, answers):
    folder = files("dpr_nq")
    (folder / "nq-test.qa.csv").write_text(f"where is hask\t{answers}\n")
    code, _, stderr = run(capsys, folder, "dpr_nq", tmp_path / "out")
    assert code == 2
    assert "nq-test.qa.csv:1: field 'answers' must be a Python list of strings" in stderr


def test_names_prefer_exact_titles():
    names = Names(["Salt &amp; Pepper", "HASK", "none"])
    assert names.find("none") is None
    for title in ("Hask", "HASK", "HASK", "Salt & Pepper"):
        names.add(title, whole_corpus._Found(title.lower(), 1))
    found = [names.find(name) for name in ("Salt &amp; Pepper", "HASK")]
    assert [passage and passage.id for passage in found] == ["salt & pepper", "hask"]
    assert names.num_ambiguous == 1


def test_reporter_states_the_remaining_time(monkeypatch, capsys):
    times = iter([0.0, 10.0, 60.0])
    monkeypatch.setattr(corpora.time, "monotonic", lambda: next(times))
    reporter = corpora.Reporter("file", 400)
    reporter.passages = 1000
    reporter(50)
    assert capsys.readouterr().err == ""
    reporter(100)
    assert capsys.readouterr().err == "file: 25 %, 1,000 passages, about 3 minutes left\n"
