"""Journals, response caches and triple stores with other bytes, and with other values in them."""

import contextlib
import pathlib
import sqlite3

import pytest

from cirag_jax.errors import UserError
from cirag_jax.llm.types import Generate, Generated, Message, Token, Usage
from cirag_jax.reports import trace
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import (
    JournalReader,
    RequestKey,
    check_settings,
    read_passages,
    read_records,
    read_settings,
)
from cirag_jax.runtime.requests import Retrieve, Retrieved
from cirag_jax.runtime.store import Journal, ResponseCache
from cirag_jax.triples.store import FILE, Record, TripleStore, content_hash
from cirag_jax.types import Triple
from tests.attacks.hostile import CORRUPTIONS, MUTATIONS, attack, attempt, corrupt, mutate_json, st
from tests.reports import made_up

SETTINGS = {"method": "m", "seed": 0}
ASKED = Generate((Message("user", "who?"),), "reader")
FOUND = Generated("Ada", "stop", Usage(7, 2, 3), tokens=(Token("Ada", 5, -0.5),))
LOOKED = Retrieve("who?", 2)
PASSAGES = tuple(made_up.PASSAGES.values())[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a journal, a store, a cache and an empty subfolder."""
    root = tmp_path_factory.mktemp("whole")
    with Journal(root / "journal.sqlite", SETTINGS) as book:
        for name in ("a", "b"):
            book.open_program(name, 0, {"question": "who?", "answers": ["Ada"]})
            book.record(RequestKey(name, 0), ASKED, FOUND)
            book.record(RequestKey(name, 1), LOOKED, Retrieved(PASSAGES, (0.5, 0.25)))
        book.close_program("a", codec.encode(made_up.PREDICTION), None, 1.5)
        book.add_seconds(2.0)
        book.open_program("gone", 2, {})
        book.forget(["gone"])
    with TripleStore.create(root / FILE) as store:
        triples = (Triple("Ada", "born in", "London", PASSAGES[0].id, 0),)
        extracted = Record(PASSAGES[0].id, content_hash(PASSAGES[0]), triples)
        failed = Record(PASSAGES[1].id, content_hash(PASSAGES[1]), None, "why", {"no_json": 1})
        store.commit([extracted, failed], {"model": "m"})
        store.set_run_counts({"left": 0})
    cache = ResponseCache(root / "cache.sqlite")
    cache.keep("m", ASKED, FOUND)
    cache._db.execute("PRAGMA journal_mode = DELETE")
    cache.close()
    (root / "work").mkdir()
    return root


def _value(path: pathlib.Path, name: str):
    with JournalReader(path) as book:
        return getattr(book, name)


def _totals(path: pathlib.Path):
    with JournalReader(path) as book:
        return book.totals(), book.seconds


def _use_journal(path: pathlib.Path) -> None:
    """Calls everything that reads a journal, and resumes its run."""
    for read in (
        read_records,
        read_passages,
        read_settings,
        _totals,
        lambda path: _value(path, "load_seconds"),
        lambda path: _value(path, "is_sampled"),
    ):
        attempt(lambda read=read: read(path))
    attempt(lambda: check_settings(path, SETTINGS))
    page = path.with_name("trace.html")
    attempt(lambda: trace.write_trace(path, page))
    assert [p for p in path.parent.iterdir() if p.name.endswith((".part", ".old"))] == []

    def go_on():
        with Journal(path, SETTINGS) as book:
            for name in ("a", "b", "c"):
                book.open_program(name, 0, {"question": "who?", "answers": ["Ada"]})
                response = book.replay(RequestKey(name, 0), ASKED)
                assert response is None or isinstance(response, Generated | Exception)
                book.replay(RequestKey(name, 1), LOOKED)
                book.record(RequestKey(name, 2), ASKED, FOUND)
                book.close_program(name, {"answer": "x"}, None)
            book.add_seconds(1.0)
            assert book.outcomes() and list(book.records()) and book.totals()
            book.forget(["a"])

    attempt(go_on)


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
            response = cache.find("m", ASKED)
            assert response is None or isinstance(response, Generated)
            cache.keep("m", ASKED, FOUND)
        finally:
            cache.close()

    attempt(use)


USES = {"journal.sqlite": _use_journal, FILE: _use_store, "cache.sqlite": _use_cache}


def _fresh(folder: pathlib.Path, name: str, content: bytes) -> pathlib.Path:
    for path in (folder / "work").iterdir():
        path.unlink()
    path = folder / "work" / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", USES)
@attack(12, CORRUPTIONS)
def test_corrupt_bytes(folder, name, damages):
    content = (folder / name).read_bytes()
    USES[name](_fresh(folder, name, corrupt(content, damages)))


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
    path = _fresh(folder, name, (folder / name).read_bytes())
    db = sqlite3.connect(path)
    rows = db.execute(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL").fetchall()
    (text,) = rows[row % len(rows)]
    try:
        value = made_up.json.loads(text)
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
    with pytest.raises(UserError, match="another version"):
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
    path = _fresh(folder, "journal.sqlite", (folder / "journal.sqlite").read_bytes())
    db = sqlite3.connect(path)
    db.execute(statement, values)
    db.commit()
    db.close()
    reads = (read_records, read_settings, _totals, read_passages)
    results = [attempt(lambda read=read: read(path)) for read in reads]
    assert None in results  # at least one reader rejects it
    _use_journal(path)


def test_damaged_cached_response_is_missing(folder):
    path = _fresh(folder, "cache.sqlite", (folder / "cache.sqlite").read_bytes())
    cache = ResponseCache(path)
    assert cache.find("m", ASKED) is not None
    half = codec.dump(codec.encode(FOUND)).replace(FOUND.text, r"\ud800")
    for damage in ("{", "{}", '{"error": "x"}', "[" * 100_000, b"\x80{}", "\0", half):
        cache._db.execute("UPDATE responses SET response = CAST(? AS TEXT)", (damage,))
        assert cache.find("m", ASKED) is None
    cache.keep("m", ASKED, FOUND)
    response = cache.find("m", ASKED)
    assert isinstance(response, Generated) and response.text == FOUND.text
    cache.close()
