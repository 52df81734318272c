"""Changing a triple store: blocks of passages in, passages out, compaction.

Every change is one SQLite transaction after its segment's file is safely on the disk, so that a
process killed at any instant leaves the store as it was before or after, never between.
"""

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from cirag_jax.errors import UserError
from cirag_jax.triples import embeddings
from cirag_jax.triples.segments import (
    cannot_write,
    damaged,
    encode_segment,
    segment_name,
    sync_folder,
    write_file,
)
from cirag_jax.triples.store import (
    FORMAT,
    INDEX,
    KIND,
    MANIFEST,
    SCHEMA,
    SEGMENTS,
    STATUSES,
    Entry,
    SegmentInfo,
    Status,
    TripleStore,
    batches,
    read_manifest,
)
from cirag_jax.types import Triple

COMPACTED_ROWS = 1 << 17  # rows of a segment after compaction, about
_FETCHED = 500  # passages read at a time while compacting


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A passage as it goes into the store.

    Attributes:
        id: The passage's.
        hash: `cirag_jax.triples.store.content_hash`.
        status: ``ok`` with triples, ``empty`` without, ``failed`` with ``cause``.
        triples: Each with ``passage_id`` and ``sentence``.
        cause: Why it failed; one sentence.
        problems: Malformed answers of each kind.
    """

    id: str
    hash: bytes
    status: Status
    triples: tuple[Triple, ...] = ()
    cause: str | None = None
    problems: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if (self.status == "ok") != bool(self.triples) or (self.status == "failed") != bool(
            self.cause
        ):
            raise ValueError(f"{self.id}: status {self.status} does not fit triples and cause")
        if any(triple.passage_id != self.id for triple in self.triples):
            raise ValueError(f"{self.id}: a triple belongs to another passage")


class StoreWriter(TripleStore):
    """A store that is changed; one process at a time."""

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Opens a store for writing; creates it where there is none.

        What a killed writer left behind is removed.

        Raises:
            UserError: It has another format, is damaged, cannot be written, or is being written.
        """
        folder = Path(folder)
        try:
            (folder / SEGMENTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from None
        if (folder / MANIFEST).exists():
            read_manifest(folder)
        try:
            store = cls(folder, _create_or_open(folder / INDEX))
        except sqlite3.Error as error:
            raise _unusable(folder / INDEX, error) from None
        store._remove_unknown_files()
        return store

    def _load(self) -> None:
        super()._load()
        self._write_manifest()
        # Changes whenever another connection has written: two writers are found out.
        self._version = next(self._rows("PRAGMA data_version"))[0]

    def _write_manifest(self) -> None:
        identities = [self._extractors[number] for number in sorted(self._extractors)]
        manifest = {"kind": KIND, "format": FORMAT, "extractors": identities}
        text = json.dumps(manifest, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        path = self.folder / MANIFEST
        # The index knows it all: a writer that was killed before this line is made up for.
        if not path.exists() or path.read_bytes() != text.encode():
            write_file(path, text.encode())

    def _remove_unknown_files(self) -> None:
        names = {info.name for info in self._segments.values()}
        for path in (self.folder / SEGMENTS).iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)
        for path in (_aside(self.folder), _aside(self.folder, "-journal")):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------ changes

    def commit(
        self,
        records: Sequence[Record],
        extractor: Mapping[str, Any],
        deleted: Iterable[str] = (),
    ) -> None:
        """Adds or replaces passages, and removes others, at once.

        Args:
            records: What was extracted; their triples become one segment.
            extractor: Who extracted it, as JSON.
            deleted: Passages that left the corpus; unknown ones are ignored.

        Raises:
            UserError: The disk is full, or another process has written; nothing has changed then.
        """
        found = [(record.id, record.triples) for record in records if record.triples]
        content = encode_segment(found) if found else None
        if content is not None:
            path = self.folder / SEGMENTS / segment_name(content)
            if not path.exists():
                write_file(path, content)
        identity = json.dumps(extractor, sort_keys=True, ensure_ascii=False)
        is_new = records and json.loads(identity) not in self._extractors.values()
        with self._transaction():
            number = self._insert_extractor(identity) if records else 0
            segment = self._insert_segment(content, found)
            self._bury([*deleted, *(record.id for record in records)])
            self._insert_passages(records, segment, number)
        if segment is not None:
            rows = sum(len(triples) for _, triples in found)
            name, size = segment_name(content or b""), len(content or b"")
            self._segments[segment] = SegmentInfo(segment, name, rows, size)
        if is_new:
            self._extractors[number] = json.loads(identity)
            self._write_manifest()

    def delete(self, passage_ids: Iterable[str]) -> int:
        """Removes passages; their rows stay as tombstones until compaction.

        Returns:
            How many of them were there.
        """
        removed = 0
        for batch in batches(passage_ids, 10_000):
            removed += len(self.entries(batch))
            self.commit((), {}, batch)
        return removed

    def _insert_extractor(self, identity: str) -> int:
        self._db.execute("INSERT OR IGNORE INTO extractors (identity) VALUES (?)", (identity,))
        query = "SELECT id FROM extractors WHERE identity = ?"
        return self._db.execute(query, (identity,)).fetchone()[0]

    def _insert_segment(
        self, content: bytes | None, found: Sequence[tuple[str, tuple[Triple, ...]]]
    ) -> int | None:
        if content is None:
            return None
        rows = sum(len(triples) for _, triples in found)
        # Numbers are never used twice, so that no tombstone falls on another segment's rows.
        number = self._db.execute("SELECT COALESCE(MAX(id), -1) + 1 FROM segments").fetchone()[0]
        values = (number, segment_name(content), rows, len(content))
        self._db.execute("INSERT INTO segments VALUES (?, ?, ?, ?)", values)
        return number

    def _bury(self, passage_ids: Iterable[str]) -> None:
        rows = [(passage_id,) for passage_id in dict.fromkeys(passage_ids)]
        self._db.executemany(
            "INSERT INTO tombstones SELECT segment, first, num_rows FROM passages "
            "WHERE id = ? AND segment IS NOT NULL",
            rows,
        )
        self._db.executemany("DELETE FROM passages WHERE id = ?", rows)

    def _insert_passages(
        self, records: Sequence[Record], segment: int | None, extractor: int
    ) -> None:
        first, rows = 0, []
        for record in records:
            count = len(record.triples)
            place = (segment, first) if count else (None, None)
            problems = (
                json.dumps(dict(sorted(record.problems.items()))) if record.problems else None
            )
            status = STATUSES.index(record.status)
            rows.append(
                (record.id, *place, count, status, record.hash, extractor, record.cause, problems)
            )
            first += count
        self._db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        path = self.folder / INDEX
        try:
            self._db.execute("BEGIN IMMEDIATE")
            if self._db.execute("PRAGMA data_version").fetchone()[0] != self._version:
                raise UserError(f"{path} was changed by another process meanwhile.")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            # A full disk may have ended the transaction already.
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise _unusable(path, error) from None
            raise

    # --------------------------------------------------------------------------------- compaction

    def compact(self, rows_per_segment: int = COMPACTED_ROWS) -> None:
        """Rewrites the store without its tombstones, passages in the order of their ids.

        Two stores that hold the same have the same bytes afterwards, however they came about.
        Embeddings are carried over. Killed at any instant, it leaves the store as it was.

        Raises:
            UserError: A segment is damaged, or the disk is full.
        """
        aside = _aside(self.folder)
        self._remove_unknown_files()
        try:
            sources = self._rewrite(aside, rows_per_segment)
        except sqlite3.Error as error:
            raise _unusable(aside, error) from None
        embeddings.carry_over(self, sources)
        # No transaction is open, so no rollback journal of the old index could meet the new one.
        self._db.close()
        try:
            aside.replace(self.folder / INDEX)
            sync_folder(self.folder)
        except OSError as error:
            raise cannot_write(self.folder / INDEX, error) from None
        finally:
            self._db = _create_or_open(self.folder / INDEX)
        self._load()
        self._remove_unknown_files()
        embeddings.remove_others(self.folder, {info.name for info in self.segments()})

    def _rewrite(self, aside: Path, rows_per_segment: int) -> "embeddings.Sources":
        sources: embeddings.Sources = {}
        old = self._extractors
        used = [row[0] for row in self._rows("SELECT DISTINCT extractor FROM passages")]
        order = sorted(used, key=lambda number: json.dumps(old[number], sort_keys=True))
        new_number = {number: place + 1 for place, number in enumerate(order)}
        db = _create_or_open(aside)
        with contextlib.closing(db):
            db.execute("BEGIN IMMEDIATE")
            for number in order:
                text = json.dumps(old[number], sort_keys=True, ensure_ascii=False)
                db.execute("INSERT INTO extractors VALUES (?, ?)", (new_number[number], text))
            for segment, entries in enumerate(self._groups(rows_per_segment)):
                self._rewrite_segment(db, segment, entries, new_number, sources)
            db.execute("COMMIT")
        return sources

    def _groups(self, rows_per_segment: int) -> Iterator[list[Entry]]:
        """All entries in order, in lists whose triples make one segment."""
        group: list[Entry] = []
        rows = 0
        for batch in batches(self.passage_ids(), _FETCHED):
            entries = self.entries(batch)
            for passage_id in batch:
                group.append(entries[passage_id])
                rows += group[-1].num_rows
                if rows >= rows_per_segment:
                    yield group
                    group, rows = [], 0
        if group:
            yield group

    def _rewrite_segment(
        self,
        db: sqlite3.Connection,
        segment: int,
        entries: Sequence[Entry],
        new_number: Mapping[int, int],
        sources: "embeddings.Sources",
    ) -> None:
        triples = self.triples(entry.id for entry in entries if entry.num_rows)
        found = [(passage_id, rows or ()) for passage_id, rows in triples.items()]
        if found:
            content = encode_segment(found)
            name = segment_name(content)
            path = self.folder / SEGMENTS / name
            if not path.exists():
                write_file(path, content)
            count = sum(len(rows) for _, rows in found)
            db.execute(
                "INSERT INTO segments VALUES (?, ?, ?, ?)", (segment, name, count, len(content))
            )
            sources[name] = [
                (self._segments[entry.segment].name, entry.first, entry.num_rows)
                for entry in entries
                if entry.segment is not None
            ]
        first = 0
        for entry in entries:
            place = (segment, first) if entry.num_rows else (None, None)
            db.execute(_INSERT, _row(entry, place, entry.num_rows, new_number[entry.extractor]))
            first += entry.num_rows


# ------------------------------------------------------------------------------------------ details


def _aside(folder: Path, suffix: str = "") -> Path:
    return folder / f".{INDEX}.part{suffix}"


_INSERT = "INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


def _row(
    passage: Record | Entry, place: tuple[int | None, int | None], num_rows: int, extractor: int
) -> tuple[Any, ...]:
    """A row of the table ``passages``; ``place``: segment and first row."""
    problems = json.dumps(dict(sorted(passage.problems.items()))) if passage.problems else None
    status = STATUSES.index(passage.status)
    rest = (passage.hash, extractor, passage.cause, problems)
    return (passage.id, *place, num_rows, status, *rest)


def _create_or_open(path: Path) -> sqlite3.Connection:
    # Transactions are begun by hand; a second writer is refused after a second, not waited for.
    db = sqlite3.connect(path, isolation_level=None, timeout=1.0)
    db.execute("PRAGMA synchronous = FULL")  # a segment's file may go once its index says so
    if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('format', ?)", (str(FORMAT),))
        db.execute("COMMIT")
    return db


def _unusable(path: Path, error: sqlite3.Error) -> UserError:
    text = str(error)
    if "locked" in text:
        return UserError(f"{path} is in use by another run.")
    if "full" in text:
        return UserError(
            f"{path} cannot be written: the disk is full; what is recorded is kept, so make room "
            "and run the same command again."
        )
    return damaged(path, text)
