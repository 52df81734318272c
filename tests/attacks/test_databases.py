"""Journals, response caches and triple stores with corrupt bytes or changed values."""

import contextlib
import json
import pathlib
import sqlite3

import pytest

from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generate, Generated, Message, Token, Usage
from cirag_jax.reports import trace
from cirag_jax.runtime import codec, records
from cirag_jax.runtime.records import JournalReader, RequestKey
from cirag_jax.runtime.requests import Retrieve, Retrieved
from cirag_jax.runtime.store import Journal, ResponseCache
from cirag_jax.triples.store import FILE, Record, TripleStore, content_hash
from cirag_jax.types import Triple
from tests.attacks.hostile import CORRUPTIONS, MUTATIONS, attack, attempt, corrupt, mutate_json, st
from tests.reports import made_up

SETTINGS = {"method": "m", "seed": 0}
REQUEST = Generate((Message("user", "who?"),), "reader")
RESPONSE = Generated("Ada", "stop", Usage(7, 2, 3), tokens=(Token("Ada", 5, -0.5),))
RETRIEVAL = Retrieve("who?", 2)
PASSAGES = tuple(made_up.PASSAGES.values())[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a journal, a store, a cache and an empty subfolder."""
    root = tmp_path_factory.mktemp("whole")
    with Journal(root / "journal.sqlite", SETTINGS) as journal:
        for name in ("a", "b"):
            journal.open_program(name, 0, {"question": "who?", "answers": ["Ada"]})
            journal.record(RequestKey(name, 0), REQUEST, RESPONSE)
            journal.record(RequestKey(name, 1), RETRIEVAL, Retrieved(PASSAGES, (0.5, 0.25)))
        journal.close_program("a", codec.encode(made_up.PREDICTION), None, 1.5)
        journal.add_seconds(2.0)
        journal.open_program("gone", 2, {})
        journal.forget(["gone"])
    with TripleStore.create(root / FILE) as store:
        triples = (Triple("Ada", "born in", "London", PASSAGES[0].id, 0),)
        extracted = Record(PASSAGES[0].id, content_hash(PASSAGES[0]), triples)
        failed = Record(PASSAGES[1].id, content_hash(PASSAGES[1]), None, "why", {"no_json": 1})
        store.commit([extracted, failed], {"model": "m"})
        store.set_run_counts({"left": 0})
    cache = ResponseCache(root / "cache.sqlite")
    cache.keep("m", REQUEST, RESPONSE)
    cache._db.execute("PRAGMA journal_mode = DELETE")
    cache.close()
    (root / "work").mkdir()
    return root


def _value(path: pathlib.Path, name: str):
    with JournalReader(path) as journal:
        return getattr(journal, name)


def _totals(path: pathlib.Path):
    with JournalReader(path) as journal:
        return journal.totals(), journal.seconds


def _use_journal(path: pathlib.Path) -> None:
    """Calls all functions that read a journal, and resumes its run."""
    for read in (
        records.read_records,
        records.read_passages,
        records.read_settings,
        _totals,
        lambda path: _value(path, "load_seconds"),
        lambda path: _value(path, "is_sampled"),
    ):
        attempt(lambda read=read: read(path))
    attempt(lambda: records.check_settings(path, SETTINGS))
    page = path.with_name("trace.html")
    attempt(lambda: trace.write_trace(path, page))
    assert [p for p in path.parent.iterdir() if p.name.endswith((".part", ".old"))] == []

    def resume():
        with Journal(path, SETTINGS) as journal:
            for name in ("a", "b", "c"):
                journal.open_program(name, 0, {"question": "who?", "answers": ["Ada"]})
                response = journal.replay(RequestKey(name, 0), REQUEST)
                assert response is None or isinstance(response, Generated | Exception)
                journal.replay(RequestKey(name, 1), RETRIEVAL)
                journal.record(RequestKey(name, 2), REQUEST, RESPONSE)
                journal.close_program(name, {"answer": "x"}, None)
            journal.add_seconds(1.0)
            assert journal.outcomes() and list(journal.records()) and journal.totals()
            journal.forget(["a"])

    attempt(resume)


def _use_store(path: pathlib.Path) -> None:
    ids = [passage.id for passage in PASSAGES]

    def read():
        with TripleStore.open(path) as store:
            assert len(store) == len(list(store.passage_ids()))
            assert store.digest(ids)
            for name in ids:
                store.entry(name)
            for read in (store.counts, store.failures, store.parse_errors, store.run_counts):
                assert isinstance(read(), dict)
            store.triples(ids)
            store.check_corpus(PASSAGES)

    attempt(read)

    def write():
        with TripleStore.create(path) as store:
            store.commit([Record("new", b"h" * 16, ())], {"model": "n"}, ids)
            store.set_run_counts({"left": 1})

    attempt(write)


def _use_cache(path: pathlib.Path) -> None:
    def use():
        cache = ResponseCache(path)
        try:
            response = cache.find("m", REQUEST)
            assert response is None or isinstance(response, Generated)
            cache.keep("m", REQUEST, RESPONSE)
        finally:
            cache.close()

    attempt(use)


USES = {"journal.sqlite": _use_journal, FILE: _use_store, "cache.sqlite": _use_cache}


def _copy_to_work(folder: pathlib.Path, name: str, content: bytes) -> pathlib.Path:
    for path in (folder / "work").iterdir():
        path.unlink()
    path = folder / "work" / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", USES)
@attack(12, CORRUPTIONS)
def test_corrupt_bytes(folder, name, damages):
    content = (folder / name).read_bytes()
    USES[name](_copy_to_work(folder, name, corrupt(content, damages)))


# Columns with JSON or numbers.
COLUMNS = (
    *(("journal.sqlite", "meta", "value"), ("journal.sqlite", "passages", "record")),
    *(("journal.sqlite", "programs", "input"), ("journal.sqlite", "programs", "outcome")),
    *(("journal.sqlite", "responses", "request"), ("journal.sqlite", "responses", "response")),
    *((FILE, "passages", "triples"), (FILE, "passages", "parse_errors")),
    *((FILE, "extractors", "identity"), (FILE, "passages", "cause")),
    ("cache.sqlite", "responses", "response"),
)


@pytest.mark.parametrize(("name", "table", "column"), COLUMNS)
@attack(8, MUTATIONS, st.integers(0, 3))
def test_mutated_values(folder, name, table, column, changes, row):
    path = _copy_to_work(folder, name, (folder / name).read_bytes())
    db = sqlite3.connect(path)
    rows = db.execute(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL").fetchall()
    (text,) = rows[row % len(rows)]
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    other = mutate_json(value, changes).decode("utf-8", "replace")
    db.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (other, text))
    db.commit()
    db.close()
    USES[name](path)


@pytest.mark.parametrize("use", [TripleStore.open, TripleStore.create, ResponseCache])
def test_not_a_database_is_rejected_and_closed(tmp_path, use):
    (tmp_path / "x.sqlite").write_bytes(b"no database")
    with pytest.raises(UserError, match="cannot be used"):
        use(tmp_path / "x.sqlite")


@pytest.mark.parametrize("use", [TripleStore.open, TripleStore.create])
def test_other_database_is_rejected_and_closed(tmp_path, use):
    with contextlib.closing(sqlite3.connect(tmp_path / "x.sqlite")) as db:
        db.execute("CREATE TABLE meta (key, value)")
    with pytest.raises(UserError, match="a different version"):
        use(tmp_path / "x.sqlite")


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("UPDATE programs SET outcome = '[[x'", ()),
        ("UPDATE responses SET response = '[]'", ()),
        ('UPDATE responses SET response = \'{"usage": {"x": 1}}\'', ()),
        ('UPDATE responses SET response = \'{"usage": {"seconds": NaN}}\'', ()),
        ('UPDATE responses SET request = \'{"kind": "zz"}\'', ()),
        ("UPDATE meta SET value = '[' WHERE key = 'settings'", ()),
        ("UPDATE meta SET value = ? WHERE key = 'seconds'", ("soon",)),
        ("UPDATE meta SET value = ? WHERE key = 'forgotten'", ("[" * 100_000,)),
        ("UPDATE passages SET record = '{}'", ()),
    ],
)
def test_malformed_value_is_named(folder, statement, values):
    path = _copy_to_work(folder, "journal.sqlite", (folder / "journal.sqlite").read_bytes())
    db = sqlite3.connect(path)
    db.execute(statement, values)
    db.commit()
    db.close()
    reads = (records.read_records, records.read_settings, _totals, records.read_passages)
    results = [attempt(lambda read=read: read(path)) for read in reads]
    assert None in results  # at least one reader rejects it
    _use_journal(path)


def test_damaged_cached_response_is_missing(folder):
    path = _copy_to_work(folder, "cache.sqlite", (folder / "cache.sqlite").read_bytes())
    cache = ResponseCache(path)
    assert cache.find("m", REQUEST) is not None
    half = codec.dump(codec.encode(RESPONSE)).replace(RESPONSE.text, r"\ud800")
    for damage in ("{", "{}", '{"error": "x"}', "[" * 100_000, b"\x80{}", "\0", half):
        cache._db.execute("UPDATE responses SET response = CAST(? AS TEXT)", (damage,))
        assert cache.find("m", REQUEST) is None
    cache.keep("m", REQUEST, RESPONSE)
    response = cache.find("m", REQUEST)
    assert isinstance(response, Generated) and response.text == RESPONSE.text
    cache.close()
