"""The triple store: the triples extracted from each passage, in one SQLite table.

A row has a hash of the passage, the identity of the extractor, and the triples with their sentences
as JSON. docs/triples.md describes the file and its size.
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

FILE = "triples.sqlite"  # File name in a workdir of launch/extract.py.
Status = Literal["ok", "empty", "failed"]

_COLUMNS = "id, hash, extractor, cause, parse_errors, num_triples, triples"
_BATCH = 500  # Number of passages per SQL query.
_decoder = msgspec.json.Decoder(list[tuple[str, str, str, int | None]])


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A passage to be written to the store.

    Attributes:
        id: The passage id.
        hash: The `content_hash` of the passage.
        triples: Triples with ``passage_id`` and ``sentence``; None if the extraction failed.
        cause: One sentence about why the extraction failed; None if it succeeded.
        parse_errors: Number of malformed answers of the model, by kind.
    """

    id: str
    hash: bytes
    triples: tuple[Triple, ...] | None
    cause: str | None = None
    parse_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if (self.triples is None) != bool(self.cause):
            raise ValueError(f"{self.id}: exactly one of triples and cause must be given")
        if any(triple.passage_id != self.id for triple in self.triples or ()):
            raise ValueError(f"{self.id}: a triple belongs to a different passage")


class PassageEntry(NamedTuple):
    """A passage's entry without its triples; ``extractor`` is the extractor's identity."""

    hash: bytes
    extractor: Mapping[str, Any]
    status: Status
    cause: str | None


def content_hash(passage: Passage) -> bytes:
    """Returns a hash (16 bytes) of a passage's title, text and sentences."""
    text = json.dumps([passage.title, passage.text, passage.sentences])
    return hashlib.sha256(text.encode()).digest()[:16]


