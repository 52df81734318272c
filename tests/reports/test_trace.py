"""The trace viewer: its HTML, and its behavior in a browser."""

import dataclasses
import errno
import io
import json
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Usage
from cirag_jax.reports import pages, trace
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.store import JOURNAL, Journal
from cirag_jax.types import Sentence, Step
from tests.reports import made_up
from tests.reports.made_up import HOSTILE, blocks


def record(question, prediction, error=None):
    given = json.loads(json.dumps(dataclasses.asdict(question)))
    outcome = None if prediction is None else codec.encode(prediction)
    usage, calls = Usage(900, 640, 31), {"retrieve": 3, "generate": 4}
    return Record(question.id, given, outcome, error, 2.5, usage, calls, pathlib.Path(JOURNAL))


def write(path, records, passages=made_up.PASSAGES, title="A run"):
    with path.open("w", encoding="utf-8", newline="\n") as file:
        counts = trace.write_page(file, title, records, passages)
    return path, counts


@pytest.fixture(scope="module")
def made_up_page(tmp_path_factory):
    questions = [record(*pair) for pair in made_up.many(3)]
    failed = dataclasses.replace(made_up.QUESTION, id="failed", question="Who keeps the light?")
    questions.append(record(failed, None, "the server closed the connection"))
    questions.append(record(dataclasses.replace(failed, id="unfinished"), None))
    path, _ = write(tmp_path_factory.mktemp("page") / "trace.html", questions)
    return path


# ------------------------------------------------------------------------------------------- data


def test_write_trace_of_a_journal(tmp_path):
    failed = dataclasses.replace(made_up.QUESTION, id="failed")
    begun = dataclasses.replace(made_up.QUESTION, id="begun")
    pairs = [*made_up.many(4), (failed, None), (begun, None)]
    made_up.write_journal(tmp_path / JOURNAL, pairs, failed=[failed])
    before = (tmp_path / JOURNAL).read_bytes()

    counts = trace.write_trace(tmp_path, tmp_path / "trace.html")

    wanted = {"right": 3, "wrong": 1, "unscored": 0, "failed": 1, "unfinished": 1}
    assert counts == {"num_questions": 6, **wanted}
    data = blocks(tmp_path / "trace.html")
    assert [row["verdict"] for row in data["index"]["questions"]] == [
        *("right", "right", "wrong", "right", "failed", "unfinished")
    ]
    assert data["index"]["title"] == f"cirag, {tmp_path.name}"
    assert data["q4"]["error"] == "the server closed the connection"
    assert data["q0"]["calls"] == {"retrieve": 1, "generate": 1}
    assert data["q0"]["usage"]["cached_tokens"] == 640
    assert (tmp_path / JOURNAL).read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_report_command(tmp_path):
    made_up.write_journal(tmp_path / JOURNAL, made_up.many(3))
    config = load_config("configs/report.py", [f"--config.run={tmp_path}"])
    (tmp_path / "out").mkdir()
    result = trace.report(config, tmp_path / "out")
    page = tmp_path / "out" / "trace.html"
    assert result["page"] == str(page) and result["bytes"] == page.stat().st_size
    assert (result["num_questions"], result["right"], result["wrong"]) == (3, 2, 1)
    with pytest.raises(UserError, match="config.run=WORKDIR is required"):
        trace.report(load_config("configs/report.py"), tmp_path)
    config = load_config("configs/report.py", [f"--config.run={tmp_path}", "--config.profile=x"])
    with pytest.raises(UserError, match="profile='x' is an unknown profile; choose one of musique"):
        trace.report(config, tmp_path)


def test_page_marks_gold_and_sources_of_facts(made_up_page):
    data = blocks(made_up_page)
    question = data["q0"]
    for step, expected in zip(question["steps"], made_up.PREDICTION.steps, strict=True):
        for fact, triple in zip(step["kept"], expected.kept, strict=True):
            source = data[f"p{fact[3]}"]
            assert fact[:3] == [triple.head, triple.relation, triple.tail]
            assert source["id"] == triple.passage_id
            assert triple.tail in source["sentences"][fact[4]]
            assert fact[5], "joins the ends of a gold fact"
    assert [fact[5] for fact in question["steps"][0]["candidates"]] == [True, False]
    assert [data[f"p{n}"]["id"] for n in question["gold_passages"]] == [
        "p-lantern",
        "p-varga",
        "p-bay",
    ]
    assert question["gold_missing"] == ["p-lost"]
    assert [fact[3] for fact in question["gold_facts"]] == [True, True, True]
    assert (question["em"], question["f1"]) == (1.0, 1.0)
    assert data["q2"]["f1"] == 0.5  # Ferry County, Orlin County


