"""The journal: every response, recorded in SQLite before the program that asked for it sees it.

A response is found again by (program id, ordinal, part) and the hash of its request, so a run that
was killed replays what it has and repeats nothing. The same file is the trace that the viewer shows
and the trajectory that distillation trains on.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.identity import check_same, differences
from cirag_jax.io import Closing, replacing
from cirag_jax.llm.types import Usage
from cirag_jax.runtime import codec, records
from cirag_jax.runtime.records import FORMAT, Record, Totals
from cirag_jax.runtime.requests import Request, RequestError, Response, Retrieved
from cirag_jax.types import Passage

FILE = "journal.sqlite"

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE passages (id TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE programs (
  id TEXT PRIMARY KEY, place INTEGER NOT NULL, input TEXT NOT NULL,
  outcome TEXT, error TEXT, seconds REAL NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE responses (
  program TEXT NOT NULL, ordinal INTEGER NOT NULL, part INTEGER NOT NULL,
  request_hash TEXT NOT NULL, request TEXT NOT NULL, response TEXT NOT NULL,
  PRIMARY KEY (program, ordinal, part)) WITHOUT ROWID;
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """Which request: the ``ordinal``-th yield of ``program``, its ``part``-th where a list."""

    program: str
    ordinal: int
    part: int = 0


class Journal(Closing):
    """An open journal; a context manager. One process writes it at a time."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any],
        *,
        replace: bool = False,
        copy_of: Path | None = None,
    ):
        """Opens or begins the journal of a run.

        ``settings`` are everything that decides what a program gets to see, as JSON. With
        ``replace``, what was recorded under others is forgotten (see `forget`). Of a
        copy, errors name the file ``copy_of``.
        """
        self.path = copy_of or Path(path)
        self._passages: dict[str, Passage] = {}
        self._known: set[str] = set()
        self._named_errors = functools.partial(sqlite.named_errors, self.path)
        self._reading = functools.partial(sqlite.reading, self.path)
        with contextlib.ExitStack() as stack, self._named_errors():
            self._db = sqlite.connect(Path(path))
            stack.enter_context(contextlib.closing(self._db))  # what is refused: others may use it
            self._begin(settings, replace)
            stack.pop_all()

    def close(self) -> None:
        """Closes the file; it is then a single one again, which a read-only folder may hold."""
        with contextlib.suppress(sqlite3.Error):  # a full disk: the log stays beside it
            self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.close()

    def _begin(self, settings: Mapping[str, Any], replace: bool) -> None:
        # Held until the process ends: two runs on one workdir would each repeat the other's work.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # a kill loses nothing, a power cut little
        with sqlite.transaction(self._db):
            rows = [("format", str(FORMAT)), ("settings", codec.dump(settings))]
            sqlite.create(self._db, _SCHEMA, rows)
        meta = records.read_meta(self._db, self.path)
        if not records.binds(self._db):
            self._set("settings", codec.dump(settings))
            return
        with self._reading():
            old = records.settings(meta)
        if replace and differences(old, settings):
            self.forget([name for (name,) in self._db.execute("SELECT id FROM programs")])
            self._set("settings", codec.dump(settings))
            return
        check_same(self.path, old, settings)

    def _set(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # ---------------------------------------------------------------------------------- programs

    def open_program(self, program: str, place: int, input: Any) -> None:
        """Notes a program before its first request; what failed in it before is forgotten, be it
        that the program ended with it or that the run was stopped before.
        """
        text = codec.dump(input)
        row = self._one("SELECT input, error, outcome FROM programs WHERE id = ?", (program,))
        if row is None:
            self._write(
                "INSERT INTO programs (id, place, input) VALUES (?, ?, ?)", (program, place, text)
            )
            return
        if row[0] != text:
            raise UserError(
                f"{self.path} knows {program!r} with another input; use another --workdir or "
                f"remove {self.path.name}."
            )
        if row[1] is not None:
            self._write("UPDATE programs SET error = NULL WHERE id = ?", (program,))
            self._write(
                "DELETE FROM responses WHERE program = ? AND ordinal >= (SELECT MIN(ordinal) FROM "
                "responses WHERE program = ? AND json_extract(response, '$.error') IS NOT NULL)",
                (program, program),
            )
        elif row[2] is None:  # it survived those before its last request
            self._write(
                "DELETE FROM responses WHERE program = ? AND ordinal = (SELECT MAX(ordinal) FROM "
                "responses WHERE program = ?) AND json_extract(response, '$.error') IS NOT NULL",
                (program, program),
            )

    def close_program(
        self, program: str, outcome: Any, error: str | None, seconds: float = 0.0
    ) -> None:
        """Records a program's result, which is not None, or why it failed."""
        text = None if error is not None else _finite(outcome, f"the result of {program!r}")
        self._write(
            "UPDATE programs SET outcome = ?, error = ?, seconds = seconds + ? WHERE id = ?",
            (text, error, seconds, program),
        )

    def outcomes(self, programs: Iterable[str] | None = None) -> dict[str, Any]:
        """Results of the programs that have one, by id; of ``programs``, None: of all."""
        with self._reading():
            return records.outcomes(self._db, self.path, programs)

    def records(self, programs: Iterable[str] | None = None) -> Iterator[Record]:
        """What is known of ``programs``, None: of all, in the order of their places."""
        with self._reading():
            yield from records.of_programs(self._db, self.path, programs)

    def usage(self) -> Mapping[str, Usage]:
        """Tokens of all responses, by the role that gave them; see `totals`."""
        return self.totals().usage

    def totals(self) -> Totals:
        """What all programs took so far, those that were forgotten included."""
        with self._reading():
            return records.forgotten(self._db) + records.totals(self._db)

    def add(self, totals: Totals, name: str) -> None:
        """Counts in `totals` what another journal recorded, which is to be dropped; see `added`."""
        with self._reading(), sqlite.transaction(self._db):
            self._add_forgotten(totals)
            self._set("added", name)

    def added(self) -> str | None:
        """The name last given to `add`: a kill may have come before that journal was dropped."""
        row = self._one("SELECT value FROM meta WHERE key = 'added'", ())
        return row[0] if row else None

    def forget_added(self) -> None:
        """To be called once it is dropped, before another journal may have its name."""
        self._write("DELETE FROM meta WHERE key = 'added'", ())

    def forget(self, programs: Sequence[str]) -> None:
        """Drops programs whose results are kept elsewhere by now; `totals` still counts them."""
        rows = [(program,) for program in programs]
        with self._reading(), sqlite.transaction(self._db):
            self._add_forgotten(records.totals(self._db, programs))
            self._db.executemany("DELETE FROM responses WHERE program = ?", rows)
            self._db.executemany("DELETE FROM programs WHERE id = ?", rows)

    def _add_forgotten(self, totals: Totals) -> None:
        self._set("forgotten", codec.dump(dataclasses.asdict(records.forgotten(self._db) + totals)))

    # --------------------------------------------------------------------------------- responses

    def replay(self, key: Key, request: Request) -> Response | RequestError | None:
        """The recorded response to this very request, or None."""
        row = self._one(
            "SELECT request_hash, response FROM responses "
            "WHERE program = ? AND ordinal = ? AND part = ?",
            (key.program, key.ordinal, key.part),
        )
        if row is None:
            return None
        if row[0] != codec.digest(codec.dump(codec.encode_request(request))):
            raise UserError(
                f"{self.path} records another request {key.ordinal} of {key.program!r}: the method "
                "or its prompts changed since; use another --workdir."
            )
        with self._reading():
            return codec.decode_response(request, msgspec.json.decode(row[1]), self.passage)

    def record(self, key: Key, request: Request, response: Response | RequestError) -> None:
        """Writes a response; it is durable against a kill when this returns."""
        text = codec.dump(codec.encode_request(request))
        answer = _finite(
            codec.encode_response(request, response),
            f"the response to request {key.ordinal} of {key.program!r}",
        )
        statement = "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)"
        row = (key.program, key.ordinal, key.part, codec.digest(text), text, answer)
        passages = response.passages if isinstance(response, Retrieved) else ()
        new = [p for p in passages if p.id not in self._known]
        if not new:
            self._write(statement, row)
            return
        texts = [(p.id, codec.dump(dataclasses.asdict(p))) for p in new]
        with self._named_errors(), sqlite.transaction(self._db):
            self._db.executemany("INSERT OR IGNORE INTO passages VALUES (?, ?)", texts)
            self._db.execute(statement, row)
        self._known.update(p.id for p in new)

    def add_seconds(self, seconds: float, loading: bool = False) -> float:
        """Adds to the wall time of this run's earlier parts, or to its part until the first
        request; returns the sum.
        """
        key = "load_seconds" if loading else "seconds"
        row = self._one("SELECT value FROM meta WHERE key = ?", (key,))
        with self._reading():
            total = seconds + (float(row[0]) if row else 0.0)
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, repr(total)))
        return total

    def _write(self, statement: str, values: Sequence[Any]) -> None:
        with self._named_errors():
            self._db.execute(statement, values)

    def _one(self, query: str, values: Sequence[Any]) -> tuple[Any, ...] | None:
        with self._named_errors():
            return self._db.execute(query, values).fetchone()

    def passage(self, passage_id: str) -> Passage:
        """A passage that a recorded response holds.

        Raises:
          KeyError: none does.
        """
        if passage_id not in self._passages:
            row = self._one("SELECT record FROM passages WHERE id = ?", (passage_id,))
            if row is None:
                raise KeyError(passage_id)
            with self._reading():
                self._passages[passage_id] = records.passage(row[0])
        return self._passages[passage_id]


