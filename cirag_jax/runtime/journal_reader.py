"""Reads a journal that no run is writing; the file is not changed."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.identity import check_same
from cirag_jax.runtime import records
from cirag_jax.runtime.journal import FILE
from cirag_jax.runtime.records import Record, Totals
from cirag_jax.types import Passage


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """What a journal knows of every program; the file is not changed."""
    with _reading(Path(path)) as db:
        return list(records.of_programs(db, Path(path)))


def read_counts(path: str | os.PathLike[str]) -> tuple[int, int]:
    """How many programs a journal knows, and how many of them have ended; as `read_records`."""
    with _reading(Path(path)) as db:
        ended = "SUM(outcome IS NOT NULL OR error IS NOT NULL)"
        return db.execute(f"SELECT COUNT(*), IFNULL({ended}, 0) FROM programs").fetchone()


def read_passages(path: str | os.PathLike[str]) -> dict[str, Passage]:
    """All passages that the responses of a journal hold, by id; as `read_records`."""
    with _reading(Path(path)) as db:
        rows = db.execute("SELECT record FROM passages ORDER BY id")
        return {found.id: found for found in (records.passage(row[0]) for row in rows)}


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings with which a journal was begun; as `read_records`."""
    with _reading(Path(path)) as db:
        return records.settings(records.read_meta(db, Path(path)))


def read_totals(path: str | os.PathLike[str]) -> tuple[Totals, float]:
    """`Journal.totals`, and the seconds that `Journal.add_seconds` added up; as `read_records`."""
    with _reading(Path(path)) as db:
        seconds = db.execute("SELECT value FROM meta WHERE key = 'seconds'").fetchone()
        return records.forgotten(db) + records.totals(db), float(seconds[0]) if seconds else 0.0


def read_load_seconds(path: str | os.PathLike[str]) -> float:
    """What `Journal.add_seconds` added up of loading; as `read_records`."""
    with _reading(Path(path)) as db:
        seconds = db.execute("SELECT value FROM meta WHERE key = 'load_seconds'").fetchone()
        return float(seconds[0]) if seconds else 0.0


def read_sampled(path: str | os.PathLike[str]) -> bool:
    """Whether a text in a journal was sampled, not decoded greedily; as `read_records`."""
    with _reading(Path(path)) as db:
        row = db.execute(
            "SELECT 1 FROM responses WHERE json_extract(request, '$.temperature') > 0 LIMIT 1"
        ).fetchone()
        return row is not None


def check_settings(path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Raises UserError where a journal was begun with other settings; there need not be one."""
    if not Path(path).is_file():
        return
    with _reading(Path(path)) as db:
        binds = records.binds(db)
        old = records.settings(records.read_meta(db, Path(path)))
    if binds:
        check_same(path, old, settings)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection; SQLite's own errors become one sentence."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; the journal of a run is {FILE}.")
    with (
        sqlite.reading(path),
        _readable(path) as place,
        contextlib.closing(sqlite.connect(place, "ro")) as db,
    ):
        records.read_meta(db, path)
        yield db


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """The file, or a copy where a killed run left its log and SQLite may not write."""
    if not path.with_name(f"{path.name}-wal").exists() or os.access(path.parent, os.W_OK):
        yield path
        return
    with sqlite.copied(path, "-wal") as copy:
        yield copy
