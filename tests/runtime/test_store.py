"""The journal of a run: recording, replay, rejected files, kills and merging."""

import dataclasses
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys

import pytest

from cirag_jax.errors import UserError
from cirag_jax.llm.types import Token, Usage
from cirag_jax.runtime.records import (
    JournalReader,
    RequestKey,
    Totals,
    check_settings,
    read_passages,
    read_records,
    read_settings,
)
from cirag_jax.runtime.requests import Generated, RequestError, Retrieve, Retrieved
from cirag_jax.runtime.store import JOURNAL, Journal, journal_path, merge_journals
from cirag_jax.types import Passage
from tests.runtime.recording import USAGE, passage, response_to, say

SETTINGS = {"method": "cirag", "cirag.granularities": ("triple", "passage"), "seed": 0}
FIRST = Retrieve("where?", 2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / JOURNAL


def begin(path, **changes):
    return Journal(path, {**SETTINGS, **changes})


def write_one(path, program="a"):
    with begin(path) as book:
        book.open_program(program, 0, {"question": "where?"})
        book.record(RequestKey(program, 0), FIRST, response_to(FIRST))
        book.record(RequestKey(program, 1), say("who?"), response_to(say("who?")))


def test_replay_returns_recorded_responses_only(path):
    write_one(path)
    with begin(path) as book:
        assert book.replay(RequestKey("a", 0), FIRST) == response_to(FIRST)
        assert book.replay(RequestKey("a", 1), say("who?")) == response_to(say("who?"))
        for key in (RequestKey("a", 2), RequestKey("a", 0, 1), RequestKey("b", 0)):
            assert book.replay(key, FIRST) is None


def test_passages_are_stored_once(path):
    split_passage = Passage("ø/1", "Title", "One. Two.", ("One.", " ", "Two."))
    request = Retrieve("x", 1)
    with begin(path) as book:
        for program in ("a", "b"):
            book.record(
                RequestKey(program, 0),
                request,
                Retrieved((split_passage, passage("p")), (1.0, 0.1)),
            )
    assert read_passages(path) == {"ø/1": split_passage, "p": passage("p")}
    with begin(path) as book:
        response = book.replay(RequestKey("b", 0), request)
        assert response == Retrieved((split_passage, passage("p")), (1.0, 0.1))
        with pytest.raises(KeyError):
            book.passage("nowhere")
    assert read_passages(path) == {"ø/1": split_passage, "p": passage("p")}


def test_replay_recorded_error_is_returned(path):
    with begin(path) as book:
        book.record(RequestKey("a", 0), FIRST, RequestError("no index"))
        response = book.replay(RequestKey("a", 0), FIRST)
    assert isinstance(response, RequestError) and str(response) == "no index"


def test_records_sum_tokens_and_calls(path):
    write_one(path)
    with begin(path) as book:
        book.record(RequestKey("a", 2), say("more?"), Generated("yes", "length", USAGE))
        book.record(RequestKey("a", 3), say("fails"), RequestError("busy"))
        book.close_program("a", None, "busy", 0.5)  # failed runs count towards the time
        book.close_program("a", {"answer": "x"}, None, 1.0)
        book.open_program("b", 1, None)
        book.close_program("b", None, "broken", 0.25)
        records = {record.id: record for record in book.records()}
    assert records["a"].usage == USAGE + USAGE
    assert records["a"].calls == {
        "retrieve": 1,
        "extract": 0,
        "anchor": 0,
        "link": 0,
        "walk": 0,
        "fetch": 0,
        "follow": 0,
        "rank": 0,
        "route": 0,
        "demonstrate": 0,
        "generate": 3,
        "score": 0,
    }
    assert (records["a"].outcome, records["a"].error, records["a"].seconds) == (
        {"answer": "x"},
        None,
        1.5,
    )
    assert (records["b"].outcome, records["b"].error, records["b"].usage) == (
        None,
        "broken",
        Usage(),
    )


def test_seconds_add_up_over_runs(path):
    with begin(path) as book:
        assert book.add_seconds(2.0) == 2.0
    with begin(path) as book:
        assert book.add_seconds(0.5) == 2.5


def test_forget_drops_programs_and_responses(path):
    write_one(path, "a")
    with begin(path) as book:
        book.open_program("b", 1, None)
        book.record(RequestKey("b", 0), FIRST, response_to(FIRST))
        book.forget(["a", "unknown"])
        assert [record.id for record in book.records()] == ["b"]
        assert book.replay(RequestKey("a", 0), FIRST) is None
        assert book.replay(RequestKey("b", 0), FIRST) is not None
        book.open_program("a", 0, "another input")  # the old input is forgotten


def test_totals_count_forgotten_programs_once(path):
    twice = {"reader": USAGE + USAGE}
    for program in ("a", "b"):
        write_one(path, program)
    with begin(path) as book:
        book.close_program("a", "done", None)
        before = book.totals()
        assert before == Totals(1, 2, twice) and book.usage() == twice
        book.forget(["a"])
        assert book.totals() == before
        book.close_program("b", None, "broken")
        book.forget(["a", "b", "unknown"])
        assert book.totals() == Totals(2, 2, twice) and book.usage() == twice
        book.add_seconds(1.5)
    write_one(path, "a")  # the requests are made and counted again
    with JournalReader(path) as book:
        totals, seconds = book.totals(), book.seconds
    assert totals == Totals(2, 3, {"reader": USAGE + USAGE + USAGE}) and seconds == 1.5


def test_totals_count_removed_journals_once(path, tmp_path):
    """Two journals that had the same name at different times are both counted."""
    part, expected = tmp_path / "part.sqlite", Totals(0, 1, {"reader": USAGE})
    with begin(path) as book:
        for times in (1, 2):
            write_one(part)
            with JournalReader(part) as other:
                name, totals = other.id, other.totals()
            assert totals == expected and name != part.name
            book.count(name, totals)
            book.count(name, totals)  # as after a kill before its removal
            part.unlink()
            assert book.totals() == sum([expected] * times, Totals())
        book.forget([])
        assert book.totals() == expected + expected


def test_forget_interrupted_counts_nothing_twice(path, monkeypatch):
    write_one(path)

    def killed(*_):
        raise sqlite3.OperationalError("disk I/O error")

    with begin(path) as book:
        before = book.totals()
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_set_meta", killed)
            with pytest.raises(UserError):
                book.forget(["a"])
        assert book.totals() == before and [r.id for r in book.records()] == ["a"]


def test_open_failed_program_deletes_only_its_errors(path):
    with begin(path) as book:
        book.open_program("a", 0, None)
        book.record(RequestKey("a", 0), FIRST, response_to(FIRST))
        book.record(RequestKey("a", 1, 0), say("x"), response_to(say("x")))
        book.record(RequestKey("a", 1, 1), say("y"), RequestError("busy"))
        book.close_program("a", None, "busy")
        book.open_program("b", 1, None)
        book.record(RequestKey("b", 0), FIRST, RequestError("busy"))
        book.open_program("a", 0, None)
        assert book.replay(RequestKey("a", 0), FIRST) == response_to(FIRST)
        assert book.replay(RequestKey("a", 1, 1), say("y")) is None
        assert book.replay(RequestKey("b", 0), FIRST) is not None
        assert [r.error for r in book.records()] == [None, None]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, r"with seed=0, not 1;"),
        (
            {"cirag.granularities": ("triple",)},
            r'cirag\.granularities=\["triple","passage"\], not \["triple"\]',
        ),
        ({"new": "x" * 200}, r'new=null, not "x{76}\.\.\.; use another --workdir'),
        ({"method": None}, r'method="cirag", not null'),
    ],
)
def test_changed_setting_is_rejected_by_name(path, changes, words):
    write_one(path)
    with pytest.raises(UserError, match=words):
        begin(path, **changes)
    with begin(path):  # it is unchanged
        pass


