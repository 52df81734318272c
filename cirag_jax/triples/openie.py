"""Triples that exist already: ``openie.jsonl`` into a store."""

import hashlib
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from cirag_jax.datasets.corpus_scan import CorpusScan
from cirag_jax.datasets.jsonl import OpenIE, triples_of
from cirag_jax.datasets.records import decode, read_lines
from cirag_jax.errors import UserError
from cirag_jax.triples.store import batches, content_hash
from cirag_jax.triples.store_writer import Record, StoreWriter
from cirag_jax.types import Passage, Triple


def import_openie(path: Path, corpus: CorpusScan, store: StoreWriter, block: int) -> dict[str, Any]:
    """Puts the triples of a file into the store, as extracted by that file.

    A passage that the store has from the same file is kept; every other one of the file is added
    or replaced. Passages that the corpus lacks leave the store. Several lines of one passage are
    merged; triples that are not three non-empty strings are dropped and counted.

    Args:
        path: JSON lines of ``passage_id``, ``triples`` and maybe ``triple_sentences``
            (docs/data.md). Neither it nor the corpus is held in memory.
        corpus: The passages.
        store: Where to.
        block: Passages of a segment.

    Returns:
        ``imported``, ``reused``, ``deleted`` and ``malformed`` (triples).

    Raises:
        UserError: A line is broken or names a passage that the corpus lacks.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; config.import_openie names an openie.jsonl.")
    lines = _Lines(path)
    for _ in corpus.check():
        pass
    unknown = next(corpus.missing(lines.ids()), None)
    if unknown is not None:
        place = lines.place(unknown)
        raise UserError(
            f"{path}:{place}: field 'passage_id' names passage {unknown!r}, which the corpus does "
            "not have."
        )
    deleted = store.delete(list(corpus.missing(store.passage_ids())))
    identity = {"import": path.name, "sha256": lines.digest[:16]}
    counts = {"imported": 0, "reused": 0, "deleted": deleted, "malformed": 0}
    with path.open("rb") as file:
        records = _records(corpus, store, lines, file, identity, counts)
        for batch in batches(records, block):
            store.commit(batch, identity)
            counts["imported"] += len(batch)
    if counts["malformed"]:
        print(
            f"{path}: dropped {counts['malformed']:,} triples that are not three non-empty strings",
            file=sys.stderr,
        )
    return counts


def _records(
    corpus: CorpusScan,
    store: StoreWriter,
    lines: "_Lines",
    file: IO[bytes],
    identity: dict[str, Any],
    counts: dict[str, int],
) -> Iterator[Record]:
    """In the corpus's order, so that the same files give the same store."""
    for batch in batches(corpus, 500):
        entries = store.entries(passage.id for passage in batch)
        for passage in batch:
            places = lines.of(passage.id)
            if not places:
                continue
            entry, digest = entries.get(passage.id), content_hash(passage, identity)
            if entry is not None and entry.hash == digest:
                counts["reused"] += 1
                continue
            record = _record(passage, digest, [_line(lines, file, p) for p in places], counts)
            if record is not None:
                yield record


def _line(lines: "_Lines", file: IO[bytes], place: tuple[int, int]) -> tuple[str, OpenIE]:
    offset, number = place
    file.seek(offset)
    where = f"{lines.path}:{number}"
    return where, decode(where, file.readline(), OpenIE, first=number == 1)


def _record(
    passage: Passage, digest: bytes, found: Sequence[tuple[str, OpenIE]], counts: dict[str, int]
) -> Record | None:
    triples: dict[Triple, None] = {}
    for place, line in found:
        more, malformed = triples_of(place, line, passage)
        triples.update(dict.fromkeys(more))
        counts["malformed"] += malformed
    if all(line.triples is None for _, line in found):
        return None
    return Record(passage.id, digest, "ok" if triples else "empty", tuple(triples))


class _Lines:
    """Where the lines of each passage are; on disk, in a temporary file of SQLite's own."""

    def __init__(self, path: Path):
        self.path = path
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute(
            "CREATE TABLE lines (id TEXT, number INTEGER, start INTEGER, PRIMARY KEY (id, number))"
            " WITHOUT ROWID"
        )
        starts = self._starts()
        self._db.execute("BEGIN")
        for place, line in read_lines(path, OpenIE):  # the first complaint names its line
            number = int(place.rpartition(":")[2])
            values = (line.passage_id, number, starts[number])
            self._db.execute("INSERT INTO lines VALUES (?, ?, ?)", values)
        self._db.execute("COMMIT")

    def _starts(self) -> list[int]:
        import array

        found, digest, place = array.array("Q", [0]), hashlib.sha256(), 0
        with self.path.open("rb") as file:
            for raw in file:
                found.append(place)
                digest.update(raw)
                place += len(raw)
        self.digest = digest.hexdigest()
        return found  # pyright: ignore[reportReturnType]

    def ids(self) -> Iterator[str]:
        """Every passage of the file."""
        return (row[0] for row in self._db.execute("SELECT DISTINCT id FROM lines"))

    def of(self, passage_id: str) -> list[tuple[int, int]]:
        """(offset in bytes, number) of the lines of a passage."""
        query = "SELECT start, number FROM lines WHERE id = ? ORDER BY number"
        return self._db.execute(query, (passage_id,)).fetchall()

    def place(self, passage_id: str) -> int:
        """The number of a passage's first line."""
        return self.of(passage_id)[0][1]
