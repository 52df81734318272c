"""The triple store: what was extracted from which passage, on disk, read without loading it.

A folder of immutable Arrow segments, an SQLite index from passage id to segment and rows, and a
manifest. `StoreWriter` (store_writer.py) changes it, one transaction a block; embeddings.py keeps
vectors beside the segments. docs/triples.md describes the files and what they cost.
"""

import collections
import dataclasses
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.triples.segments import Segment, damaged
from cirag_jax.types import Passage, Triple

FORMAT = 1
FOLDER = "triples"  # the store within a workdir of launch/extract.py
MANIFEST = "manifest.json"
INDEX = "index.sqlite"
SEGMENTS = "segments"
KIND = "cirag_jax triple store"

Status = Literal["ok", "empty", "failed"]
STATUSES: tuple[Status, ...] = ("ok", "empty", "failed")

SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE extractors (id INTEGER PRIMARY KEY, identity TEXT NOT NULL UNIQUE)",
    "CREATE TABLE segments (id INTEGER PRIMARY KEY, name TEXT NOT NULL, num_rows INTEGER NOT NULL,"
    " num_bytes INTEGER NOT NULL)",
    # segment, first: null where there are no triples. problems: JSON, null where there are none.
    "CREATE TABLE passages (id TEXT PRIMARY KEY, segment INTEGER, first INTEGER, num_rows INTEGER"
    " NOT NULL, status INTEGER NOT NULL, hash BLOB NOT NULL, extractor INTEGER NOT NULL,"
    " cause TEXT, problems TEXT) WITHOUT ROWID",
    # Rows that belong to no passage any more: replaced or deleted.
    "CREATE TABLE tombstones (segment INTEGER, first INTEGER, num_rows INTEGER NOT NULL,"
    " PRIMARY KEY (segment, first)) WITHOUT ROWID",
)

_OPEN_SEGMENTS = 128  # mapped at a time
_ASKED = 500  # ids of one SQL statement


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment as the index knows it."""

    id: int
    name: str
    num_rows: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What the index says of a passage: where its triples are, and what they were made from."""

    id: str
    segment: int | None
    first: int
    num_rows: int
    status: Status
    hash: bytes
    extractor: int
    cause: str | None
    problems: Mapping[str, int]


def content_hash(passage: Passage, extractor: Mapping[str, Any]) -> bytes:
    """16 bytes that change with the passage's text or with who extracts it."""
    record = [passage.title, passage.text, passage.sentences, extractor]
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()[:16]