def test_settings_may_change_before_first_response(path):
    with begin(path) as book:
        book.open_program("a", 0, {})
    check_settings(path, {**SETTINGS, "seed": 7})
    with begin(path, seed=7):
        pass
    assert read_settings(path)["seed"] == 7


def test_replace_drops_records_of_other_settings(path):
    write_one(path)
    with Journal(path, SETTINGS, replace=True) as book:
        assert [record.id for record in book.records()] == ["a"]
        totals = book.totals()
    with Journal(path, {**SETTINGS, "seed": 7}, replace=True) as book:
        assert not list(book.records()) and book.totals() == totals
    assert read_settings(path)["seed"] == 7
    assert not read_passages(path)  # a changed document may keep its id
    with begin(path, seed=8):  # nothing is recorded
        pass


def test_programs_may_have_any_id(path):
    names = ["a\0b", "a", "\u202e'; --", "a\0b"[::-1]]
    with begin(path) as book:
        for place, name in enumerate(names):
            book.open_program(name, place, {})
            book.close_program(name, place, None)
        assert book.outcomes(names[:1]) == {names[0]: 0}
        assert [record.id for record in book.records(names[::2])] == names[::2]
        book.forget(names[:1])
        assert book.outcomes().keys() == set(names[1:]) and book.totals().programs == len(names)


def test_result_without_response_binds_settings(path):
    with begin(path) as book:
        book.open_program("a", 0, {})
        book.close_program("a", ["by rule"], None)
    with pytest.raises(UserError, match="with seed=0, not 7;"):
        check_settings(path, {**SETTINGS, "seed": 7})
    with pytest.raises(UserError, match="with seed=0, not 7;"):
        begin(path, seed=7)


