"""The triple store: what was extracted from which passage, in one SQLite table.

A row a passage: a hash of its content, who extracted it, and its triples as JSON, each with the
sentence it comes from. docs/triples.md describes the file and what it costs.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.identity import of_records
from cirag_jax.sqlite import Database
from cirag_jax.types import Passage, Triple

FILE = "triples.sqlite"  # within a workdir of launch/extract.py
Status = Literal["ok", "empty", "failed"]

_COLUMNS = "id, hash, extractor, cause, parse_errors, num_triples, triples"
_ASKED = 500  # passages of one SQL statement
_decoder = msgspec.json.Decoder(list[tuple[str, str, str, int | None]])


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A passage as it goes into the store.

    Attributes:
        id: The passage's.
        hash: `content_hash`.
        triples: Each with ``passage_id`` and ``sentence``; None where the extraction failed.
        cause: Why it failed; one sentence.
        parse_errors: Malformed answers of each kind.
    """

    id: str
    hash: bytes
    triples: tuple[Triple, ...] | None
    cause: str | None = None
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if (self.triples is None) != bool(self.cause):
            raise ValueError(f"{self.id}: its triples do not fit the cause {self.cause!r}")
        if any(triple.passage_id != self.id for triple in self.triples or ()):
            raise ValueError(f"{self.id}: a triple belongs to another passage")


class PassageEntry(NamedTuple):
    """What the store says of a passage, beside its triples; ``extractor``: who made them."""

    hash: bytes
    extractor: Mapping[str, Any]
    status: Status
    cause: str | None


def content_hash(passage: Passage) -> bytes:
    """16 bytes that change with the passage's title, text or sentences."""
    text = json.dumps([passage.title, passage.text, passage.sentences])
    return hashlib.sha256(text.encode()).digest()[:16]


