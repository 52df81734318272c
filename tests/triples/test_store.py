"""The triple store: reading, writing, merging, damaged files."""

import os
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.errors import UserError
from cirag_jax.triples.store import FILE, Record, TripleStore, content_hash, merge
from cirag_jax.types import Passage, Triple

MODEL = {"model": "m", "prompt": "1"}
OTHER = {"model": "n", "prompt": "1"}


def passage(name, text="text"):
    return Passage(name, f"title {name}", text)


def ok(name, count=2, text="text"):
    triples = tuple(
        Triple(f"{name} é", f"relation {i}", text, name, None if i == 1 else i)
        for i in range(count)
    )
    return Record(name, content_hash(passage(name, text)), triples)


def empty(name):
    return Record(name, content_hash(passage(name)), (), parse_errors={"entities: cut": 2})


def failed(name, cause="request: timed out after 12 s"):
    return Record(name, content_hash(passage(name)), None, cause)


def content(path):
    with TripleStore.open(path) as store:
        ids = list(store.passage_ids())
        return store.triples(ids), [store.entry(name) for name in ids]


@pytest.fixture
def path(tmp_path):
    """A store with passages of every status, one of them replaced and one deleted."""
    with TripleStore.create(tmp_path / FILE) as store:
        store.commit([ok("b"), empty("e"), ok("a", 3)], MODEL)
        store.commit([failed("f"), ok("c", 1), ok("a", 2, "new")], MODEL, ["b", "unknown"])
    return tmp_path / FILE


def test_store_round_trip(path):
    with TripleStore.open(path) as store:
        assert store.triples(["c", "a", "e", "f", "b", "never"]) == {
            "c": ok("c", 1).triples,
            "a": ok("a", 2, "new").triples,
            "e": (),
            "f": None,
            "b": None,
            "never": None,
        }
        entries = [store.entry(name) for name in "aefb"]
        assert [e and e.status for e in entries] == ["ok", "empty", "failed", None]
        assert entries[0] == (content_hash(passage("a", "new")), MODEL, "ok", None)
        assert len(store) == 4 and list(store.passage_ids()) == ["a", "c", "e", "f"]
        assert store.counts() == {"ok": 2, "empty": 1, "failed": 1, "triples": 3}
        assert store.failures() == {"request: timed out after # s": 1}
        assert store.parse_errors() == {"entities: cut": 2}
    with TripleStore.open(path.parent) as store:  # The workdir that contains the store.
        assert store.counts()["ok"] == 2


def test_store_empty_store_has_zero_counts(tmp_path):
    with TripleStore.create(tmp_path / FILE) as store:
        assert store.counts() == {"ok": 0, "empty": 0, "failed": 0, "triples": 0}
        assert store.triples([]) == {} and store.failures() == {} and len(store) == 0


def test_store_hostile_text_round_trip(tmp_path):
    texts = ("'); DROP TABLE passages; --", "a\x00b\x1f", "𝔘\u202e\u2028", '"],["', "x" * 70_000)
    triples = tuple(Triple(text, text, text, "'\"\x00%", 0) for text in texts)
    with TripleStore.create(tmp_path / FILE) as store:
        store.commit([Record("'\"\x00%", bytes(16), triples)], MODEL)
        assert store.triples(["'\"\x00%"]) == {"'\"\x00%": triples}


def test_check_corpus_changed_passage_is_refused(path):
    with TripleStore.open(path) as store:
        fine = [passage("a", "new"), passage("c"), passage("never")]
        store.check_corpus(fine)
        for changed in (
            passage("a", "text"),
            Passage("c", "other", "text"),
            Passage("c", "title c", "text", ("te", "xt")),
        ):
            with pytest.raises(UserError, match=f"older than its corpus: passage '{changed.id}'"):
                store.check_corpus([*fine, changed])


def test_digest_depends_only_on_its_passages(path):
    def commit(*records, deleted=()):
        with TripleStore.create(path) as store:
            store.commit(records, MODEL, deleted)
            return store.digest("acef")

    first = commit()
    assert commit(ok("z")) == first  # The passage is not in the digest.
    assert commit(failed("f", "answer: cut")) == first  # The passage still has no triples.
    assert commit(deleted=["f"]) == first
    seen = {first, commit(empty("f")), commit(ok("f", 2)), commit(ok("f", 3))}
    seen.add(commit(deleted=["c"]))
    assert len(seen) == 5


def test_record_contradictory_fields_are_refused():
    for triples, cause in ((None, None), ((), "cut"), (ok("b").triples, None)):
        with pytest.raises(ValueError):
            Record("a", bytes(16), triples, cause)


_NAMES = st.sampled_from("abcdefgh")
_RECORDS = st.lists(
    st.tuples(_NAMES, st.integers(-1, 3)), max_size=4, unique_by=lambda pair: pair[0]
)


@given(st.lists(st.tuples(_RECORDS, st.sets(_NAMES, max_size=2)), max_size=6))
@settings(max_examples=15, deadline=None)
def test_store_any_history_equals_a_dictionary(tmp_path_factory, commits):
    model: dict[str, Record] = {}
    with TripleStore.create(tmp_path_factory.mktemp("store") / FILE) as store:
        for version, (records, deleted) in enumerate(commits):
            made = [
                failed(name) if n < 0 else ok(name, n, f"v{version}") if n else empty(name)
                for name, n in records
            ]
            store.commit(made, MODEL, deleted)
            model |= {record.id: record for record in made}
            model = {name: record for name, record in model.items() if name not in deleted}
            expected = {name: record.triples for name, record in model.items()}
            assert store.triples("abcdefgh") == {**dict.fromkeys("abcdefgh"), **expected}
            assert list(store.passage_ids()) == sorted(model)


