"""The result page of several runs: HTML, behavior in a browser, and errors."""

import collections
import dataclasses
import errno
import shutil

import numpy as np
import pytest

from cirag_jax import cli
from cirag_jax.commands import difficulty, results
from cirag_jax.config_files import load_config
from cirag_jax.datasets import jsonl
from cirag_jax.errors import UserError
from cirag_jax.io import write_json, write_lines
from cirag_jax.reports import trace
from cirag_jax.runtime.store import JOURNAL, Journal
from cirag_jax.types import Dataset
from configs import difficulty as difficulty_config
from tests.reports import made_up
from tests.reports.made_up import HOSTILE, OWN, PREDICTION, blocks

TEXTS = "[...document.querySelectorAll('{}')].map(n => n.textContent)"
LOADED = "[...document.images].map(n => n.complete && n.naturalWidth > 0)"  # for every picture


def workdir(root, name, pairs, **more):
    (root / name).mkdir(parents=True)
    made_up.write_journal(root / name / JOURNAL, pairs, **more)
    return root / name


def make_worse(pairs):
    """Returns other answers in reverse order. Only the first and last of four are correct."""
    answers = ["Orlin", "Ferry County", "Tarnow Bay", "Orlin County"]
    result = [
        (q, dataclasses.replace(PREDICTION, answer=answer))
        for (q, _), answer in zip(pairs, answers, strict=True)
    ]
    return result[::-1]