def test_replay_changed_request_is_rejected(path):
    write_one(path)
    with (
        begin(path) as book,
        pytest.raises(UserError, match=r"different request 1 of 'a', because the method"),
    ):
        book.replay(RequestKey("a", 1), say("whom?"))


def test_open_program_changed_input_is_rejected(path):
    write_one(path)
    with begin(path) as book, pytest.raises(UserError, match="contains 'a' with another input"):
        book.open_program("a", 0, {"question": "another"})


def test_two_writers_second_is_rejected(path):
    with begin(path), pytest.raises(UserError, match="in use by another run"):
        begin(path)
    with begin(path):
        pass


def test_reader_during_writing_is_rejected(path):
    with begin(path) as book:
        book.open_program("a", 0, None)
        with pytest.raises(UserError, match="in use by another run"):
            read_records(path)
    assert [record.id for record in read_records(path)] == ["a"]


def test_reading_does_not_change_the_file(path):
    write_one(path)
    before = path.read_bytes()
    records = read_records(path)
    assert records[0].calls["generate"] == 1
    settings = {**SETTINGS, "cirag.granularities": ["triple", "passage"]}
    assert read_settings(path) == settings
    assert path.read_bytes() == before


def test_missing_journal_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"journal\.sqlite does not exist"):
        read_records(tmp_path / "journal.sqlite")
    with pytest.raises(UserError, match="cannot be used"):
        begin(tmp_path / "no" / "folder" / "journal.sqlite")


@pytest.mark.parametrize("damage", ["text", "middle", "cut", "other"])
def test_damaged_file_is_rejected(path, damage):
    write_one(path)
    content = path.read_bytes()
    if damage == "text":
        path.write_text("this is no database, however long it goes on\n" * 100)
    elif damage == "middle":
        size = 4096
        path.write_bytes(content[:size] + b"\xff" * (len(content) - size))
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE other (x)")
        db.close()
    with pytest.raises(UserError, match=r"journal\.sqlite cannot be used: \w"):
        read_records(path)
    with pytest.raises(UserError, match=r"journal\.sqlite cannot be used: \w"), begin(path) as book:
        list(book.records())


def test_killed_run_in_read_only_folder_is_readable(path, monkeypatch):
    book = begin(path)
    book.open_program("a", 0, None)
    book.record(RequestKey("a", 0), FIRST, response_to(FIRST))
    copy = path.parent / "copy"
    copy.mkdir()
    for file in path.parent.glob("journal.sqlite*"):
        shutil.copy(file, copy)
    book.close()
    files = {file.name: file.read_bytes() for file in copy.iterdir()}
    assert any(name.endswith("-wal") for name in files)
    copy.chmod(0o555)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root can write everywhere
    (record,) = read_records(copy / path.name)
    assert record.calls["generate"] + record.calls["retrieve"] == 1
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == files
    copy.chmod(0o755)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_non_finite_number_is_rejected(path, number):
    with begin(path) as book:
        book.open_program("a", 0, None)
        token = Token("x", 1, number)
        message = "'a' contains a number that is not finite"
        with pytest.raises(UserError, match=f"request 0 of {message}"):
            book.record(RequestKey("a", 0), say("x"), Generated("x", "stop", tokens=(token,)))
        with pytest.raises(UserError, match=f"result of {message}"):
            book.close_program("a", {"scores": [number]}, None)
        book.close_program("a", None, "it failed")
    with begin(path) as book:
        book.open_program("a", 0, None)  # this deletes its error
        book.record(RequestKey("a", 0), FIRST, response_to(FIRST))
        assert not journal_has_nan(path)


def journal_has_nan(path):
    return b"NaN" in path.read_bytes() or b"Infinity" in path.read_bytes()