class TripleStore(Database):
    """An open triple store, as a context manager; one process may write while others read."""

    _SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE extractors (id TEXT PRIMARY KEY, identity TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE passages (
  id TEXT PRIMARY KEY, hash BLOB NOT NULL, extractor TEXT NOT NULL, cause TEXT, parse_errors TEXT,
  num_triples INTEGER, triples TEXT);
"""
    _FORMAT = 2
    _OTHER_FORMAT = (
        "{path} is a triple store of a different version; extract the corpus again with "
        "launch/extract.py and another --workdir."
    )

    def __init__(self, path: Path, access: sqlite.Access, named: Path | None = None):
        """Not for direct use; call `open` or `create`."""
        super().__init__(path, access, named)
        self._extractors: dict[str, Mapping[str, Any]] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Opens a store for reading; ``folder`` is a workdir of launch/extract.py or the file."""
        folder = Path(folder).expanduser()
        path = folder / FILE if folder.is_dir() else folder
        reject_old_format(folder)
        if not path.is_file():
            raise UserError(
                f"{folder} has no triple store ({FILE}); create it with launch/extract.py."
            )
        return cls(path, sqlite.READ)

    @classmethod
    def create(cls, path: str | Path, named: Path | None = None) -> Self:
        """Opens the store ``path`` for writing, and creates it if necessary.

        Error messages contain the path ``named`` if given, for files that are renamed later.
        """
        path = Path(path)
        reject_old_format(path.parent)
        return cls(path, sqlite.WRITE, named)

    def __len__(self) -> int:
        """Number of passages with an entry, including failed extractions."""
        return next(self._rows("SELECT COUNT(*) FROM passages"))[0]

    def passage_ids(self) -> Iterator[str]:
        """Yields the ids of all passages with an entry, sorted."""
        return (row[0] for row in self._rows("SELECT id FROM passages ORDER BY id"))

    def entry(self, passage_id: str) -> PassageEntry | None:
        """Returns the entry of a passage, or None if it was never extracted."""
        query = "SELECT hash, extractor, num_triples, cause FROM passages WHERE id = ?"
        for digest, extractor, count, cause in self._rows(query, (passage_id,)):
            status: Status = "failed" if count is None else "ok" if count else "empty"
            return PassageEntry(digest, self._extractor(extractor), status, cause)
        return None

    def triples(self, passage_ids: Iterable[str]) -> dict[str, tuple[Triple, ...] | None]:
        """Returns passage id -> triples; None if the extraction failed or was never run."""
        triples: dict[str, tuple[Triple, ...] | None] = {}
        for passage_id, text in self._texts(passage_ids):
            try:
                rows = _decoder.decode(text) if text is not None else None
            except sqlite.DAMAGE as error:
                raise UserError(
                    f"{self.path} is damaged (passage {passage_id!r}: {error}); restore it or use "
                    "another --workdir."
                ) from None
            triples[passage_id] = (
                None if rows is None else tuple(Triple(*r[:3], passage_id, r[3]) for r in rows)
            )
        return triples

    def digest(self, passage_ids: Iterable[str]) -> str:
        """Returns a hash of the triples of these passages."""
        return of_records(self._texts(passage_ids))

    def _texts(self, passage_ids: Iterable[str]) -> Iterator[tuple[str, str | None]]:
        """Yields (passage id, triples as JSON) in the order of ``passage_ids``."""
        ids = iter(passage_ids)
        while part := list(itertools.islice(ids, _BATCH)):
            marks = ",".join("?" * len(part))
            query = f"SELECT id, triples FROM passages WHERE id IN ({marks})"
            texts = dict(self._rows(query, part))
            yield from ((passage_id, texts.get(passage_id)) for passage_id in part)

    def check_corpus(self, passages: Iterable[Passage]) -> None:
        """Raises UserError if a passage has changed since its triples were extracted."""
        query = "SELECT hash FROM passages WHERE id = ?"
        changed, count = [], 0
        for passage in passages:
            for (digest,) in self._rows(query, (passage.id,)):
                count += 1
                if digest != content_hash(passage):
                    changed.append(passage.id)
        if changed:
            raise UserError(
                f"{self.path} is older than its corpus: passage {changed[0]!r} has changed since "
                f"its triples were extracted ({len(changed):,} of {count:,} passages); run "
                "launch/extract.py again."
            )

    def num_missing(self, passages: Iterable[Passage]) -> int:
        """Returns how many passages have no entry, as in a store of another corpus."""
        known = set(self.passage_ids())
        return sum(passage.id not in known for passage in passages)

    def extractors(self) -> tuple[str, ...]:
        """Returns the extractors of the triples: model and dialect, or the imported file."""
        names = set[str]()
        for (text,) in self._rows("SELECT identity FROM extractors"):
            identity = json.loads(text)
            if "import" in identity:
                names.add(f"imported from {identity['import']}")
            elif "model" in identity:
                dialect = identity.get("dialect", "openie")
                names.add(f"{identity['model'] or 'the default model'}, dialect={dialect}")
        return tuple(sorted(names))

    def counts(self) -> dict[str, int]:
        """Returns the number of passages of each status, and the number of ``triples``."""
        query = (
            "SELECT TOTAL(num_triples > 0), TOTAL(num_triples = 0), TOTAL(num_triples IS NULL), "
            "TOTAL(num_triples) FROM passages"
        )
        names = ("ok", "empty", "failed", "triples")
        return dict(zip(names, map(int, next(self._rows(query))), strict=True))

    def failures(self) -> dict[str, int]:
        """Counts failed passages by cause, most frequent first; "#" replaces numbers in causes."""
        rows = self._rows("SELECT cause FROM passages WHERE cause IS NOT NULL")
        return _by_count(collections.Counter(_without_numbers(row[0]) for row in rows))

    def parse_errors(self) -> dict[str, int]:
        """Counts malformed answers by kind, over all passages."""
        query = "SELECT parse_errors FROM passages WHERE parse_errors IS NOT NULL"
        counts: collections.Counter[str] = collections.Counter()
        for row in self._rows(query):
            counts.update(self._decoded(row[0], dict[str, int]))
        return _by_count(counts)

    def run_counts(self) -> dict[str, int]:
        """Returns the counts of the last run."""
        text = self._meta("run")
        return {} if text is None else self._decoded(text, dict[str, int])

    def _extractor(self, number: str) -> Mapping[str, Any]:
        if number not in self._extractors:
            rows = [*self._rows("SELECT identity FROM extractors WHERE id = ?", (number,))]
            identity = rows[0][0] if rows else "{}"
            self._extractors[number] = self._decoded(identity, dict[str, Any])
        return self._extractors[number]

    def _decoded(self, text: Any, kind: Any) -> Any:
        with self._reading():
            return msgspec.json.decode(text, type=kind)

    def commit(
        self,
        records: Iterable[Record],
        extractor: Mapping[str, Any],
        deleted: Iterable[str] = (),
    ) -> None:
        """Writes ``records``, and deletes the entries of the ids ``deleted``, in one transaction.

        Unknown ids in ``deleted`` are ignored.
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

    def set_run_counts(self, counts: Mapping[str, int]) -> None:
        """Stores the counts of the last run."""
        self._set_meta("run", json.dumps(counts))


def merge(parts: Sequence[Path], target: Path) -> None:
    """Merges the closed stores of a run's processes, which share no passages, into ``target``."""
    statements = (
        "INSERT OR IGNORE INTO extractors SELECT * FROM part.extractors",
        f"INSERT INTO passages SELECT {_COLUMNS} FROM part.passages",
    )
    sqlite.merge(parts, target, lambda path: TripleStore.create(path, target).close(), statements)


def reject_old_format(workdir: Path) -> None:
    """Raises `UserError` if ``workdir`` is or contains a store in the old Arrow format."""
    for folder in (workdir, workdir / "triples"):
        if (folder / "index.sqlite").exists() and (folder / "segments").is_dir():
            raise UserError(
                f"{folder} is a triple store of an earlier version; extract the corpus again with "
                "launch/extract.py and another --workdir."
            )


def _columns(record: Record, extractor: str) -> tuple[Any, ...]:
    count = text = None
    if record.triples is not None:
        rows = [[t.head, t.relation, t.tail, t.sentence] for t in record.triples]
        count, text = len(rows), msgspec.json.encode(rows).decode()
    parse_errors = json.dumps(record.parse_errors, sort_keys=True) if record.parse_errors else None
    return record.id, record.hash, extractor, record.cause, parse_errors, count, text


def _without_numbers(cause: str) -> str:
    words = ("#" if any(c.isdigit() for c in word) else word for word in cause.split())
    return " ".join(words)


def _by_count(counter: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counter.items(), key=lambda kv: (-kv[1], kv[0])))