def test_page_shows_all_granularities_and_notes(page, tmp_path):
    kept = (Sentence("p-bay", 1), "p-varga", "p-ferry", "gone")
    step = Step("Who?", ("p-bay",), kept, (), kept=kept, more_queries=("Where?",), notes={"k": [1]})
    prediction = dataclasses.replace(made_up.PREDICTION, steps=(*made_up.PREDICTION.steps, step))
    made_up.write_journal(tmp_path / JOURNAL, [(made_up.QUESTION, prediction)])
    trace.write_trace(tmp_path, tmp_path / "trace.html")
    data = blocks(tmp_path / "trace.html")
    drawn = data["q0"]["steps"][-1]
    assert (drawn["more_queries"], drawn["notes"]) == (["Where?"], {"k": [1]})
    ids = [None if unit[3] is None else data[f"p{unit[3]}"]["id"] for unit in drawn["kept"]]
    assert ids == ["p-bay", "p-varga", "p-ferry", None]
    assert [unit[:3] for unit in drawn["kept"]] == [[None, None, i] for i in (*ids[:3], "gone")]
    assert [unit[4] for unit in drawn["kept"]] == [1, None, None, None]
    assert [unit[5] for unit in drawn["kept"]] == [True, True, False, False]  # gold
    page.open(tmp_path / "trace.html")
    last = page.text(".step:last-of-type")
    for text in ("Where?", made_up.sentence("p-bay", 1), "Ilse Varga", "gone", "source unknown"):
        assert text in last
    details = "document.querySelector('.step:last-of-type details:last-of-type')"
    page.after("toggle", details, f"{details}.open = true")
    assert '"k": [' in page.text(".step:last-of-type pre") and page.complaints() == []


def test_page_splits_passages_like_extraction(made_up_page):
    shown = {data["id"]: data for name, data in blocks(made_up_page).items() if name[0] == "p"}
    assert shown["p-ferry"]["sentences"] == ["Night ferries run in winter.", "They carry mail."]


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.text(st.characters()) | st.floats(allow_nan=False), st.lists, max_leaves=5))
def test_data_block_has_any_value_without_markup(value):
    block = pages.data_block("name", value)
    start, end = '<script type="application/json" id="name">', "</script>\n"
    assert block.startswith(start) and block.endswith(end)
    text = block.removeprefix(start).removesuffix(end)
    assert text.isascii() and "<" not in text
    assert json.loads(text) == value


def test_page_policy_allows_only_own_script_and_style():
    file = io.StringIO()
    trace.write_page(file, "{{script}} <b>", [], {})
    text = file.getvalue()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    (style,) = re.findall("<style>(.*?)</style>", text, re.S)
    (script,) = re.findall("<script>(.*?)</script>", text, re.S)
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["style-src"] == f"'{pages._hash(style)}'"
    assert rules["script-src"] == f"'{pages._hash(script)}'"
    assert "<title>{{script}} &lt;b&gt;</title>" in text
    assert "innerHTML" not in script and "insertAdjacent" not in script


def test_write_trace_rejects_other_folders(tmp_path):
    page = tmp_path / "trace.html"
    with pytest.raises(UserError, match="does not exist"):
        trace.write_trace(tmp_path, page)
    with Journal(tmp_path / JOURNAL, {}) as book:
        book.open_program("p-bay", 0, {"passage": "p-bay"})
        with pytest.raises(UserError, match="in use by another run"):
            trace.write_trace(tmp_path, page)
    with pytest.raises(UserError, match="not the journal of a run that answers questions"):
        trace.write_trace(tmp_path, page)
    (tmp_path / "text.sqlite").write_text("no database, but long enough to be looked at" * 30)
    with pytest.raises(UserError, match=r"text\.sqlite"):
        trace.write_trace(tmp_path / "text.sqlite", page)
    assert not page.exists()


def test_write_trace_is_atomic(tmp_path, monkeypatch):
    made_up.write_journal(tmp_path / JOURNAL, made_up.many(1))
    page = tmp_path / "trace.html"
    page.write_text("the page before")

    def fill_the_disk(file, *_):
        file.write("half a page")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trace, "write_page", fill_the_disk)
    with pytest.raises(UserError, match=r"trace\.html cannot be written: No space left"):
        trace.write_trace(tmp_path, page)
    assert page.read_text() == "the page before"
    assert not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------------------------------- browser