# ---------------------------------------------------------------------- several processes of a run


def share(folder: Path, index: int, count: int) -> Path:
    """The journal that one of the processes of a run writes; a single one's is `FILE`."""
    stem, suffix = FILE.split(".")
    counts = {int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{stem}.*-of-*.{suffix}")}
    if not counts and (folder / FILE).exists():
        counts = {1}
    if counts - {count}:
        old = max(counts - {count})
        raise UserError(
            f"{folder} was started by {old} process{'es' * (old > 1)}, not {count}; resume it with "
            "as many or use another --workdir."
        )
    return folder / (FILE if count == 1 else f"{stem}.{index + 1}-of-{count}.{suffix}")


_ENDED_LATER = (
    "SELECT id FROM part.programs AS new JOIN main.programs AS old USING (id) "
    "WHERE old.outcome IS NULL AND (new.outcome IS NOT NULL OR new.error IS NOT NULL)"
)


def merge(parts: Sequence[Path], target: Path) -> None:
    """Writes one journal, ``target``, with what every process of a run recorded in its own.

    The journals are closed. Where several know a program, which was dealt otherwise before, the
    first that came to its end is taken.
    """
    with sqlite.named_errors(target), replacing(target) as aside:
        shutil.copyfile(parts[0], aside)
        with contextlib.closing(sqlite.connect(aside)) as db:
            for part in parts[1:]:
                db.execute("ATTACH ? AS part", (str(part),))
                db.execute("INSERT OR IGNORE INTO passages SELECT * FROM part.passages")
                db.execute(f"DELETE FROM main.responses WHERE program IN ({_ENDED_LATER})")
                db.execute(f"DELETE FROM main.programs WHERE id IN ({_ENDED_LATER})")
                db.execute(
                    "INSERT INTO responses SELECT * FROM part.responses "
                    "WHERE program NOT IN (SELECT id FROM main.programs)"
                )
                db.execute("INSERT OR IGNORE INTO programs SELECT * FROM part.programs")
                db.execute(
                    "UPDATE meta SET value = (SELECT value FROM part.meta WHERE key = 'seconds') "
                    "WHERE key = 'seconds' AND CAST(value AS REAL) < "
                    "(SELECT CAST(value AS REAL) FROM part.meta WHERE key = 'seconds')"
                )
                db.execute("DETACH part")


def _finite(value: Any, what: str) -> str:
    """``value`` as JSON, which has no other numbers."""
    try:
        return codec.dump(value)
    except ValueError:
        raise UserError(
            f"{what} holds a number that is not finite: the weights of a model must be damaged."
        ) from None