class TripleStore:
    """A store that is read; a context manager. Of 21 million passages it holds none in memory."""

    def __init__(self, folder: Path, db: sqlite3.Connection):
        """Use `open`."""
        self.folder = folder
        self._db = db
        self._segments: dict[int, SegmentInfo] = {}
        self._mapped: collections.OrderedDict[int, Segment] = collections.OrderedDict()
        self._extractors: dict[int, dict[str, Any]] = {}
        self._load()

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Opens a store for reading.

        Args:
            folder: The store, or the workdir of launch/extract.py that holds it.

        Raises:
            UserError: There is no store, it has another format, or it is damaged.
        """
        folder = find_store(Path(folder))
        read_manifest(folder)
        try:
            return cls(folder, _connect(folder / INDEX))
        except sqlite3.Error as error:
            raise damaged(folder / INDEX, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the index and unmaps the segments."""
        self._mapped.clear()
        self._db.close()

    def _load(self) -> None:
        """Reads what is small; compares every segment's file with what was written."""
        self._mapped.clear()
        meta = dict(self._rows("SELECT key, value FROM meta"))
        if meta.get("format") != str(FORMAT):
            raise damaged(self.folder / INDEX, f"format {meta.get('format')}, not {FORMAT}")
        rows = self._rows("SELECT id, identity FROM extractors")
        self._extractors = {row[0]: json.loads(row[1]) for row in rows}
        rows = self._rows("SELECT id, name, num_rows, num_bytes FROM segments ORDER BY id")
        self._segments = {row[0]: SegmentInfo(*row) for row in rows}
        for info in self._segments.values():
            path = self._path(info)
            try:
                size = path.stat().st_size
            except OSError as error:
                raise damaged(path, error.strerror) from None
            if size != info.num_bytes:
                raise damaged(path, f"it has {size} bytes, not {info.num_bytes}")

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        try:
            yield from self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise damaged(self.folder / INDEX, error) from None

    def _path(self, info: SegmentInfo) -> Path:
        return self.folder / SEGMENTS / info.name

    # ---------------------------------------------------------------------------------- passages

    def __len__(self) -> int:
        """Number of passages that were extracted, with whatever success."""
        return next(self._rows("SELECT COUNT(*) FROM passages"))[0]

    def passage_ids(self) -> Iterator[str]:
        """Every passage that was extracted, in the order of the ids."""
        return (row[0] for row in self._rows("SELECT id FROM passages ORDER BY id"))

    def entries(self, passage_ids: Iterable[str]) -> dict[str, Entry]:
        """What the index says of these passages; one that was never extracted is absent."""
        asked = list(dict.fromkeys(passage_ids))
        found: dict[str, Entry] = {}
        for start in range(0, len(asked), _ASKED):
            part = asked[start : start + _ASKED]
            marks = ",".join("?" * len(part))
            rows = self._rows(f"SELECT * FROM passages WHERE id IN ({marks})", part)
            found.update((row[0], _entry(row)) for row in rows)
        return found

    def status(self, passage_id: str) -> Status | None:
        """``ok``, ``empty`` (extracted, nothing found), ``failed``, or None: never extracted."""
        entry = self.entries([passage_id]).get(passage_id)
        return entry.status if entry else None

    def triples(self, passage_ids: Iterable[str]) -> dict[str, tuple[Triple, ...] | None]:
        """The triples of each passage, with provenance; None where it failed or was never tried.

        Raises:
            UserError: A segment is damaged.
        """
        asked = list(dict.fromkeys(passage_ids))
        entries = self.entries(asked)
        found: dict[str, tuple[Triple, ...] | None] = dict.fromkeys(asked)
        # Segment by segment, so that each is mapped once.
        for entry in sorted(entries.values(), key=lambda e: (e.segment or 0, e.first)):
            if entry.status != "failed":
                found[entry.id] = self._triples(entry)
        return found

    def _triples(self, entry: Entry) -> tuple[Triple, ...]:
        if entry.segment is None:
            return ()
        triples = self.segment(entry.segment).triples(entry.first, entry.num_rows)
        if any(triple.passage_id != entry.id for triple in triples):
            path = self._path(self._segments[entry.segment])
            raise damaged(path, f"rows of {entry.id!r} are another passage's")
        return triples

    def digest(self, passage_ids: Iterable[str]) -> str:
        """A hash of the triples of these passages, from the index alone.

        Segments are named by their content, so any change of these triples gives another hash. So
        does compaction, which writes the same triples elsewhere.
        """
        found = hashlib.sha256()
        for batch in batches(passage_ids, _ASKED):
            entries = self.entries(batch)
            for passage_id in batch:
                entry, rows = entries.get(passage_id), None
                if entry is not None and entry.status != "failed":
                    name = "" if entry.segment is None else self._segments[entry.segment].name
                    rows = [name, entry.first]
                found.update(json.dumps([passage_id, rows]).encode() + b"\n")
        return found.hexdigest()

    def check_corpus(self, passages: Iterable[Passage]) -> None:
        """Makes sure that the triples are those of the passages as they are now.

        A passage that was never extracted is no contradiction.

        Raises:
            UserError: A passage's title, text or sentences differ from what was extracted.
        """
        for batch in batches(passages, _ASKED):
            entries = self.entries(passage.id for passage in batch)
            for passage in batch:
                entry = entries.get(passage.id)
                if entry is not None and not self.is_current(entry, passage):
                    raise UserError(
                        f"{self.folder} is older than its corpus: passage {passage.id!r} has "
                        "changed since its triples were extracted; run launch/extract.py again."
                    )

    def is_current(self, entry: Entry, passage: Passage) -> bool:
        """Whether an entry was made from the passage as it is now, by whomever."""
        return entry.hash == content_hash(passage, self._extractors[entry.extractor])

    def extractor(self, entry: Entry) -> dict[str, Any]:
        """Who made an entry: the model, the prompt and what else decides."""
        return self._extractors[entry.extractor]

    # ------------------------------------------------------------------------------------ counts

    def counts(self) -> dict[str, int]:
        """Passages of each status, and ``triples``."""
        query = "SELECT status, COUNT(*), SUM(num_rows) FROM passages GROUP BY status"
        found: dict[str, int] = {**dict.fromkeys(STATUSES, 0), "triples": 0}
        for status, passages, triples in self._rows(query):
            found[STATUSES[status]] = passages
            found["triples"] += triples
        return found

    def failures(self) -> collections.Counter[str]:
        """Failed passages of each cause, the most frequent first; numbers in causes are "#"."""
        rows = self._rows("SELECT cause FROM passages WHERE cause IS NOT NULL")
        return _sorted(collections.Counter(plain_cause(row[0]) for row in rows))

    def problems(self) -> collections.Counter[str]:
        """Malformed answers of each kind, over all passages."""
        found: collections.Counter[str] = collections.Counter()
        for row in self._rows("SELECT problems FROM passages WHERE problems IS NOT NULL"):
            found.update(json.loads(row[0]))
        return _sorted(found)

    # ---------------------------------------------------------------------------------- segments

    def segments(self) -> tuple[SegmentInfo, ...]:
        """The segments, in the order they were written; for whoever goes through all triples."""
        return tuple(self._segments.values())

    def segment(self, number: int) -> Segment:
        """A segment, mapped."""
        if number not in self._mapped:
            info = self._segments[number]
            self._mapped[number] = Segment(self._path(info), info.num_rows)
            if len(self._mapped) > _OPEN_SEGMENTS:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(number)
        return self._mapped[number]

    def live_rows(self, number: int) -> np.ndarray:
        """Which rows of a segment still belong to a passage: bool of shape [rows]."""
        live = np.ones(self._segments[number].num_rows, bool)
        query = "SELECT first, num_rows FROM tombstones WHERE segment = ?"
        for first, count in self._rows(query, (number,)):
            live[first : first + count] = False
        return live

    def verify(self) -> None:
        """Reads every byte.

        Raises:
            UserError: A segment or the index is not what was written.
        """
        problem = next(self._rows("PRAGMA integrity_check"))[0]
        if problem != "ok":
            raise damaged(self.folder / INDEX, problem)
        for info in self._segments.values():
            path = self._path(info)
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise damaged(path, error.strerror) from None
            if not info.name.startswith(digest[:32]):
                raise damaged(path, "its content is not what its name says")


