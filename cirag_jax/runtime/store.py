"""The journal of a run, and a cache of responses shared by several runs.

The journal is an SQLite file. It records every response before the program receives it, together
with the position (program id, ordinal, part) and the hash of the request. When a killed run
resumes, it replays the recorded responses and repeats no request. The viewer and distillation read
the same file.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.identity import check_same, differences
from cirag_jax.runtime import codec
from cirag_jax.runtime.records import JOURNAL, JournalReader, RequestKey, Totals
from cirag_jax.runtime.requests import (
    Generate,
    Generated,
    Request,
    RequestError,
    Response,
    Retrieved,
    Score,
    Scored,
)
from cirag_jax.sqlite import Database


class Journal(JournalReader):
    """A journal opened for writing, locked against other processes; a context manager.

    Attributes:
      replace: whether records that were made with other settings are dropped.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any],
        *,
        replace: bool = False,
        copy_of: Path | None = None,
    ):
        """Opens or creates the journal of a run.

        Args:
          path: path of the journal.
          settings: everything that determines the responses, as JSON.
          replace: whether to drop records that were made with other settings (see `forget`).
          copy_of: if ``path`` is a copy, the original file, which error messages name.
        """
        self._settings, self.replace = settings, replace
        self._passage_ids: set[str] = set()
        super().__init__(path, sqlite.WRITE_ALONE, copy_of)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._bind(settings, replace)
            stack.pop_all()

    def close(self) -> None:
        """Closes the journal and removes SQLite's log, so a read-only folder can be read."""
        with contextlib.suppress(sqlite3.Error):  # the log remains if the disk is full
            self._db.execute("PRAGMA journal_mode = DELETE")
        super().close()

    def _first_meta(self) -> dict[str, str]:
        meta = {"settings": codec.dump(self._settings), "id": uuid.uuid4().hex}
        return {**super()._first_meta(), **meta}

    def _bind(self, settings: Mapping[str, Any], replace: bool) -> None:
        if not self.is_bound:
            self._set_meta("settings", codec.dump(settings))
            return
        old = self.settings
        if replace and differences(old, settings):
            self._write("DELETE FROM passages")  # a changed document may keep its id
            self.forget([name for (name,) in self._rows("SELECT id FROM programs")])
            self._set_meta("settings", codec.dump(settings))
            return
        check_same(self.path, old, settings)

    def open_program(self, program: str, place: int, input: Any) -> None:
        """Records a program before its first request; deletes its errors from earlier runs."""
        text = codec.dump(input)
        row = self._row("SELECT input, error, outcome FROM programs WHERE id = ?", (program,))
        if row is None:
            self._write(
                "INSERT INTO programs (id, place, input) VALUES (?, ?, ?)", (program, place, text)
            )
            return
        if row[0] != text:
            raise UserError(
                f"{self.path} contains {program!r} with another input; use another --workdir or "
                f"remove {self.path.name}."
            )
        if row[1] is not None:
            self._write("UPDATE programs SET outcome = NULL, error = NULL WHERE id = ?", (program,))
            self._write(
                "DELETE FROM responses WHERE program = ? AND ordinal >= (SELECT MIN(ordinal) FROM "
                "responses WHERE program = ? AND json_extract(response, '$.error') IS NOT NULL)",
                (program, program),
            )
        elif row[2] is None:  # the program handled its errors, except those of its last yield
            self._write(
                "DELETE FROM responses WHERE program = ? AND ordinal = (SELECT MAX(ordinal) FROM "
                "responses WHERE program = ?) AND json_extract(response, '$.error') IS NOT NULL",
                (program, program),
            )

    def close_program(
        self, program: str, outcome: Any, error: str | None, seconds: float = 0.0
    ) -> None:
        """Records a program's result, or its error with the result so far, if there is one."""
        text = None if outcome is None else _finite(outcome, f"the result of {program!r}")
        self._write(
            "UPDATE programs SET outcome = ?, error = ?, seconds = seconds + ? WHERE id = ?",
            (text, error, seconds, program),
        )

    def count(self, name: str, totals: Totals) -> None:
        """Adds the totals of another journal, whose `id` is ``name`` and which will be removed.

        If a killed run counts the journal again, the new totals replace the old ones.
        """
        self._set_meta(f"counted/{name}", codec.dump(dataclasses.asdict(totals)))

    def forget(self, programs: Sequence[str]) -> None:
        """Drops programs whose results are stored elsewhere; `totals` still includes them."""
        rows = [(program,) for program in programs]
        with self._reading(), self._transaction():
            row = self._row("SELECT value FROM meta WHERE key = 'forgotten'")
            before = Totals() if row is None else msgspec.json.decode(row[0], type=Totals)
            dropped = dataclasses.asdict(before + self._totals(programs))
            self._set_meta("forgotten", codec.dump(dropped))
            self._db.executemany("DELETE FROM responses WHERE program = ?", rows)
            self._db.executemany("DELETE FROM programs WHERE id = ?", rows)

    def add_seconds(self, seconds: float, loading: bool = False) -> float:
        """Adds to `seconds`, or with ``loading`` to `load_seconds`; returns the new value."""
        total = seconds + (self.load_seconds if loading else self.seconds)
        self._set_meta("load_seconds" if loading else "seconds", repr(total))
        return total

    def record(self, key: RequestKey, request: Request, response: Response | RequestError) -> None:
        """Writes a response durably, so that a killed run does not lose it."""
        text = codec.dump(codec.encode_request(request))
        answer = _finite(
            codec.encode_response(request, response),
            f"the response to request {key.ordinal} of {key.program!r}",
        )
        statement = "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)"
        row = (key.program, key.ordinal, key.part, codec.digest(text), text, answer)
        passages = response.passages if isinstance(response, Retrieved) else ()
        new = [p for p in passages if p.id not in self._passage_ids]
        if not new:
            self._write(statement, row)
            return
        texts = [(p.id, codec.dump(dataclasses.asdict(p))) for p in new]
        with self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO passages VALUES (?, ?)", texts)
            self._db.execute(statement, row)
        self._passage_ids.update(p.id for p in new)


