"""Extraction that is interrupted by a deadline, a budget, Ctrl-C, a full disk or a kill."""

import json
import os
import pathlib
import random
import sqlite3
import subprocess
import sys

import pytest

from cirag_jax.errors import UserError
from cirag_jax.runtime.store import Journal
from cirag_jax.triples import store
from cirag_jax.triples.store import TripleStore
from tests.commands.extracting import TEXTS, content, corpus, run, triples, without_varying
from tests.commands.model_server import model_server

pytestmark = pytest.mark.slow

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with model_server() as running:
        yield running


def test_stop_by_deadline_or_budget_is_clean(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    stopped = run(server, folder, tmp_path / "w", stop_after_minutes=1e-9)
    assert not stopped["complete"] and stopped["left"] == 6 and not server.asked
    budget = {"extractor.budget_tokens": 900, "extractor.max_concurrency": 1}
    stopped = run(server, folder, tmp_path / "w", **budget)
    assert not stopped["complete"] and server.asked
    assert run(server, folder, tmp_path / "w")["complete"]
    refused = [text for _, text in server.asked if "refused" in text]
    rest = [text for _, text in server.asked if "refused" not in text]
    assert len(rest) == len(set(rest)) and refused


def test_stop_stores_all_outcomes(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    fields = {"in_flight": 1, "extractor.max_concurrency": 1}
    stopped = run(server, folder, tmp_path / "w", **fields, **{"extractor.budget_tokens": 1150})
    stored = stopped["extracted"]
    assert 0 < stored < 6 and stopped["left"] == 6 - stored and not stopped["complete"]
    names = list(TEXTS)
    by_passage, status = triples(tmp_path / "w", names)
    assert all(status[name] for name in names[:stored])
    assert not any(status[name] for name in names[stored:])
    assert by_passage["p0"] and by_passage["p0"][0].head == "Ule"
    calls, num_requests = stopped["calls"], len(server.asked)
    assert calls == num_requests  # calls whose journal entries were removed still count
    finished = run(server, folder, tmp_path / "w")
    assert finished["complete"] and (finished["reused"], finished["left"]) == (stored, 0)
    again = [text for _, text in server.asked if "refused" not in text]
    assert len(again) == len(set(again))
    run(server, folder, tmp_path / "whole")
    assert content(tmp_path / "w") == content(tmp_path / "whole")


def test_stop_then_other_model_needs_replace(server, tmp_path):
    folder = corpus(tmp_path / "c", {f"p{i}": "Osk prose here." for i in range(3)})
    with pytest.raises(UserError, match="use a better model .with --config.replace=true."):
        run(server, folder, tmp_path / "w", max_empty_share=0.5, min_passages=3)
    num_requests = len(server.asked)
    with pytest.raises(UserError, match='was started with model="m", not "n"'):
        run(server, folder, tmp_path / "w", **{"extractor.model": "n"})
    result = run(server, folder, tmp_path / "w", replace=True, **{"extractor.model": "n"})
    assert (result["extracted"], result["complete"]) == (3, True)
    assert result["calls"] == len(server.asked) == 2 * num_requests  # of both models
    with TripleStore.open(tmp_path / "w") as held:
        entries = [held.entry(f"p{i}") for i in range(3)]
        assert {entry and entry.extractor["model"] for entry in entries} == {"n"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(TripleStore, "commit", 2), (Journal, "forget", 1), (Journal, "close_program", 4)],
)
def test_stop_anywhere_in_block_counts_block_once(
    server, tmp_path, monkeypatch, owner, name, call, when
):
    folder, function, count = corpus(tmp_path / "c", TEXTS), getattr(owner, name), 0

    def interrupted(*arguments):
        nonlocal count
        count += 1
        if count == call and when == "before":
            raise KeyboardInterrupt
        result = function(*arguments)
        if count == call:
            raise KeyboardInterrupt
        return result

    fields = {"block": 2, "retry": "never"}
    expected = run(server, folder, tmp_path / "whole", **fields)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(server, folder, tmp_path / "w", **fields)
    result = run(server, folder, tmp_path / "w", **fields)
    assert without_varying(result) == without_varying(expected)
    assert content(tmp_path / "w") == content(tmp_path / "whole")


def test_stop_by_full_disk_keeps_all_answers(server, tmp_path, monkeypatch):
    folder = corpus(tmp_path / "c", TEXTS)

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_columns", full)
        with pytest.raises(UserError, match="disk is full; progress is saved"):
            run(server, folder, tmp_path / "w")
    num_requests = len(server.asked)
    assert run(server, folder, tmp_path / "w")["complete"]
    assert len(server.asked) == num_requests + 1  # only the failed request


def test_stop_by_keyboard_keeps_all_answers(server, tmp_path, monkeypatch):
    folder, record, count = corpus(tmp_path / "c", TEXTS), Journal.record, 0

    def interrupted(*arguments):
        nonlocal count
        record(*arguments)
        count += 1
        if count == 8:
            raise KeyboardInterrupt

    fields = {"extractor.max_concurrency": 1}
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(server, folder, tmp_path / "w", **fields)
    before = len(server.asked)
    assert run(server, folder, tmp_path / "w", **fields)["complete"]
    again = [text for _, text in server.asked if "refused" not in text]
    assert 8 <= before < 12 and len(again) - len(set(again)) <= 1  # the request in flight


def test_stop_by_kill_anywhere_resumes_to_same_rows(server, tmp_path):
    words = [f"{a}{b}" for a in ("Ul", "Tar", "Os", "Bru") for b in ("e", "n", "k")]
    texts = {f"p{i}": f"{a} feeds {words[i - 3]}. Osk joins {a}." for i, a in enumerate(words[:9])}
    texts |= {"p3": "It says nothing.", "p5": "Osk prose here."}
    folder = corpus(tmp_path / "c", texts)

    def drive(*kills):
        done = subprocess.run(
            [sys.executable, str(pathlib.Path(__file__).with_name("killed_driver.py")),
             server.url_of("NAME"), str(folder), str(tmp_path), *map(str, kills)],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    events = drive(0)["0"]
    expected = content(tmp_path / "0")
    once = set(server.asked_at["0"])
    assert events > 90 and len(once) == len(server.asked_at["0"]) == 18
    kills = sorted(random.Random(4).sample(range(1, events + 1), 4))
    assert drive(*kills) == {str(kill): kill for kill in kills}
    counted = without_varying(json.loads((tmp_path / "0" / "result.json").read_text()))
    assert counted["complete"] and counted["ok"] == 7
    recorded = 0
    for name in map(str, kills):
        assert content(tmp_path / name) == expected, name
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert without_varying(result) == counted, name
        requests = server.asked_at[name]
        done = tmp_path / f"{name}.done"
        lines = done.read_text().splitlines() if done.exists() else []
        completed = [json.loads(line) for line in lines]
        assert [requests.count(text) for text in completed] == [1] * len(completed), name
        # Only requests in flight during the kill are repeated.
        assert set(requests) == once and len(requests) <= len(once) + 2
        recorded += len(completed)
    assert recorded > 15
