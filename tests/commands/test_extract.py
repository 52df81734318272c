"""Extraction: updates, failures by cause, interruption at any instant."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import sqlite3
import subprocess
import sys
from typing import Any

import pytest

from cirag_jax.commands.backends import DEFAULT_MODEL
from cirag_jax.commands.extract import extract_corpus
from cirag_jax.errors import UserError
from cirag_jax.methods import extraction
from cirag_jax.methods.extraction import ExtractionSettings, extract
from cirag_jax.prompts import extraction as prompts
from cirag_jax.runtime.journal import Journal
from cirag_jax.runtime.requests import Generate, Generated, RequestError
from cirag_jax.triples import store
from cirag_jax.triples.store import FILE, TripleStore
from cirag_jax.types import Passage, Triple
from configs import extract as extract_config
from tests.commands.model_server import model_server

_ROOT = pathlib.Path(__file__).resolve().parents[2]
SETTINGS = ExtractionSettings()

TEXTS = {
    "p0": "Ule feeds Tarn. Tarn governs Osk.",
    "p1": "Brum borders Osk. It nothing.",
    "p2": "Osk prose here.",
    "p3": "Dunn joins Ule. Ule cuts Brum. Brum cut Osk.",
    "p4": "Fenn garbled Osk. Osk feeds Fenn.",
    "p5": "Fenn refused Osk.",
}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with model_server() as running:
        yield running


def corpus(folder, texts):
    folder.mkdir(exist_ok=True)
    rows = [{"id": name, "title": name, "text": text} for name, text in texts.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(server, folder, workdir, **fields):
    config = extract_config.get_config()
    config.update_from_flattened_dict(
        {
            "data.dir": str(folder),
            "extractor.backend": "openai",
            "extractor.base_url": server.url,
            "extractor.model": "m",
            "extractor.max_retries": 0,
            "max_empty_share": 1.0,
            **fields,
        }
    )
    workdir.mkdir(exist_ok=True)
    return extract_corpus(config.lock(), workdir)


def triples(workdir, names):
    """Each passage's triples and status."""
    with TripleStore.open(workdir) as held:
        entries = {name: held.entry(name) for name in names}
        return held.triples(names), {n: e and e.status for n, e in entries.items()}


def constant(result):
    """A result without what the interruptions of a run change."""
    varying = ("seconds", "reused", "extracted", "store")
    return {name: value for name, value in result.items() if name not in varying}


def content(workdir):
    """Everything the store holds but what it notes of the last run."""
    with contextlib.closing(sqlite3.connect(workdir / FILE)) as db:
        tables = ("passages", "extractors")
        return [sorted(db.execute(f"SELECT * FROM {table}")) for table in tables]


# -------------------------------------------------------------------------------------- one passage

PASSAGE = Passage("p", "Ule", "Ule feeds Tarn. Tarn governs Osk.")


def drive(*answers, **settings) -> tuple[list[Any], Any]:
    """The program by hand: answers are (text, finish reason); returns its requests, its result."""
    program = extract(PASSAGE, ExtractionSettings(**settings))
    requests = [next(program)]
    for text, reason in answers:
        try:
            requests.append(program.send(Generated(text, reason)))
        except StopIteration as end:
            return requests, end.value
    raise AssertionError("the program asked for more")


def test_two_requests_and_triples_with_their_sentences():
    requests, found = drive(
        ('{"named_entities": ["Ule", "Osk"]}', "stop"),
        ('{"triples": [["Tarn", "governs", "Osk"], ["Ule", "feeds", "Tarn"]]}', "stop"),
        entity_tokens=7,
        triple_tokens=9,
    )
    assert all(isinstance(r, Generate) and r.role == "extractor" for r in requests)
    assert [r.max_tokens for r in requests] == [7, 9] and requests[0].json_schema is None
    assert '["Ule", "Osk"]' in requests[1].messages[-1].text
    assert found.status == "ok" and found.parse_errors == {}
    assert found.triples == (
        Triple("Tarn", "governs", "Osk", "p", 1),
        Triple("Ule", "feeds", "Tarn", "p", 0),
    )


EXAMPLE = '["Agnes Thorley", "discovered", "comet Oriel"]'