def _finite(value: Any, what: str) -> str:
    """Encodes ``value`` as JSON; if it contains NaN or infinity, the error calls it ``what``."""
    try:
        return codec.dump(value)
    except ValueError:
        raise UserError(
            f"{what} contains a number that is not finite; the weights of a model may be damaged."
        ) from None


def journal_path(folder: Path, index: int, count: int) -> Path:
    """Returns the journal's path for process ``index`` of ``count``; `JOURNAL` for one process."""
    stem, suffix = JOURNAL.split(".")
    counts = {int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{stem}.*-of-*.{suffix}")}
    if not counts and (folder / JOURNAL).exists():
        counts = {1}
    if counts - {count}:
        old = max(counts - {count})
        raise UserError(
            f"{folder} was started by {old} process{'es' * (old > 1)}, not {count}; resume it with "
            "the same number, or use another --workdir."
        )
    return folder / (JOURNAL if count == 1 else f"{stem}.{index + 1}-of-{count}.{suffix}")


_NEWLY_ENDED = (
    "SELECT id FROM part.programs AS new JOIN main.programs AS old USING (id) "
    "WHERE (old.outcome IS NULL OR old.error IS NOT NULL) "
    "AND (new.outcome IS NOT NULL OR new.error IS NOT NULL)"
)
_MERGE = (
    "INSERT OR IGNORE INTO passages SELECT * FROM part.passages",
    f"DELETE FROM main.responses WHERE program IN ({_NEWLY_ENDED})",
    f"DELETE FROM main.programs WHERE id IN ({_NEWLY_ENDED})",
    "INSERT INTO responses SELECT * FROM part.responses "
    "WHERE program NOT IN (SELECT id FROM main.programs)",
    "INSERT OR IGNORE INTO programs SELECT * FROM part.programs",
    "UPDATE meta SET value = (SELECT value FROM part.meta WHERE key = 'seconds') "
    "WHERE key = 'seconds' AND CAST(value AS REAL) < "
    "(SELECT CAST(value AS REAL) FROM part.meta WHERE key = 'seconds')",
)


def merge_journals(parts: Sequence[Path], target: Path) -> None:
    """Merges the closed journals of a run's processes into ``target``.

    If several journals contain a program, because its assignment has changed, the first journal in
    which it has ended is used.
    """
    sqlite.merge(parts[1:], target, functools.partial(shutil.copyfile, parts[0]), _MERGE)


class ResponseCache(Database):
    """Language-model responses by model and request, in a file shared by several runs.

    Several processes may write concurrently. The file is created if it does not exist.
    """

    _SCHEMA = "CREATE TABLE responses (key TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID"

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(Path(path).expanduser(), sqlite.WRITE_TOGETHER)

    def find(self, identity: Any, request: Generate | Score) -> Generated | Scored | None:
        """Returns the cached response to an equal request to an equal model.

        The response's usage has no seconds, and all prompt tokens count as cached. Returns None if
        the cache has no such response or the response is damaged.
        """
        with self._named_errors():
            rows = self._db.execute(
                "SELECT response FROM responses WHERE key = ?", (_key(identity, request),)
            )
        try:
            row = rows.fetchone()
            if row is None:
                return None
            response = codec.decode_response(request, msgspec.json.decode(row[0]))
            usage = response.usage
        except (*sqlite.ERRORS, *sqlite.DAMAGE):
            return None
        usage = dataclasses.replace(usage, cached_tokens=usage.prompt_tokens, seconds=0.0)
        return dataclasses.replace(response, usage=usage)

    def keep(self, identity: Any, request: Generate | Score, response: Generated | Scored) -> None:
        """Adds a response."""
        self._write(
            "INSERT OR REPLACE INTO responses VALUES (?, ?)",
            (_key(identity, request), codec.dump(codec.encode(response))),
        )

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite.ERRORS as error:
            raise UserError(f"config.cache={self.path} cannot be used: {error}.") from None


def _key(identity: Any, request: Generate | Score) -> str:
    encoded = codec.encode_request(dataclasses.replace(request, role=""))
    return codec.digest(codec.dump({"model": identity, "request": encoded}))
