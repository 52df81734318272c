"""The triple store: what goes in comes out, whatever happens to it meanwhile."""

import errno
import json
import pathlib
import shutil
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.errors import UserError
from cirag_jax.triples import embeddings, segments
from cirag_jax.triples.store import TripleStore, content_hash
from cirag_jax.triples.store_writer import Record, StoreWriter
from cirag_jax.types import Passage, Triple

MODEL = {"model": "m", "prompt": "1"}
OTHER = {"model": "n", "prompt": "1"}


def passage(name, text="text"):
    return Passage(name, f"title {name}", text)


def ok(name, count=2, text="text", extractor=MODEL):
    triples = tuple(
        Triple(f"{name} é", f"relation {i}", text, name, None if i == 1 else i)
        for i in range(count)
    )
    return Record(name, content_hash(passage(name, text), extractor), "ok", triples)


def empty(name):
    return Record(name, content_hash(passage(name), MODEL), "empty", problems={"entities: cut": 2})


def failed(name, cause="request: timed out after 12 s"):
    return Record(name, content_hash(passage(name), MODEL), "failed", cause=cause)


def files(folder: pathlib.Path):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def folder(tmp_path):
    """A store of two segments, with every status, a replaced and a deleted passage."""
    with StoreWriter.open(tmp_path / "triples") as store:
        store.commit([ok("b"), empty("e"), ok("a", 3)], MODEL)
        store.commit([failed("f"), ok("c", 1), ok("a", 2, "new")], MODEL, deleted=["b", "unknown"])
    return tmp_path / "triples"


# --------------------------------------------------------------------------------- reading, writing


def test_what_goes_in_comes_out(folder):
    with TripleStore.open(folder) as store:
        assert store.triples(["c", "a", "e", "f", "b", "never"]) == {
            "c": ok("c", 1).triples,
            "a": ok("a", 2, "new").triples,
            "e": (),
            "f": None,
            "b": None,
            "never": None,
        }
        assert [store.status(name) for name in "aefb"] == ["ok", "empty", "failed", None]
        assert len(store) == 4 and list(store.passage_ids()) == ["a", "c", "e", "f"]
        assert store.counts() == {"ok": 2, "empty": 1, "failed": 1, "triples": 3}
        assert store.failures() == {"request: timed out after # s": 1}
        assert store.problems() == {"entities: cut": 2}
        assert store.extractor(store.entries(["a"])["a"]) == MODEL
        store.verify()
    with TripleStore.open(folder.parent) as store:  # the workdir around it
        assert store.status("a") == "ok"


def test_tombstones_mark_dead_rows(folder):
    with TripleStore.open(folder) as store:
        first, second = store.segments()
        assert store.live_rows(first.id).tolist() == [False] * 5
        assert store.live_rows(second.id).tolist() == [True] * 3
        assert store.segment(first.id).triples(0, 2) == ok("b").triples


def test_a_corpus_that_has_changed_is_refused(folder):
    with TripleStore.open(folder) as store:
        fine = [passage("a", "new"), passage("c"), passage("never")]
        store.check_corpus(fine)
        for changed in (
            passage("a", "text"),
            Passage("c", "other", "text"),
            Passage("c", "title c", "text", ("te", "xt")),
        ):
            with pytest.raises(UserError, match=f"older than its corpus: passage '{changed.id}'"):
                store.check_corpus([*fine, changed])


def test_the_digest_changes_with_the_triples_of_its_passages_and_no_others(folder):
    def digest(names="acef"):
        with TripleStore.open(folder) as store:
            return store.digest(names)

    def commit(*records, **fields):
        with StoreWriter.open(folder) as store:
            store.commit(records, MODEL, **fields)
        return digest()

    first = digest()
    assert len({first, digest("ace"), digest("caef"), digest("acex")}) == 4
    assert commit(ok("z")) == first  # a passage that is not asked for
    assert commit(failed("f", "answer: cut")) == first  # it gives no triples now as then
    assert commit(deleted=["f"]) == first
    seen = {first, commit(empty("f")), commit(ok("f", 2)), commit(ok("f", 3))}
    # The same text, model and number of triples, but another answer: a server is no function.
    other = ok("f", 3)
    seen.add(commit(Record("f", other.hash, "ok", (*other.triples[:2], other.triples[0]))))
    seen.add(commit(deleted=["c"]))
    assert len(seen) == 6