# ------------------------------------------------------------------------------------------ details


def _connect(path: Path) -> sqlite3.Connection:
    """A connection for reading; what a killed writer left half-done is undone first."""
    uri = path.resolve().as_uri()
    # Undoing it needs the right to write; where there is none, nobody can have been writing.
    mode = "rw" if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "ro"
    db = sqlite3.connect(f"{uri}?mode={mode}", uri=True, isolation_level=None)
    db.execute("SELECT 1 FROM sqlite_master").fetchone()
    db.execute("PRAGMA query_only = ON")
    return db


def find_store(folder: Path) -> Path:
    """The store's own folder, given it or the workdir around it; raises `UserError`."""
    for place in (folder, folder / FOLDER):
        if (place / MANIFEST).is_file() and (place / INDEX).is_file():
            return place
    raise UserError(
        f"{folder} holds no triple store ({MANIFEST} and {INDEX}); launch/extract.py makes one."
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store; raises `UserError` where it is none or of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        kind, number = manifest["kind"], manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None
    if kind != KIND or number != FORMAT:
        raise UserError(f"{path} describes {kind} of format {number}, not {KIND} of {FORMAT}.")
    return manifest


def batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """``items`` in lists of ``size``, the last one shorter."""
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def plain_cause(cause: str) -> str:
    """A cause without what differs from one passage to the next: its numbers."""
    words = ("#" if any(c.isdigit() for c in word) else word for word in cause.split())
    return " ".join(words)


def _sorted(counter: collections.Counter[str]) -> collections.Counter[str]:
    return collections.Counter(dict(sorted(counter.items(), key=lambda kv: (-kv[1], kv[0]))))


def _entry(row: Sequence[Any]) -> Entry:
    name, segment, first, num_rows, status, digest, extractor, cause, problems = row
    counts = json.loads(problems) if problems else {}
    return Entry(
        name, segment, first or 0, num_rows, STATUSES[status], digest, extractor, cause, counts
    )