def test_store_several_extractors(path):
    with TripleStore.create(path) as store:
        store.commit([ok("x")], OTHER)
    with TripleStore.open(path) as store:
        made_by = {name: entry.extractor for name in "ax" if (entry := store.entry(name))}
        assert made_by == {"a": MODEL, "x": OTHER}


def test_merge_stores_of_several_processes(path, tmp_path):
    with TripleStore.create(tmp_path / "other.sqlite") as store:
        store.commit([ok("y"), failed("z")], OTHER)
    for _ in range(2):  # The second merge replaces the first.
        merge([path, tmp_path / "other.sqlite"], tmp_path / "all.sqlite")
        (triples, entries), (more, other) = content(path), content(tmp_path / "other.sqlite")
        assert content(tmp_path / "all.sqlite") == ({**triples, **more}, [*entries, *other])


def test_store_reader_next_to_a_writer(path):
    with TripleStore.open(path) as reader, TripleStore.create(path) as writer:
        writer.commit([ok("z")], MODEL)
        assert reader.triples("az") == {"a": ok("a", 2, "new").triples, "z": ok("z").triples}
        with pytest.raises(UserError, match="readonly"):
            reader.commit([ok("y")], MODEL)


_KILLED_WHILE_WRITING = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
db.execute("DELETE FROM passages")
for i in range(3000):
    db.execute("INSERT INTO extractors VALUES (?, 'x')", (str(i),))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_store_reader_rolls_back_a_killed_writer(path):
    before = path.read_bytes()
    subprocess.run([sys.executable, "-c", _KILLED_WHILE_WRITING, str(path)], check=False)
    assert path.read_bytes() != before and path.with_name(f"{FILE}-journal").exists()
    with TripleStore.open(path) as store:
        assert len(store) == 4 and store.triples(["c"])["c"] == ok("c", 1).triples
    assert path.read_bytes() == before


def test_store_of_killed_writer_is_readable_on_read_only_disk(path, monkeypatch):
    """Reading does not change the store's files."""
    before = content(path)
    subprocess.run([sys.executable, "-c", _KILLED_WHILE_WRITING, str(path)], check=False)
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    assert len(files) == 2
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert content(path) == before
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == files


@pytest.mark.parametrize("damage", ["missing", "cut", "zeros", "text", "other"])
def test_store_damaged_file_is_named(path, damage):
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        path.unlink()
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE meta (key, value)")
        db.close()
    else:
        new = {"cut": whole[: len(whole) // 2], "zeros": bytes(len(whole)), "text": b"{}"}
        path.write_bytes(new[damage])
    with pytest.raises(UserError, match=f"{FILE}.*(cannot be used|a different version|create it)"):
        content(path)


@pytest.mark.parametrize("text", ["", "[[1]]", '[["a", "b", "c"]]', '[["a", "b", "c", "d"]]'])
def test_store_damaged_row_is_named(path, text):
    with sqlite3.connect(path) as db:
        db.execute("UPDATE passages SET triples = ? WHERE id = 'a'", (text,))
    db.close()
    with TripleStore.open(path) as store, pytest.raises(UserError, match="damaged .passage 'a'"):
        store.triples(["a"])


def test_store_of_arrow_segments_is_refused(tmp_path):
    old = tmp_path / "triples"
    (old / "segments").mkdir(parents=True)
    (old / "index.sqlite").write_bytes(b"")
    for use in (
        lambda: TripleStore.open(tmp_path),
        lambda: TripleStore.open(old),
        lambda: TripleStore.create(tmp_path / FILE),
    ):
        with pytest.raises(UserError, match="earlier version; extract .* launch/extract.py"):
            use()
    assert not (tmp_path / FILE).exists()


def test_open_expands_the_home_folder(path, monkeypatch):
    monkeypatch.setenv("HOME", str(path.parent))
    with TripleStore.open("~") as store, TripleStore.open(f"~/{path.name}") as same:
        assert len(store) == len(same) > 0


def test_open_missing_store_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no triple store"):
        TripleStore.open(tmp_path)


def test_full_disk_keeps_the_progress(path):
    before = content(path)
    with TripleStore.create(path) as store:
        # A limit of SQLite replaces a full disk.
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        many = [ok(f"x{i}", 1) for i in range(2000)]
        with pytest.raises(UserError, match="the disk is full; progress is saved"):
            store.commit(many, MODEL, ["a"])
        assert content(path) == before
        store._db.execute("PRAGMA max_page_count = 100000")
        store.commit(many, MODEL)
        assert store.counts()["ok"] == 2002


def test_store_second_writer_is_refused(path, monkeypatch):
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **{**k, "timeout": 0}))
    with TripleStore.create(path) as one, TripleStore.create(path) as two:
        one._db.execute("BEGIN IMMEDIATE")
        with pytest.raises(UserError, match="in use by another run"):
            two.commit([ok("y")], MODEL)