def test_browser_shows_hostile_text_without_running_it(page, tmp_path):
    cases = [made_up.hostile(text) for text in HOSTILE]
    records = [record(question, prediction) for question, prediction, _ in cases]
    records += [record(q, None, text) for (q, _, _), text in zip(cases, HOSTILE, strict=True)]
    passages = {passage.id: passage for *_, passage in cases}
    title = "".join(text for text in HOSTILE if "\0" not in text)  # HTML parsers drop NUL
    path, _ = write(tmp_path / "trace.html", records, passages, title)

    page.open(path)
    page_title = title.encode("utf-8", "backslashreplace").decode()
    assert page.evaluate("document.title") == page_title
    for index, shown in enumerate(shown or text for text, shown in HOSTILE.items()):
        page.after("hashchange", "window", f"location.hash = '#x'; location.hash = '#{index + 1}'")
        page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        page.evaluate("new Promise((done) => setTimeout(done, 0))")  # waits for toggle events
        page.evaluate("document.querySelectorAll('.fact').forEach((fact) => fact.click())")
        for selector, least in {
            ".ask": 1, ".answer": 1, ".query": 1, ".thought": 1, ".fact": 3, ".next .text": 1,
            "table": 3, "pre": 1, ".try": 3, ".passage summary": 1, ".passage .body": 2,
            "#sources > div.passage": 1, ".gold-row": 3, ".place": 2, "[aria-current]": 2,
        }.items():  # fmt: skip
            result = page.text(selector)
            assert result.count(shown) >= least, (selector, shown, result)
        assert page.count("main :is(script, img, svg, iframe, a:not(.back), meta, link)") == 0
        assert page.count("aside :is(script, img, svg, iframe, a, meta, link)") == 0
        page.after("hashchange", "window", f"location.hash = '#{len(HOSTILE) + index + 1}'")
        assert shown in page.text(".verdict")
    assert page.evaluate("[document.title, typeof window.owned]") == [page_title, "undefined"]
    assert page.evaluate("location.pathname").endswith("/trace.html")
    assert page.requests() == [path.resolve().as_uri()]
    assert page.complaints() == []


def test_browser_shows_question_with_all_parts(page, made_up_page):
    page.open(made_up_page)
    assert page.text(".ask").startswith(made_up.QUESTION.question)
    assert page.text(".answer") == "Orlin County" and page.text(".pill.right") == "right"
    assert page.count(".step") == 3 and page.count(".fact") == 3 and page.count(".try") == 2
    tried = page.evaluate("[...document.querySelectorAll('.try .pill')].map(n => n.textContent)")
    assert tried == ["refused", "sufficient"]
    assert "p-lost" in page.text("#sources > div.passage")
    figures = page.text(".figures")
    assert "4 model calls" in figures and "3 lookups" in figures and "2.5 s" in figures
    assert "900 prompt tokens (640 cached)" in figures and "31 new tokens" in figures
    assert page.complaints() == []


def test_browser_fact_opens_its_sentence_and_escape_returns(page, made_up_page):
    page.resize(1440, 240)
    page.open(made_up_page)
    page.evaluate("document.querySelectorAll('.fact')[2].click()")
    assert page.text(".s.target") == made_up.sentence("p-bay", 1)
    assert page.evaluate(
        "(() => { const t = document.querySelector('.target').getBoundingClientRect();"
        " return t.top >= 0 && t.bottom <= innerHeight; })()"
    )
    page.evaluate("document.querySelectorAll('.fact')[0].click()")
    assert page.count(".target") == 1
    assert page.text(".s.target") == made_up.sentence("p-lantern", 1)
    page.press("Escape")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.fact')[0]")
    page.resize(1440, 900)


def test_browser_marks_gold_and_core_sentences(page, made_up_page):
    page.open(made_up_page)
    marked = "[...document.querySelectorAll('{}')].map(n => n.textContent)"
    gold = page.evaluate(marked.format("#sources .body .gold"))
    core = page.evaluate(marked.format("#sources .body .core"))
    sentences = [made_up.sentence(i, 1) for i in ("p-lantern", "p-varga", "p-bay")]
    assert sorted(gold) == sorted(core) == sorted(sentences)