def report(out, **fields):
    config = load_config("configs/report.py")
    config.update({"bootstrap_samples": 50, **fields})
    out.mkdir(exist_ok=True)
    return results.report(config.lock(), out)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of three runs of launch/compare.py on four questions, with different seeds."""
    root = tmp_path_factory.mktemp("runs")
    pairs = made_up.many(4)
    workdir(root, "cirag", pairs, seed=1)
    workdir(root, "kirag", make_worse(pairs))
    lost = [(q, None if i == 1 else p) for i, (q, p) in enumerate(pairs)]
    workdir(root, "late", lost, failed=[pairs[1][0]], seed=2)
    return root


@pytest.fixture(scope="module")
def shown(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("page")
    return out, report(out, run=str(made), title="Three runs")


def cells(page):
    """Returns the marks and answers of each row."""
    return page.evaluate(
        "[...document.querySelectorAll('#answers tbody tr')].map("
        "r => [...r.querySelectorAll('.said')].map(n => n.textContent))"
    )


# ------------------------------------------------------------------------------------------ files


def test_report_shows_runs_of_a_comparison(shown, made):
    out, result = shown
    assert {path.name for path in out.iterdir()} == {
        "index.html", "trace-1.html", "trace-2.html", "trace-3.html",
    }  # fmt: skip
    assert result["page"] == str(out / "index.html")
    assert list(result["traces"].items())[1] == ("kirag", str(out / "trace-2.html"))
    assert result["systems"]["late"]["failures"] == 1 and result["num_questions"] == 4
    assert result["unfinished"] == {}
    index = blocks(out / "index.html")["index"]
    assert [run["name"] for run in index["runs"]] == ["cirag", "kirag", "late"]
    first, _, third, _ = index["questions"]
    assert first["answers"] == ["Orlin County", "Orlin"] and first["hops"] == 3
    assert first["runs"] == [["right", "Orlin County", 1], ["right", "Orlin", 4],
                             ["right", "Orlin County", 1]]  # fmt: skip
    assert third["runs"] == [["wrong", "Ferry County", 3], ["wrong", "Tarnow Bay", 2],
                             ["wrong", "Ferry County", 3]]  # fmt: skip
    text = (out / "index.html").read_text("utf-8")
    headings = ("Scores", "Outcomes", "Differences", "Recall by step", "Iterations and queries")
    for heading in (*headings, "Time", "Questions"):
        assert f"<h2>{heading}</h2>" in text
    assert "Settings of cirag / late: seed 1 / 2" in text
    assert "Unfinished" not in text
    assert "<title>Three runs</title>" in text and text.count("data:image/svg+xml") == 4
    assert blocks(out / "trace-3.html")["index"]["title"] == "late"


def test_report_orders_runs_and_names_unfinished(made, tmp_path, capsys):
    """A run is unfinished if it was killed, was stopped, is still running, or was never started."""
    root = shutil.copytree(made, tmp_path / "w")
    pairs = made_up.many(4)
    workdir(root, "killed", [*pairs[:3], (pairs[3][0], None)])
    workdir(root, "between", pairs[:2])
    write_json(workdir(root, "stopped", pairs) / "result.json", {"complete": False})
    workdir(root, "other", pairs)
    write_json(root / "config.json", {"methods": "late=cirag, killed=ircot,kirag:small,ircot"})
    with Journal(workdir(root, "busy", pairs) / JOURNAL, {"method": "cirag"}):
        result = report(tmp_path / "out", run=str(root))
    assert list(result["systems"]) == ["late", "kirag", "cirag", "other"]
    assert result["unfinished"] == {
        "killed": "3 questions so far",
        "ircot": "0 questions so far",
        "between": "2 questions so far",
        "busy": "running",
        "stopped": "4 questions so far",
    }
    said = (
        "Unfinished and not shown: killed (3 questions so far), ircot (0 questions so far), "
        "between (2 questions so far), busy (running), stopped (4 questions so far)."
    )
    assert said in capsys.readouterr().err
    assert f"<p>{said}</p>" in (tmp_path / "out" / "index.html").read_text("utf-8")
    for name in ("late", "kirag", "cirag", "other", "busy"):
        shutil.rmtree(root / name)
    with pytest.raises(
        UserError, match=r"no run in .*w is complete: late \(0 questions so far\), k"
    ):
        report(tmp_path / "no", run=str(root))
    assert not list((tmp_path / "no").iterdir())


def test_report_of_one_run_is_its_trace(made, tmp_path):
    result = report(tmp_path / "a", run=str(made / "kirag"))
    assert result["num_questions"] == 4 and result["right"] == 2
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["trace.html"]
    alone = report(tmp_path / "b", runs=str(made / "kirag"))
    assert list(alone["traces"]) == ["kirag"] and alone["differences"] == {}
    assert ", first seed" not in (tmp_path / "b" / "index.html").read_text("utf-8")
    # Folders of repeats, which have other seeds, are inside a run's folder and are not runs.
    again = shutil.copytree(made / "kirag", tmp_path / "again")
    workdir(again, "repeat-2", made_up.many(4))
    assert report(tmp_path / "c", run=str(again))["num_questions"] == 4
    assert (tmp_path / "c" / "trace.html").is_file()
    seeds = report(tmp_path / "d", runs=(str(again),))
    assert seeds["systems"]["again"]["em"]["value"] == (2 + 3) / 8
    assert ", first seed" in (tmp_path / "d" / "index.html").read_text("utf-8")


def test_report_shows_difficulty(page, made, tmp_path, monkeypatch):
    questions = [
        dataclasses.replace(q, supporting=("p-bay",), supporting_sentences=None, hops=3)
        for q, _ in made_up.many(4)
    ]
    jsonl.write_dataset(Dataset("made", tuple(questions), made_up.PASSAGES, {}), tmp_path / "data")
    runs = []
    for name in ("cirag", "kirag"):
        runs.append(f"{name}={shutil.copytree(made / name, tmp_path / name)}")
        rows = [{"id": q.id, "answer": "Orlin", "passages": ["p-bay"]} for q in questions]
        write_lines(tmp_path / name / "predictions.jsonl", rows)
    config = difficulty_config.get_config()
    config.update({"runs": tuple(runs), "bootstrap_samples": 50})
    config.data.dir = str(tmp_path / "data")

    class Encoder:
        identity, dim = {"model": "made"}, 2

        truncated = collections.Counter()

        def encode(self, texts, kind="passage", progress=None):
            return np.array([[1.0, 0.0]] * len(texts), np.float32)

    monkeypatch.setattr(difficulty, "open_encoder_for", lambda block: Encoder())
    (tmp_path / "d").mkdir()
    result = difficulty.evaluate(config, tmp_path / "d")
    write_json(tmp_path / "d" / "result.json", cli.jsonable(result))
    fields = {"runs": runs, "difficulty": str(tmp_path / "d")}
    report(tmp_path / "out", **fields)
    text = (tmp_path / "out" / "index.html").read_text("utf-8")
    # Four of the comparison, and heat maps of the runs and of their difference.
    assert text.count("data:image/svg+xml") == 6
    assert '<a href="#difficulty">' in text and "cirag: error 0.0 % of 4 questions" in text
    page.open(tmp_path / "out" / "index.html")
    assert page.evaluate(LOADED) == [True] * 6
    assert page.requests() == [(tmp_path / "out" / "index.html").as_uri(), *pictures_of(page)]
    assert len(pictures_of(page)) == 6 and page.complaints() == []

    def refused(message):
        with pytest.raises(UserError, match=message):
            report(tmp_path / "no", **fields)
        assert not list((tmp_path / "no").iterdir())

    fields["runs"] = [runs[0], f"other={tmp_path / 'kirag'}"]
    refused("is about a run that is not on the page: kirag")
    fields["runs"] = runs
    write_lines(tmp_path / "d" / "difficulty.jsonl", [{"id": "made-up-1"}, {"id": "q9"}])
    refused("is about a question that is not on the page: q9")
    for value in ({}, {"systems": {}}, {**result, "systems": [1]}):
        write_json(tmp_path / "d" / "result.json", cli.jsonable(value))
        refused(r"result\.json is not a result of configs/difficulty\.py")
    fields["difficulty"] = str(tmp_path / "none")
    refused(r"none/result\.json cannot be read")
    fields["runs"], fields["run"] = None, str(made / "cirag")
    refused(r"config\.difficulty needs several runs; set config\.runs")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ("", "config.run=WORKDIR is required"),
        ("cirag cirag", "config.runs names .*cirag twice"),
        ("x=cirag x=kirag", "two runs named x"),
        ("cirag nowhere", "nowhere is not a workdir of launch/answer.py"),
        ("cirag late", "late has seed=2, but .*cirag has 1"),
        ("cirag other", "other answered different questions from"),
        ("cirag open", "open is not complete: 1 of 4 questions remain"),
    ],
)
def test_report_rejects_bad_runs_without_files(made, tmp_path, specs, message):
    pairs = made_up.many(4)
    workdir(tmp_path, "other", pairs[:2])
    workdir(tmp_path, "open", [(q, None if i == 1 else p) for i, (q, p) in enumerate(pairs)])
    folders = {name: tmp_path / name for name in ("other", "open")}
    runs = []
    for spec in specs.split():
        name, equals, folder = spec.rpartition("=")
        runs.append(f"{name}{equals}{folders.get(folder, made / folder)}")
    with pytest.raises(UserError, match=message):
        report(tmp_path / "out", runs=tuple(runs) or None)
    assert not list((tmp_path / "out").iterdir())


def test_report_rejects_run_and_runs_together(made, tmp_path):
    with pytest.raises(UserError, match="are alternatives; set only one"):
        report(tmp_path / "out", run=str(made), runs=(str(made / "cirag"),))


def test_report_full_disk_keeps_old_pages(shown, made, tmp_path, monkeypatch):
    shutil.copytree(shown[0], tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    write_page, written = trace.write_page, []

    def fill_the_disk(file, title, *rest):
        if written:
            file.write("half a page")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(title)
        return write_page(file, title, *rest)

    monkeypatch.setattr(trace, "write_page", fill_the_disk)
    runs = (f"b={made / 'kirag'}", f"a={made / 'cirag'}")
    with pytest.raises(UserError, match="cannot be written: No space left"):
        report(tmp_path / "out", runs=runs)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


# ---------------------------------------------------------------------------------------- browser


def test_browser_answers_link_to_traces(page, shown):
    out, _ = shown
    page.open(out / "index.html")
    assert page.text("h1") == page.evaluate("document.title") == "Three runs"
    assert cells(page) == [
        ["✓Orlin County", "✓Orlin", "✓Orlin County"],
        ["✓Orlin County", "✗Ferry County", "!failed"],
        ["✗Ferry County", "✗Tarnow Bay", "✗Ferry County"],
        ["✓Orlin County", "✓Orlin County", "✓Orlin County"],
    ]
    shares = page.evaluate(TEXTS.format("#answers .share"))
    assert shares == ["75.0 % right", "50.0 % right", "50.0 % right"]
    assert page.evaluate(LOADED) == [True] * 4
    assert page.requests() == [(out / "index.html").resolve().as_uri(), *pictures_of(page)]
    assert page.complaints() == []
    row = "#answers tbody tr:nth-child(2)"
    requests = page.text(f"{row} .text")
    address = page.evaluate(f"document.querySelectorAll('{row} .said')[1].href")
    name, _, number = address.rpartition("/")[2].partition("#")
    page.open(out / name, f"#{number}")
    assert page.text(".ask") == requests and page.text(".answer") == "Ferry County"


def test_browser_unscored_run_has_no_share(page, tmp_path):
    pairs = made_up.many(2)
    bare = [(q, dataclasses.replace(p, attempts=())) for q, p in pairs]
    for name, own in (("bare", bare), ("full", pairs)):
        workdir(tmp_path, name, own)
    report(tmp_path / "out", run=str(tmp_path))
    page.open(tmp_path / "out" / "index.html")
    assert page.evaluate(TEXTS.format("#answers .share")) == ["", "100.0 % right"]


def test_report_counts_seeds_of_a_folder(tmp_path):
    for name in ("a", "a/repeat-2", "a/repeat-3"):
        workdir(tmp_path, name, made_up.many(2))
    write_json(tmp_path / "config.json", {"methods": "a=cirag", "repeats": 2})
    result = report(tmp_path / "out", run=str(tmp_path))
    assert result["systems"]["a"]["repeats"]["count"] == 2


def pictures_of(page):
    """Returns the addresses of the pictures on the page."""
    return [url for url in page.requests() if url.startswith("data:image/svg+xml;base64,")]


def test_browser_filters_questions(page, shown):
    def choose(label):
        page.evaluate(
            "[...document.querySelectorAll('.chips button')].find("
            f"n => n.textContent === '{label}').click()"
        )

    page.open(shown[0] / "index.html")
    choose("runs differ 1")
    assert [row[1] for row in cells(page)] == ["✗Ferry County"]
    assert page.text("#summary") == "1 of 4 questions" and page.text(".share") == "100.0 % right"
    choose("none right 1")
    assert [row[1] for row in cells(page)] == ["✗Tarnow Bay"]
    choose("all right 2")
    assert len(cells(page)) == 2
    choose("all 4")
    select = "document.querySelectorAll('#answers select')[1]"
    page.after("change", select, f"const s = {select}; s.value = 'wrong'; "
               "s.dispatchEvent(new Event('change'))")  # fmt: skip
    assert [row[1] for row in cells(page)] == ["✗Ferry County", "✗Tarnow Bay"]
    page.press("/")
    page.call("Input.insertText", text="TÁRNOW bay")
    assert [row[1] for row in cells(page)] == ["✗Tarnow Bay"]
    page.press("Escape")
    assert len(cells(page)) == 2


def test_browser_shows_hostile_text_without_running_it(page, tmp_path):
    texts = [text for text in HOSTILE if "\ud800" not in text]  # a journal cannot store it
    cases = [made_up.hostile(text) for text in texts]
    pairs = [(question, prediction) for question, prediction, _ in cases]
    passages = {passage.id: passage for *_, passage in cases}
    names = [f"<img src=x onerror={OWN}>$x_1", "</script><script>alert(1)</script>\u202e\x1b"]
    first, second = (
        workdir(tmp_path, folder, pairs, passages=passages) for folder in (names[0], "b")
    )
    runs = (str(first), f"{names[1]}={second}")
    report(tmp_path / "out", runs=runs, title=f"</title><script>{OWN}</script>")
    page.open(tmp_path / "out" / "index.html")
    for row, text in zip(cells(page), texts, strict=True):
        assert row == [f"✓{HOSTILE[text] or text}"] * 2
    heads = page.evaluate(TEXTS.format("#answers th .text"))
    assert heads == [names[0], names[1].replace("\u202e\x1b", "\\u202e\\u001b")]
    shown = names[1].replace("\u202e\x1b", "\\u202e\\x1b")
    assert page.text("#scores tbody tr:nth-child(2) td") == f"{shown} †"  # most are malformed
    assert page.evaluate(LOADED) == [True] * 3
    assert page.count("#page :is(script, svg, iframe, meta, link, object)") == 0
    assert page.evaluate("[document.title, typeof window.owned]") == [
        f"</title><script>{OWN}</script>", "undefined",
    ]  # fmt: skip
    here = (tmp_path / "out" / "index.html").resolve().as_uri()
    assert page.requests() == [here, *pictures_of(page)] and page.complaints() == []
    hrefs = page.evaluate("[...new Set([...document.links].map(n => n.href.split('#')[0]))]")
    assert sorted(hrefs) == [here, *(here.replace("index", f"trace-{n}") for n in (1, 2))]


def test_browser_draws_rows_lazily(page, tmp_path):
    runs = tuple(str(workdir(tmp_path, name, made_up.many(1000))) for name in "ab")
    report(tmp_path / "out", runs=runs)
    page.open(tmp_path / "out" / "index.html")
    rows = "#answers tbody tr"
    assert page.text("#summary") == "1,000 questions" and page.count(rows) == 100
    page.after("scroll", "window", "scrollTo(0, document.documentElement.scrollHeight)")
    assert 100 < page.count(rows) < 1000
    assert page.complaints() == []