@pytest.mark.parametrize(
    ("first", "second", "status", "cause", "problems"),
    [
        ("no idea", '{"triples": [["a", "b", "c"]]}', "ok", None, {"entities: no_json": 1}),
        ('{"named_entities": []}', '{"triples": []}', "empty", None, {}),
        ("[]", "", "failed", "answer: no_json",
         {"entities: wrong_shape": 1, "triples: no_json": 1}),
        ('["Ule"]', '{"triples": [["a", "b"]]}', "failed", "answer: wrong_shape",
         {"entities: wrong_shape": 1, "triples: wrong_shape": 1}),
        ('{"named_entities": ["Ule"]}', f'{{"triples": [{EXAMPLE}]}}', "failed",
         "answer: example", {"triples: example": 1}),
        ('{"named_entities": ["Ule"]}', f'{{"triples": [{EXAMPLE}, ["a", "b", "c"]]}}', "ok",
         None, {"triples: example": 1}),
    ],
)  # fmt: skip
def test_what_becomes_of_answers(first, second, status, cause, problems):
    _, found = drive((first, "stop"), (second, "stop"))
    assert (found.status, found.cause) == (status, cause)
    assert found.parse_errors == problems
    assert bool(found.answer) == (status != "ok" and bool(second))


NAMES = '{"named_entities": ["Ule"]}'
GIVEN = [  # triples' answer, how it ended -> status, triples with their sentences
    ('{"triples": [["Ule", "feeds", "Tarn"], ["ULE", "Feeds", "tarn"]]}', "stop",
     "ok", [("Ule", "feeds", "Tarn", 0)]),
    ('Sure: {"triples": [["Tarn", "governs", "Osk"], ["Ule", "feeds"], ["a", 3, "b\\n c"]]}',
     "stop", "ok", [("Tarn", "governs", "Osk", 1), ("a", "3", "b c", 0)]),
    ('{"triples": [["Ule", "feeds", "Tarn"], ["Tarn", "gov', "length",
     "ok", [("Ule", "feeds", "Tarn", 0)]),
    ("{'triples': [{'subject': 'Ule', 'predicate': 'feeds', 'object': 'Tarn'},]}", "stop",
     "ok", [("Ule", "feeds", "Tarn", 0)]),
    ('[["Ule", "feeds", "Tarn"]]', "stop", "ok", [("Ule", "feeds", "Tarn", 0)]),
    (f'{{"triples": [{EXAMPLE}]}}', "stop", "failed", []),
    ('{"triples": []}', "stop", "empty", []),
]  # fmt: skip


def test_the_parser_gives_what_its_version_gave():
    """Where this fails for an intended change, raise `extraction.PARSER` and correct both."""
    found = []
    for answer, reason, *_ in GIVEN:
        _, made = drive((NAMES, "stop"), (answer, reason))
        rows = [(t.head, t.relation, t.tail, t.sentence) for t in made.triples]
        found.append((answer, reason, made.status, rows))
    assert (extraction.PARSER, found) == (1, GIVEN)


def test_a_failed_request_is_the_failure_of_the_passage():
    program = extract(PASSAGE, ExtractionSettings())
    next(program)
    with pytest.raises(RequestError, match="away"):
        program.throw(RequestError("the server is away"))


def test_what_the_passage_does_not_name_is_dropped():
    text = '{"triples": [["Ule", "feeds", "Oskar"], ["ULE", "gives to", "Tarn"]]}'
    answers = ("[]", "stop"), (text, "stop")
    _, found = drive(*answers, grounded=True)
    assert [(t.head, t.relation, t.tail) for t in found.triples] == [("ULE", "gives to", "Tarn")]
    assert found.parse_errors["triples: ungrounded"] == 1
    assert len(drive(*answers)[1].triples) == 2
    _, found = drive(("[]", "stop"), ('{"triples": [["Ur", "is", "old"]]}', "stop"), grounded=True)
    assert (found.status, found.cause) == ("failed", "answer: ungrounded")


def test_the_words_of_a_triple_are_looked_for_in_title_and_text():
    passage = Passage("p", "Café Ule", "It opened on 3 May 1920, in Saint-Osk.")
    for head, tail, grounded in (
        ("Café Ule", "1920", True),
        ("café", "saint osk", True),
        ("Cafe Ule", "1920", False),
        ("Ule", "May 192", False),
    ):
        assert extraction.is_grounded((head, "opened in", tail), passage) == grounded