def test_other_format_is_rejected(path):
    write_one(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    db.close()
    with pytest.raises(
        UserError, match="by another version of this program .format 99, not 3.; use"
    ):
        begin(path)
    with pytest.raises(UserError, match="format 99"):
        read_records(path)


@pytest.mark.parametrize("kind", ["passages", "text", "program", "close"])
def test_full_disk_loses_nothing(path, kind):
    with begin(path) as book:
        book.open_program("a", 0, None)
        book.record(RequestKey("a", 0), FIRST, response_to(FIRST))
        pages = book._db.execute("PRAGMA page_count").fetchone()[0]
        book._db.execute(f"PRAGMA max_page_count = {pages}")  # the disk is full now
        big = "x" * 100_000
        with pytest.raises(UserError, match="disk is full; progress is saved"):
            match kind:
                case "passages":
                    response = Retrieved((dataclasses.replace(passage("q"), text=big),), (1.0,))
                    book.record(RequestKey("a", 1), FIRST, response)
                case "text":
                    book.record(RequestKey("a", 1), say("x"), Generated(big, "stop"))
                case "program":
                    book.open_program("b", 1, big)
                case _:
                    book.close_program("a", big, None)
    with begin(path) as book:  # there is room again
        assert book.replay(RequestKey("a", 0), FIRST) == response_to(FIRST)
        assert book.replay(RequestKey("a", 1), FIRST) is None
        with pytest.raises(KeyError):
            book.passage("q")
        book.record(RequestKey("a", 1), say("x"), Generated("x" * 100_000, "stop"))


_WRITER = """
import os, signal, sys
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.store import Journal
from tests.runtime.recording import response_to, say
book = Journal(sys.argv[1], {})
for index in range(1000):
    book.record(RequestKey("a", index), say(f"n{index}"), response_to(say(f"n{index}")))
    print(index, flush=True)
    if index == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_loses_no_response(path, repository):
    process = subprocess.run(
        [sys.executable, "-c", _WRITER, str(path), "17"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert process.stdout.split() == [str(index) for index in range(18)]
    # The viewer may read it before the next run.
    assert read_settings(path) == {} and read_passages(path) == {}
    with Journal(path, {}) as book:
        for index in range(18):
            assert book.replay(RequestKey("a", index), say(f"n{index}")) is not None
        assert book.replay(RequestKey("a", 18), say("n18")) is None


def test_closed_journal_is_one_file(tmp_path):
    with Journal(tmp_path / "journal.sqlite", {}) as book:
        book.open_program("a", 0, None)
        assert (tmp_path / "journal.sqlite-wal").exists()
    read_records(tmp_path / "journal.sqlite")
    assert [path.name for path in tmp_path.iterdir()] == ["journal.sqlite"]


def test_merge_journals(tmp_path):
    parts = [journal_path(tmp_path, index, 2) for index in range(2)]
    assert [path.name for path in parts] == ["journal.1-of-2.sqlite", "journal.2-of-2.sqlite"]
    for index, path in enumerate(parts):
        with begin(path) as book:
            for name in ["ac", "bd"][index]:
                book.open_program(name, "abcd".index(name), {"id": name})
                book.record(RequestKey(name, 0), FIRST, response_to(FIRST))
                book.close_program(name, {"answer": name}, None, 1.0)
            book.add_seconds(3.0 - index)
    merge_journals(parts, tmp_path / JOURNAL)
    merge_journals(parts, tmp_path / JOURNAL)  # as after a resumed run
    merged = read_records(tmp_path / JOURNAL)
    assert [record.id for record in merged] == list("abcd")
    single = {r.id: r for path in parts for r in read_records(path)}
    assert {r.id: r for r in merged} == single
    passages = read_passages(parts[0])
    assert read_passages(tmp_path / JOURNAL) == passages
    with JournalReader(tmp_path / JOURNAL) as book:
        totals, seconds = book.totals(), book.seconds
    assert totals.programs == 4 and seconds == 3.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "journal.1-of-2.sqlite", "journal.2-of-2.sqlite", "journal.sqlite",
    ]  # fmt: skip


def test_merge_program_in_two_journals(tmp_path):
    """Another version may have run the same program in another process."""
    parts = [journal_path(tmp_path, index, 2) for index in range(2)]
    for path, ended in zip(parts, ("a", "abc"), strict=True):
        write_one(path, "a")
        write_one(path, "b")
        with begin(path) as book:
            for name in ended:
                book.open_program(name, "abc".index(name), {"question": "where?"})
                book.close_program(name, {"answer": path.name}, None)
    with begin(parts[0]) as book:
        book.open_program("c", 2, {"question": "where?"})
        book.close_program("c", {"passages": ["p"]}, "busy")  # A part of its result.
    merge_journals(parts, tmp_path / JOURNAL)
    records = read_records(tmp_path / JOURNAL)
    merged = {r.id: (r.outcome, r.error) for r in records}
    answers = {name: ({"answer": path.name}, None) for name, path in zip("ab", parts, strict=True)}
    assert merged == {**answers, "c": answers["b"]}
    with JournalReader(tmp_path / JOURNAL) as book:
        assert book.totals().calls == 2


def test_journal_path_changed_process_count_is_rejected(tmp_path):
    assert journal_path(tmp_path, 0, 1) == tmp_path / "journal.sqlite"
    (tmp_path / "journal.1-of-2.sqlite").touch()
    (tmp_path / "journal.sqlite").touch()  # merged
    journal_path(tmp_path, 1, 2)
    for count in (1, 3):
        with pytest.raises(UserError, match=f"started by 2 processes, not {count}; resume it"):
            journal_path(tmp_path, 0, count)