def test_browser_draws_candidates_on_demand(page, made_up_page):
    page.open(made_up_page)
    assert page.count("table") == 0
    details = "[...document.querySelectorAll('.step details')][0]"
    page.after("toggle", details, f"{details}.open = true")
    rows = page.evaluate(
        "[...document.querySelectorAll('table tbody tr')].map(r => [r.className, r.textContent])"
    )
    assert [name for name, _ in rows] == ["core", ""]
    assert "0.812" in rows[0][1] and made_up.ABOUT.tail in rows[1][1]


def test_browser_keys_move_through_questions_and_facts(page, made_up_page):
    page.open(made_up_page)
    for key, place in (("j", 2), ("j", 3), ("k", 2), ("j", 3), ("j", 4)):
        page.press(key)
        page.evaluate("new Promise((done) => setTimeout(done, 0))")
        assert page.text(".place").startswith(f"{place} of 5")
        assert page.evaluate("document.querySelector('[aria-current]').hash") == f"#{place}"
    assert "the server closed the connection" in page.text(".verdict")
    page.open(made_up_page, "#2")
    page.press("n")
    page.press("n")
    assert page.text(".s.target") == made_up.sentence("p-varga", 1)
    page.press("p")
    assert page.text(".s.target") == made_up.sentence("p-lantern", 1)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_browser_trajectories_have_no_scores(page, tmp_path):
    bare = dataclasses.replace(made_up.PREDICTION, attempts=())
    lost = record(dataclasses.replace(made_up.QUESTION, id="lost"), None, "the server is away")
    records = [record(made_up.QUESTION, bare), lost]
    page.open(write(tmp_path / "trace.html", records)[0])
    assert page.text("#summary") == "2 questions"
    page.open(write(tmp_path / "trace.html", [*records, record(*made_up.many(1)[0])])[0])
    assert (
        page.text("#summary") == "3 questions · EM 50.0 · F1 50.0"
    )  # failed questions have score 0


def test_browser_search_and_filters(page, made_up_page):
    def shown():
        return page.evaluate("[...document.querySelectorAll('.item')].map(n => n.hash)")

    def search(text):
        page.press("/")
        page.evaluate("document.activeElement.value = ''")
        page.call("Input.insertText", text=text)

    page.open(made_up_page)
    assert shown() == ["#1", "#2", "#3", "#4", "#5"]
    search("FERRY county")
    assert shown() == ["#3"]
    assert page.text("#summary") == "1 of 5 questions · EM 0.0 · F1 50.0"
    search("keeps líght")
    assert shown() == ["#4", "#5"]
    search("nowhere to be found")
    assert shown() == [] and "No question matches" in page.text("#list")
    page.press("Escape")
    assert len(shown()) == 5

    def choose(label):
        page.evaluate(
            f"[...document.querySelectorAll('.chips button')].find("
            f"n => n.textContent === '{label}').click()"
        )

    choose("wrong 1")
    assert shown() == ["#3"]
    choose("failed 1")
    assert shown() == ["#4"]
    choose("all")
    choose("sentence 2")
    assert shown() == ["#1", "#2"]


def test_browser_draws_thousand_questions_lazily(page, tmp_path):
    path, _ = write(tmp_path / "trace.html", [record(*pair) for pair in made_up.many(1000)])
    page.open(path)
    assert page.text("#summary").startswith("1,000 questions · EM 66.7")
    assert page.count(".item") < 200 and page.count(".ask") == 1
    page.after("scroll", "document.getElementById('list')", "list.scrollTop = 1e9")
    assert 60 < page.count(".item") < 1000
    page.open(path, "#1000")
    assert page.text(".ask").endswith("(1000)")
    assert page.evaluate("document.querySelector('[aria-current]').hash") == "#1000"
    assert page.complaints() == []


def test_browser_narrow_screen_shows_list_or_question(page, made_up_page):
    visible = "[...document.querySelectorAll('#side, #main')].map(n => n.offsetHeight > 0)"
    page.resize(390, 844)
    try:
        page.open(made_up_page)
        assert page.evaluate(visible) == [True, False]
        page.after("hashchange", "window", "document.querySelector('.item').click()")
        assert page.evaluate(visible) == [False, True]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.after("hashchange", "window", "document.querySelector('.back').click()")
        assert page.evaluate(visible) == [True, False]
    finally:
        page.resize(1440, 900)