def test_records_that_contradict_themselves_are_refused():
    digest = content_hash(passage("a"), MODEL)
    for fields in (
        {"status": "ok"},
        {"status": "failed"},
        {"status": "empty", "cause": "x"},
        {"status": "empty", "triples": ok("a").triples},
        {"status": "ok", "triples": ok("b").triples},
    ):
        with pytest.raises(ValueError):
            Record("a", digest, **fields)


_NAMES = st.sampled_from("abcdefgh")
_COMMITS = st.lists(
    st.tuples(
        st.lists(st.tuples(_NAMES, st.integers(-1, 3)), max_size=4, unique_by=lambda pair: pair[0]),
        st.sets(_NAMES, max_size=2),
    ),
    max_size=6,
)


def _record(name, count, version):
    if count < 0:
        return failed(name)
    return ok(name, count, f"v{version}") if count else empty(name)


@given(_COMMITS)
@settings(max_examples=15, deadline=None)
def test_any_history_reads_like_a_dictionary(tmp_path_factory, commits):
    folder = tmp_path_factory.mktemp("store")
    model: dict[str, Record] = {}
    with StoreWriter.open(folder / "s") as store:
        for version, (records, deleted) in enumerate(commits):
            made = [_record(name, count, version) for name, count in records]
            store.commit(made, MODEL, deleted)
            model = {name: record for name, record in model.items() if name not in deleted}
            model |= {record.id: record for record in made}
            expected = {n: None if r.status == "failed" else r.triples for n, r in model.items()}
            assert store.triples("abcdefgh") == {**dict.fromkeys("abcdefgh"), **expected}
            live = sum(int(store.live_rows(s.id).sum()) for s in store.segments())
            assert live == store.counts()["triples"] == sum(len(r.triples) for r in model.values())
        store.compact(rows_per_segment=4)
        assert {n: store.status(n) for n in "abcdefgh" if store.status(n)} == {
            n: r.status for n, r in model.items()
        }
        assert all(store.live_rows(s.id).all() for s in store.segments())
    # From scratch, in another order, compacted: the same bytes.
    with StoreWriter.open(folder / "t") as store:
        for name in sorted(model, reverse=True):
            store.commit([model[name]], MODEL)
        store.compact(rows_per_segment=4)
    if model:
        assert files(folder / "s") == files(folder / "t")


def test_compaction_keeps_everything_alive(folder):
    with TripleStore.open(folder) as store:
        before = store.triples("abcef"), store.counts(), store.failures(), store.problems()
    with StoreWriter.open(folder) as store:
        store.compact()
        assert (store.triples("abcef"), store.counts(), store.failures(), store.problems()) == (
            before
        )
        assert len(store.segments()) == 1
        store.commit([ok("z")], MODEL)  # and it can be written to
        store.verify()
    assert len(list((folder / "segments").iterdir())) == 2
    with TripleStore.open(folder) as store:
        assert store.status("z") == "ok" and store.triples(["a"])["a"] == ok("a", 2, "new").triples


def test_several_extractors(folder):
    with StoreWriter.open(folder) as store:
        store.commit([ok("x", extractor=OTHER)], OTHER)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["extractors"] == [MODEL, OTHER] and manifest["format"] == 1
    with StoreWriter.open(folder) as store:
        store.delete(["a", "c", "e", "f"])
        store.compact()
        assert store.extractor(store.entries(["x"])["x"]) == OTHER
        store.check_corpus([passage("x")])
    assert json.loads((folder / "manifest.json").read_text())["extractors"] == [OTHER]