class TripleStore(Database):
    """An open store; a context manager. One process writes it at a time, others may read."""

    _SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE extractors (id TEXT PRIMARY KEY, identity TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE passages (
  id TEXT PRIMARY KEY, hash BLOB NOT NULL, extractor TEXT NOT NULL, cause TEXT, parse_errors TEXT,
  num_triples INTEGER, triples TEXT);
"""
    _FORMAT = 2
    _OTHER_FORMAT = (
        "{path} is a triple store of another version; extract its corpus again with "
        "launch/extract.py and another --workdir."
    )

    def __init__(self, path: Path, access: sqlite.Access, named: Path | None = None):
        """Use `open` or `create`."""
        super().__init__(path, access, named)
        self._extractors: dict[str, Mapping[str, Any]] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Opens a store for reading: its file, or the workdir of launch/extract.py that has it."""
        folder = Path(folder).expanduser()
        path = folder / FILE if folder.is_dir() else folder
        refuse_earlier(folder)
        if not path.is_file():
            raise UserError(f"{folder} holds no triple store ({FILE}); launch/extract.py makes it.")
        return cls(path, sqlite.READ)

    @classmethod
    def create(cls, path: str | Path, named: Path | None = None) -> Self:
        """Opens the store ``path`` for writing; creates it where there is none.

        Error messages say ``named`` instead, where the file is to be renamed.
        """
        path = Path(path)
        refuse_earlier(path.parent)
        return cls(path, sqlite.WRITE, named)

    # ------------------------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """Number of passages that were extracted, with whatever success."""
        return next(self._rows("SELECT COUNT(*) FROM passages"))[0]

    def passage_ids(self) -> Iterator[str]:
        """Every passage that was extracted, in the order of the ids."""
        return (row[0] for row in self._rows("SELECT id FROM passages ORDER BY id"))

    def entry(self, passage_id: str) -> PassageEntry | None:
        """What there is of a passage; None: it was never extracted."""
        query = "SELECT hash, extractor, num_triples, cause FROM passages WHERE id = ?"
        for digest, extractor, count, cause in self._rows(query, (passage_id,)):
            status: Status = "failed" if count is None else "ok" if count else "empty"
            return PassageEntry(digest, self._extractor(extractor), status, cause)
        return None

    def triples(self, passage_ids: Iterable[str]) -> dict[str, tuple[Triple, ...] | None]:
        """The triples of each passage, with provenance; None where it failed or was never tried."""
        found: dict[str, tuple[Triple, ...] | None] = {}
        for passage_id, text in self._texts(passage_ids):
            try:
                rows = _decoder.decode(text) if text is not None else None
            except sqlite.DAMAGE as error:
                raise UserError(
                    f"{self.path} is damaged (passage {passage_id!r}: {error}); restore it or use "
                    "another --workdir."
                ) from None
            found[passage_id] = (
                None if rows is None else tuple(Triple(*r[:3], passage_id, r[3]) for r in rows)
            )
        return found

    def digest(self, passage_ids: Iterable[str]) -> str:
        """A hash that changes with any change of the triples of these passages."""
        return of_records(self._texts(passage_ids))

    def _texts(self, passage_ids: Iterable[str]) -> Iterator[tuple[str, str | None]]:
        """Each passage's triples as JSON, in the order asked for."""
        ids = iter(passage_ids)
        while part := list(itertools.islice(ids, _ASKED)):
            marks = ",".join("?" * len(part))
            query = f"SELECT id, triples FROM passages WHERE id IN ({marks})"
            texts = dict(self._rows(query, part))
            yield from ((passage_id, texts.get(passage_id)) for passage_id in part)

    def check_corpus(self, passages: Iterable[Passage]) -> None:
        """Makes sure that the triples are those of the passages as they are now.

        A passage that was never extracted is no contradiction.
        """
        query = "SELECT hash FROM passages WHERE id = ?"
        for passage in passages:
            for (digest,) in self._rows(query, (passage.id,)):
                if digest != content_hash(passage):
                    raise UserError(
                        f"{self.path} is older than its corpus: passage {passage.id!r} has changed "
                        "since its triples were extracted; run launch/extract.py again."
                    )

    def counts(self) -> dict[str, int]:
        """Passages of each status, and ``triples``."""
        query = (
            "SELECT TOTAL(num_triples > 0), TOTAL(num_triples = 0), TOTAL(num_triples IS NULL), "
            "TOTAL(num_triples) FROM passages"
        )
        names = ("ok", "empty", "failed", "triples")
        return dict(zip(names, map(int, next(self._rows(query))), strict=True))

    def failures(self) -> dict[str, int]:
        """Failed passages of each cause, the most frequent first; numbers in causes are "#"."""
        rows = self._rows("SELECT cause FROM passages WHERE cause IS NOT NULL")
        return _sorted(collections.Counter(_plain(row[0]) for row in rows))

    def parse_errors(self) -> dict[str, int]:
        """Malformed answers of each kind, over all passages."""
        query = "SELECT parse_errors FROM passages WHERE parse_errors IS NOT NULL"
        found: collections.Counter[str] = collections.Counter()
        for row in self._rows(query):
            found.update(self._decoded(row[0], dict[str, int]))
        return _sorted(found)

    def noted(self) -> dict[str, int]:
        """What the last run counted."""
        text = self._meta("run")
        return {} if text is None else self._decoded(text, dict[str, int])

    def _extractor(self, number: str) -> Mapping[str, Any]:
        if number not in self._extractors:
            found = [*self._rows("SELECT identity FROM extractors WHERE id = ?", (number,))]
            identity = found[0][0] if found else "{}"
            self._extractors[number] = self._decoded(identity, dict[str, Any])
        return self._extractors[number]

    def _decoded(self, text: Any, kind: Any) -> Any:
        with self._reading():
            return msgspec.json.decode(text, type=kind)

    # ------------------------------------------------------------------------------------ writing

    def commit(
        self,
        records: Iterable[Record],
        extractor: Mapping[str, Any],
        deleted: Iterable[str] = (),
    ) -> None:
        """Adds or replaces passages that ``extractor`` (JSON) extracted, and removes others, in one
        transaction.

        Unknown ids in ``deleted`` (passages that left the corpus) are ignored.
        """
        identity = json.dumps(extractor, sort_keys=True, ensure_ascii=False)
        number = hashlib.sha256(identity.encode()).hexdigest()[:16]
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO extractors VALUES (?, ?)", (number, identity))
            self._db.executemany(
                f"INSERT OR REPLACE INTO passages ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (_columns(record, number) for record in records),
            )
            rows = ((passage_id,) for passage_id in deleted)
            self._db.executemany("DELETE FROM passages WHERE id = ?", rows)

    def note(self, run: Mapping[str, int]) -> None:
        """Keeps what the last run counted; see `noted`."""
        self._set_meta("run", json.dumps(run))


def merge(parts: Sequence[Path], target: Path) -> None:
    """Writes one store, ``target``, with what every process of a run left in its own.

    The stores are closed, and no passage is in two of them.
    """
    statements = (
        "INSERT OR IGNORE INTO extractors SELECT * FROM part.extractors",
        f"INSERT INTO passages SELECT {_COLUMNS} FROM part.passages",
    )
    sqlite.merge(parts, target, lambda path: TripleStore.create(path, target).close(), statements)


def refuse_earlier(workdir: Path) -> None:
    """Raises `UserError` where ``workdir`` holds, or is, a store of Arrow segments."""
    for folder in (workdir, workdir / "triples"):
        if (folder / "index.sqlite").exists() and (folder / "segments").is_dir():
            raise UserError(
                f"{folder} is a triple store of an earlier version; extract its corpus again with "
                "launch/extract.py and another --workdir."
            )


# ------------------------------------------------------------------------------------------ details


def _columns(record: Record, extractor: str) -> tuple[Any, ...]:
    count = text = None
    if record.triples is not None:
        rows = [[t.head, t.relation, t.tail, t.sentence] for t in record.triples]
        count, text = len(rows), msgspec.json.encode(rows).decode()
    parse_errors = json.dumps(record.parse_errors, sort_keys=True) if record.parse_errors else None
    return record.id, record.hash, extractor, record.cause, parse_errors, count, text


def _plain(cause: str) -> str:
    """A cause without what differs from one passage to the next: its numbers."""
    words = ("#" if any(c.isdigit() for c in word) else word for word in cause.split())
    return " ".join(words)


def _sorted(counter: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counter.items(), key=lambda kv: (-kv[1], kv[0])))