def test_constrained_answers_have_schemas():
    requests, _ = drive(("[]", "stop"), ("[]", "stop"), constrained=True)
    keys = [next(iter(r.json_schema["properties"])) for r in requests]
    assert keys == ["named_entities", "triples"]


# -------------------------------------------------------------------------------------- the command


def test_every_kind_of_outcome_is_told_apart(server, tmp_path):
    result = run(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w")
    assert (result["passages"], result["ok"], result["empty"], result["failed"]) == (6, 3, 1, 2)
    assert result["triples"] == 6 and result["complete"] and result["left"] == 0
    (refused,) = (cause for cause in result["failures"] if cause.startswith("request: "))
    assert result["failures"] == {"answer: no_json": 1, refused: 1} and "status #" in refused
    assert result["parse_errors"] == {
        "entities: truncated": 1,
        "triples: truncated": 1,
        "triples: no_json": 1,
    }
    assert result["calls"] == 11 and result["generated_tokens"] == 70
    assert result["cached_tokens"] == 20 and result["prompt_tokens"] > 70
    found, status = triples(tmp_path / "w", TEXTS)
    assert status == dict(zip(TEXTS, ["ok", "empty", "failed", "ok", "ok", "failed"], strict=True))
    assert found["p0"] == (
        Triple("Ule", "feeds", "Tarn", "p0", 0),
        Triple("Tarn", "governs", "Osk", "p0", 1),
    )
    assert found["p1"] == () and found["p2"] is None and found["p5"] is None
    assert [t.head for t in found["p3"] or ()] == ["Dunn", "Ule"]  # the third was cut off
    with TripleStore.open(tmp_path / "w") as held:
        entry = held.entry("p0")
        assert entry and entry.extractor["model"] == "m"


HOSTILE = (
    r"""{"triples": [["\ud800x", "is\u0000", "c"], ["'); DROP TABLE passages", "</a>", ""]]}""",
    "[" * 500,
    '{"triples": [[' + "9" * 5000 + ', NaN, "c"]]}',
    "\x00\u202e__import__('os')",
)  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_and_passages_break_nothing(server, tmp_path, answer):
    texts = {"'; --": "'); DROP TABLE passages; --", "a\x00b\u202e": "{}\x00 [[", "../../x": "x"}
    server.answer = lambda text, wants: (answer, "stop")
    result = run(server, corpus(tmp_path / "c", texts), tmp_path / "w")
    assert result["complete"] and result["passages"] == 3
    assert result["ok"] + result["failed"] == 3 and set(result["parse_errors"].values()) == {3}
    found, _ = triples(tmp_path / "w", texts)
    parts = {part for one in found.values() for t in one or () for part in (t.head, t.tail)}
    assert not any("\ud800" in part or "\x00" in part for part in parts)
    assert run(server, tmp_path / "c", tmp_path / "w")["reused"] == 3


def test_what_failed_is_tried_again_as_configured(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    run(server, folder, tmp_path / "w")
    for retry, asked in (("never", 0), ("errors", 1), ("all", 3)):
        server.asked.clear()
        result = run(server, folder, tmp_path / "w", retry=retry)
        assert len(server.asked) == asked and result["failed"] == 2
    server.answer = lambda text, wants: ('{"triples": [["a", "b", "c"]]}', "stop")
    result = run(server, folder, tmp_path / "w")
    assert result["failed"] == 1 and triples(tmp_path / "w", ["p5"])[1] == {"p5": "ok"}


def test_what_fails_in_a_run_is_not_tried_again_in_it(server, tmp_path):
    run(server, corpus(tmp_path / "c", TEXTS), tmp_path / "w")
    server.asked.clear()
    more = {"n1": "Osk refused Ule.", **TEXTS, "n2": "Ule joins Osk."}
    result = run(server, corpus(tmp_path / "c", more), tmp_path / "w", block=1)
    assert (result["extracted"], result["left"], result["failed"]) == (3, 0, 3)
    assert len(server.asked) == 4


def test_updates_equal_an_extraction_from_scratch(server, tmp_path):
    old = {**TEXTS, "q1": "Ule joins Osk.", "q2": "Tarn joins Osk."}
    new = {
        "n1": "Osk joins Brum.",
        **{name: text for name, text in TEXTS.items() if name != "p0"},
        "q2": "Tarn leaves Osk.",
        "n2": "It says nothing.",
    }
    run(server, corpus(tmp_path / "c", old), tmp_path / "w", block=3)
    server.asked.clear()
    result = run(server, corpus(tmp_path / "c", new), tmp_path / "w", block=3, retry="never")
    texts = {text.split("\n")[0] for _, text in server.asked}
    assert texts == {"Title: n1", "Title: q2", "Title: n2"}  # only what is new or has changed
    assert (result["extracted"], result["deleted"], result["reused"]) == (3, 2, 5)
    run(server, corpus(tmp_path / "c", new), tmp_path / "scratch")
    names = {**old, **new}
    assert triples(tmp_path / "w", names) == triples(tmp_path / "scratch", names)
    (old_rows, _), (new_rows, _) = content(tmp_path / "w"), content(tmp_path / "scratch")
    assert old_rows == new_rows


def test_a_limit_leaves_the_rest_alone(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    result = run(server, folder, tmp_path / "w", limit=2)
    assert (result["passages"], result["extracted"]) == (2, 2)
    result = run(server, folder, tmp_path / "w")
    assert (result["extracted"], result["reused"]) == (4, 2)
    server.asked.clear()
    result = run(server, folder, tmp_path / "w", limit=1)
    assert (result["passages"], result["deleted"]) == (6, 0) and not server.asked


def test_another_model_needs_a_word(server, tmp_path):
    folder = corpus(tmp_path / "c", {"p0": TEXTS["p0"]})
    run(server, folder, tmp_path / "w")
    with pytest.raises(
        UserError, match=r"started with model=\"m\", not \"n\"; --config.replace=true"
    ):
        run(server, folder, tmp_path / "w", **{"extractor.model": "n"})
    result = run(server, folder, tmp_path / "w", replace=True, **{"extractor.model": "n"})
    assert result["extracted"] == 1 and result["passages"] == 1
    # A server's only model is asked for its name.
    with pytest.raises(UserError, match='not "only"'):
        run(server, folder, tmp_path / "w", **{"extractor.model": None})


def test_another_parser_needs_a_word(server, tmp_path, monkeypatch):
    folder = corpus(tmp_path / "c", {"p0": TEXTS["p0"]})
    with monkeypatch.context() as patch:  # a store from before there was a version
        patch.setattr(extraction, "version", lambda *_: {"prompt": prompts.prompt_hash()})
        run(server, folder, tmp_path / "w")
    for fields in ({}, {"estimate_only": True}):
        with pytest.raises(UserError, match=r"parser=null, not \d+; --config.replace=true"):
            run(server, folder, tmp_path / "w", **fields)
    assert run(server, folder, tmp_path / "w", replace=True)["extracted"] == 1
    assert run(server, folder, tmp_path / "w")["reused"] == 1
    monkeypatch.setattr(extraction, "PARSER", extraction.PARSER + 1)
    with pytest.raises(UserError, match=rf"parser={extraction.PARSER - 1}, not"):
        run(server, folder, tmp_path / "w")
    assert run(server, folder, tmp_path / "w", replace=True)["extracted"] == 1


def test_the_contexts_of_selected_questions_alone(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    contexts = {"q0": ["p0", "p3"], "q1": ["p3", "p1"], "q2": ["p4"]}
    rows = [
        {"id": name, "question": "?", "answers": ["a"], "split": "dev", "context": ids}
        for name, ids in contexts.items()
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(server, folder, tmp_path / "w", limit=1)
    fields = {"data.corpus": "selected_questions", "data.split": "dev", "data.limit": 2}
    server.asked.clear()
    result = run(server, folder, tmp_path / "w", **fields)
    assert {text.split("\n")[0] for _, text in server.asked} == {"Title: p1", "Title: p3"}
    assert (result["passages"], result["reused"], result["deleted"]) == (3, 1, 0)
    estimated = run(server, folder, tmp_path / "e", estimate_only=True, **fields)
    assert estimated["passages"] == 3
    # The rest of the corpus follows, and none of it is extracted again.
    assert run(server, folder, tmp_path / "w")["reused"] == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data.limit": 2}, "config.data.limit selects questions; .*corpus=selected_questions"),
        (
            {"data.corpus": "all"},
            "config.data.corpus='all' must be one of ircot_full",
        ),
        ({"data.corpus": "selected_questions", "import_openie": "x"}, "takes the whole file"),
    ],
)
def test_a_selection_that_selects_nothing_is_refused(server, tmp_path, fields, words):
    folder = corpus(tmp_path / "c", TEXTS)
    question = {"id": "q", "question": "?", "answers": ["a"], "split": "dev", "context": ["p0"]}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    with pytest.raises(UserError, match=words):
        run(server, folder, tmp_path / "w", **fields)


def test_triples_written_under_other_limits_are_others():
    config, found = extract_config.get_config(), []
    for size in (0, 8, 9):
        config.extractor.no_repeat_ngram_size = size
        found.append(extraction.extractor_identity(config.extractor, DEFAULT_MODEL, SETTINGS))
    assert found[0] != found[1] != found[2] != found[0]
    grounded = dataclasses.replace(SETTINGS, grounded=True)
    found.append(extraction.extractor_identity(config.extractor, DEFAULT_MODEL, grounded))
    assert found[3] not in found[:3]
    config.extractor.backend = "openai"  # Has no such limit.
    assert "no_repeat_ngram_size" not in extraction.extractor_identity(
        config.extractor, "m", SETTINGS
    )


def test_a_run_without_triples_stops(server, tmp_path):
    texts = {f"p{i}": "It says nothing." if i < 3 else "prose" for i in range(9)}
    texts["p0"] = TEXTS["p0"]
    folder = corpus(tmp_path / "c", texts)
    fields = {"min_passages": 5, "extractor.max_concurrency": 1}
    with pytest.raises(
        UserError, match=r"4 of 5 passages gave no triple .*'\{\"triples\": \[\]\}'"
    ):
        run(server, folder, tmp_path / "w", max_empty_share=0.5, **fields)
    asked = len(server.asked)
    with pytest.raises(UserError, match="gave no triple"):
        run(server, folder, tmp_path / "w", max_empty_share=0.5, **fields)
    result = run(server, folder, tmp_path / "w", max_empty_share=0.9, **fields)
    assert result["complete"] and (result["ok"], result["empty"]) == (1, 2)
    assert len(server.asked) == len(set(server.asked)) and asked <= 18  # nothing was asked twice
    few = corpus(tmp_path / "few", {"p1": "It says nothing."})
    assert run(server, few, tmp_path / "v", max_empty_share=0.5, **fields)["empty"] == 1


def test_the_estimate_comes_first_and_may_be_all(server, tmp_path, capsys):
    folder = corpus(tmp_path / "c", TEXTS)
    result = run(server, folder, tmp_path / "w", estimate_only=True)
    assert not server.asked and not list((tmp_path / "w").iterdir())
    assert result["passages"] == 6 and not result["complete"] and result["seconds"] > 0
    done = run(server, folder, tmp_path / "w")
    assert done["prompt_tokens"] <= result["prompt_tokens"]
    assert "estimate: 6 passages: at most about" in capsys.readouterr().err
    assert run(server, folder, tmp_path / "w", estimate_only=True)["passages"] == 1  # p5 again


def test_a_deadline_ends_cleanly_and_a_budget_too(server, tmp_path):
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


def test_a_clean_end_stores_what_has_an_outcome(server, tmp_path):
    folder = corpus(tmp_path / "c", TEXTS)
    fields = {"in_flight": 1, "extractor.max_concurrency": 1}
    stopped = run(server, folder, tmp_path / "w", **fields, **{"extractor.budget_tokens": 1150})
    stored = stopped["extracted"]
    assert 0 < stored < 6 and stopped["left"] == 6 - stored and not stopped["complete"]
    names = list(TEXTS)
    found, status = triples(tmp_path / "w", names)
    assert all(status[name] for name in names[:stored])
    assert not any(status[name] for name in names[stored:])
    assert found["p0"] and found["p0"][0].head == "Ule"
    calls, asked = stopped["calls"], len(server.asked)
    assert calls == asked  # what left the journal still counts
    finished = run(server, folder, tmp_path / "w")
    assert finished["complete"] and (finished["reused"], finished["left"]) == (stored, 0)
    again = [text for _, text in server.asked if "refused" not in text]
    assert len(again) == len(set(again))
    run(server, folder, tmp_path / "whole")
    assert content(tmp_path / "w") == content(tmp_path / "whole")


def test_what_an_aborted_run_left_is_replaced_with_a_word(server, tmp_path):
    folder = corpus(tmp_path / "c", {f"p{i}": "Osk prose here." for i in range(3)})
    with pytest.raises(UserError, match="use a better model .with --config.replace=true."):
        run(server, folder, tmp_path / "w", max_empty_share=0.5, min_passages=3)
    asked = len(server.asked)
    with pytest.raises(UserError, match='was started with model="m", not "n"'):
        run(server, folder, tmp_path / "w", **{"extractor.model": "n"})
    result = run(server, folder, tmp_path / "w", replace=True, **{"extractor.model": "n"})
    assert (result["extracted"], result["complete"]) == (3, True)
    assert result["calls"] == len(server.asked) == 2 * asked  # of both models
    with TripleStore.open(tmp_path / "w") as held:
        entries = [held.entry(f"p{i}") for i in range(3)]
        assert {entry and entry.extractor["model"] for entry in entries} == {"n"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(TripleStore, "commit", 2), (Journal, "forget", 1), (Journal, "close_program", 4)],
)
def test_a_block_counts_once_wherever_it_is_interrupted(
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
    assert constant(result) == constant(expected)
    assert content(tmp_path / "w") == content(tmp_path / "whole")


def test_a_full_disk_loses_nothing(server, tmp_path, monkeypatch):
    folder = corpus(tmp_path / "c", TEXTS)

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_row", full)
        with pytest.raises(UserError, match="disk is full; what is recorded is kept"):
            run(server, folder, tmp_path / "w")
    asked = len(server.asked)
    assert run(server, folder, tmp_path / "w")["complete"]
    assert len(server.asked) == asked + 1  # the request that had failed, and no other


def test_an_interruption_from_the_keyboard_loses_nothing(server, tmp_path, monkeypatch):
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
    assert 8 <= before < 12 and len(again) - len(set(again)) <= 1  # the one under way


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "a", "title": "", "text": "x"}\n{"id": "a", "title": "", "text": "y"}\n',
         "corpus.jsonl:2: field 'id' repeats the id 'a'"),
        ('{"id": "a", "title": "", "text": "x"}\n{"id": "b", "tit', "corpus.jsonl:2: invalid"),
        ('{"id": "a", "title": ""}\n', "corpus.jsonl:1: field 'text' is missing"),
        ("", "corpus.jsonl is empty"),
        (None, "corpus.jsonl does not exist"),
    ],
)  # fmt: skip
def test_broken_corpora_are_refused(server, tmp_path, content, message):
    (tmp_path / "c").mkdir()
    if content is not None:
        (tmp_path / "c" / "corpus.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        run(server, tmp_path / "c", tmp_path / "w")
    assert not server.asked


@pytest.mark.parametrize(
    ("field", "value"),
    [("block", 0), ("retry", "some"), ("max_empty_share", 1.5), ("limit", -1),
     ("entity_tokens", 0), ("data.dir", "/nowhere")],
)  # fmt: skip
def test_bad_settings_are_refused(server, tmp_path, field, value):
    folder = corpus(tmp_path / "c", TEXTS)
    with pytest.raises(UserError, match=field if field != "data.dir" else "/nowhere"):
        run(server, folder, tmp_path / "w", **{field: value})


# --------------------------------------------------------------------------------------------- kill


@pytest.mark.slow
def test_killed_anywhere_it_resumes_to_the_same_rows(server, tmp_path):
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
    counted = constant(json.loads((tmp_path / "0" / "result.json").read_text()))
    assert counted["complete"] and counted["ok"] == 7
    recorded = 0
    for name in map(str, kills):
        assert content(tmp_path / name) == expected, name
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert constant(result) == counted, name
        asked = server.asked_at[name]
        done = tmp_path / f"{name}.done"
        lines = done.read_text().splitlines() if done.exists() else []
        completed = [json.loads(line) for line in lines]
        assert [asked.count(text) for text in completed] == [1] * len(completed), name
        # Only what was under way when it was killed is asked a second time.
        assert set(asked) == once and len(asked) <= len(once) + 2
        recorded += len(completed)
    assert recorded > 15