def test_a_reader_beside_a_writer(folder):
    with TripleStore.open(folder) as reader, StoreWriter.open(folder) as writer:
        writer.commit([ok("z")], MODEL)
        assert reader.triples(["a"])["a"] == ok("a", 2, "new").triples
    with TripleStore.open(folder) as reader:
        assert reader.status("z") == "ok"


def test_two_writers_are_found_out(folder):
    with StoreWriter.open(folder) as one, StoreWriter.open(folder) as two:
        one.commit([ok("x")], MODEL)
        with pytest.raises(UserError, match="changed by another process"):
            two.commit([ok("y")], MODEL)


def test_what_a_killed_writer_left_is_removed(folder):
    before = files(folder)
    orphans = ("segments/0.arrow", "segments/.x.arrow.7.part", ".index.sqlite.part")
    for name in orphans:
        (folder / name).write_bytes(b"half")
    StoreWriter.open(folder).close()
    assert files(folder) == before


_KILLED_WHILE_WRITING = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
db.execute("DELETE FROM passages")
for i in range(3000):
    db.execute("INSERT INTO tombstones VALUES (9, ?, 1)", (i,))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_undoes_what_a_killed_writer_left(folder):
    index = folder / "index.sqlite"
    before = index.read_bytes()
    subprocess.run([sys.executable, "-c", _KILLED_WHILE_WRITING, str(index)], check=False)
    assert index.read_bytes() != before and (folder / "index.sqlite-journal").exists()
    with TripleStore.open(folder) as store:
        assert len(store) == 4 and store.triples(["c"])["c"] == ok("c", 1).triples
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store._db.execute("DELETE FROM passages")
    assert index.read_bytes() == before


# ---------------------------------------------------------------------------------- damage, no room


def _damage(folder, name, how):
    path = sorted(folder.glob(name))[0]
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "zeros":
        path.write_bytes(bytes(len(content)))
    elif how == "text":
        path.write_text("{}")


@pytest.mark.parametrize("how", ["missing", "cut", "zeros", "text"])
@pytest.mark.parametrize("name", ["manifest.json", "index.sqlite", "segments/*.arrow"])
def test_damaged_files_are_named(folder, name, how):
    _damage(folder, name, how)
    with pytest.raises(UserError, match="damaged|no triple store"), TripleStore.open(folder) as s:
        for info in s.segments():
            s.segment(info.id).triples(0, info.num_rows)


def test_flipped_bytes_are_found(folder):
    path = sorted((folder / "segments").iterdir())[0]
    content = bytearray(path.read_bytes())
    place = content.index(b"relation 0")
    content[place : place + 2] = b"\xff\xfe"
    path.write_bytes(bytes(content))
    with TripleStore.open(folder) as store:
        with pytest.raises(UserError, match=f"{path.name} is damaged"):
            store.verify()
        with pytest.raises(UserError, match="is damaged"):
            for info in store.segments():
                store.segment(info.id).triples(0, info.num_rows)


def test_another_store_s_segment_is_found(folder):
    path = sorted((folder / "segments").iterdir())[0]
    path.write_bytes(segments.encode_segment([("a", ok("a", 9).triples)]))
    with pytest.raises(UserError, match=rf"{path.name} is damaged \(it has \d+ bytes, not"):
        TripleStore.open(folder)


def test_a_segment_with_other_rows_is_found(folder):
    db = sqlite3.connect(folder / "index.sqlite")
    db.execute("UPDATE segments SET num_rows = num_rows + 1")
    db.commit()
    db.close()
    with TripleStore.open(folder) as store, pytest.raises(UserError, match="rows, not"):
        store.triples(["a"])


def test_rows_of_another_passage_are_found(folder):
    db = sqlite3.connect(folder / "index.sqlite")
    db.execute("UPDATE passages SET first = 0 WHERE id = 'a'")
    db.commit()
    db.close()
    with TripleStore.open(folder) as store, pytest.raises(UserError, match="rows of 'a'"):
        store.triples(["a"])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("format", 2, "format 2"), ("kind", "an index", "describes an index"), (None, 0, "damaged")],
)
def test_another_format_is_refused(folder, field, value, message):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, field: value} if field else [1]))
    for kind in (TripleStore, StoreWriter):
        with pytest.raises(UserError, match=message):
            kind.open(folder)


def test_no_store(tmp_path):
    with pytest.raises(UserError, match="holds no triple store"):
        TripleStore.open(tmp_path)


def test_a_full_disk_loses_nothing(folder, monkeypatch):
    before = files(folder)
    with StoreWriter.open(folder) as store:
        with monkeypatch.context() as patch:

            def full(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(segments.os, "fsync", full)
            with pytest.raises(UserError, match="the disk is full; what is recorded is kept"):
                store.commit([ok("x")], MODEL)
            assert files(folder) == before
        # The index cannot grow: SQLite's own limit stands for the disk's.
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        many = [ok(f"x{i}", 1) for i in range(2000)]
        with pytest.raises(UserError, match="the disk is full; what is recorded is kept"):
            store.commit(many, MODEL)
        assert store.counts()["ok"] == 2 and store.status("x1") is None
        store._db.execute("PRAGMA max_page_count = 100000")
        store.commit(many, MODEL)
        assert store.counts()["ok"] == 2002
        store.verify()


# --------------------------------------------------------------------------------------- embeddings

ENCODER = {"model": "e", "dimension": 3}


def encode(texts):
    return np.array([[len(t), t.count("0"), 1] for t in texts], np.float32)


def text(triple):
    return f"{triple.head} {triple.relation} {triple.tail}"


def test_embeddings_follow_the_rows(folder):
    with StoreWriter.open(folder) as store:
        (first, second), calls = store.segments(), []
        assert embeddings.read_embeddings(store, first, ENCODER) is None
        embeddings.embed_store(store, ENCODER, encode, text, progress=calls.append)
        assert sum(calls) == 8
        for info in (first, second):
            vectors = embeddings.read_embeddings(store, info, ENCODER)
            triples = store.segment(info.id).triples(0, info.num_rows)
            assert isinstance(vectors, np.memmap) and vectors.dtype == np.float16
            np.testing.assert_array_equal(vectors, encode([text(t) for t in triples]))
        assert embeddings.read_embeddings(store, first, {**ENCODER, "model": "f"}) is None
        calls.clear()
        embeddings.embed_store(store, ENCODER, encode, text, progress=calls.append)
        assert not calls
        # Compaction carries them over: nothing is encoded again.
        store.compact()
        embeddings.embed_store(store, ENCODER, encode, text, progress=calls.append)
        assert not calls
        (only,) = store.segments()
        triples = store.segment(only.id).triples(0, only.num_rows)
        vectors = embeddings.read_embeddings(store, only, ENCODER)
        np.testing.assert_array_equal(vectors, encode([text(t) for t in triples]))
        assert len(list(folder.glob("embeddings/*/*.npy"))) == 1


def test_embeddings_of_another_shape_are_refused(folder):
    with TripleStore.open(folder) as store:
        first, second = store.segments()
        with pytest.raises(ValueError):
            embeddings.write_embeddings(store, first, ENCODER, np.zeros((4, 3), np.float32))
        embeddings.write_embeddings(store, first, ENCODER, np.zeros((5, 3), np.float32))
        (path,) = folder.glob("embeddings/*/*.npy")
        shutil.copy(path, path.with_name(f"{second.name}.npy"))
        with pytest.raises(UserError, match="damaged"):
            embeddings.read_embeddings(store, second, ENCODER)
        path.write_bytes(path.read_bytes()[:60])
        with pytest.raises(UserError, match="damaged"):
            embeddings.read_embeddings(store, first, ENCODER)
