"""The journal: every response, recorded in SQLite before the program that asked for it sees it.

A response is found again by (program id, ordinal, part) and the hash of its request, so a run that
was killed replays what it has and repeats nothing. The same file is the trace that the viewer shows
and the trajectory that distillation trains on.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.io import Closing, replacing
from cirag_jax.llm.types import Usage
from cirag_jax.models.io.fingerprint import check_same, differences
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Request, RequestError, Response, Retrieved
from cirag_jax.types import Passage

T = TypeVar("T")

FORMAT = 3  # 3: ranked texts, named rankers
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


@dataclasses.dataclass(frozen=True, slots=True)
class Spent:
    """Responses of language models, and the tokens that they took."""

    calls: int = 0
    usage: Usage = Usage()

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.calls + other.calls, self.usage + other.usage)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What the journal knows of one program (of a question, of a passage).

    Attributes:
      id: of the program (a question's, a passage's).
      input: what it was given, as JSON.
      outcome: its result as JSON, or None while it runs or after it failed.
      error: why it failed, or None.
      seconds: wall time from its start to its end, over all runs.
      usage: language-model tokens of all its responses.
      calls: responses of each kind of request.
      file: the journal.
      roles: language-model responses of each role.
    """

    id: str
    input: Any
    outcome: Any
    error: str | None
    seconds: float
    usage: Usage
    calls: Mapping[str, int]
    file: Path = dataclasses.field(compare=False)
    roles: Mapping[str, Spent] = dataclasses.field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether it has a result, or failed."""
        return self.outcome is not None or self.error is not None

    def given(self, kind: type[T]) -> T:
        """Its input, as `typed` makes it; raises UserError where it is damaged."""
        return typed(self.file, self.id, self.input, kind, "input")

    def result(self, kind: type[T]) -> T | None:
        """Its outcome, as `typed` makes it, or None; raises UserError where it is damaged."""
        return None if self.outcome is None else typed(self.file, self.id, self.outcome, kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """What a journal has recorded since it was started, forgotten programs included.

    ``programs`` ended; ``calls`` are responses of language models, ``usage`` is theirs by role.
    """

    programs: int = 0
    calls: int = 0
    usage: Mapping[str, Usage] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Totals") -> "Totals":
        roles = (*self.usage, *other.usage)
        usage = {r: self.usage.get(r, Usage()) + other.usage.get(r, Usage()) for r in roles}
        return Totals(self.programs + other.programs, self.calls + other.calls, usage)


class Journal(Closing):
    """An open journal; a context manager. One process writes it at a time."""

    def __init__(
        self, path: str | os.PathLike[str], settings: Mapping[str, Any], *, replace: bool = False
    ):
        """Opens or begins the journal of a run.

        ``settings`` are everything that decides what a program gets to see, as JSON. With
        ``replace``, what was recorded under others is forgotten (see `forget`).

        Raises:
          UserError: it was begun with other settings and not ``replace``, another process writes
            it, or it cannot be read or written.
        """
        self.path = Path(path)
        self._passages: dict[str, Passage] = {}
        self._known: set[str] = set()
        self._named_errors = functools.partial(sqlite.named_errors, self.path)
        self._reading = functools.partial(sqlite.reading, self.path)
        with contextlib.ExitStack() as stack, self._named_errors():
            self._db = sqlite.connect(self.path)
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
        meta = _read_meta(self._db, self.path)
        if not _binds(self._db):
            self._set("settings", codec.dump(settings))
            return
        with self._reading():
            old = _settings(meta)
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

        Raises:
          UserError: it is known with another input.
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
        """Records a program's result, which is not None, or why it failed.

        Raises:
          UserError: the result holds a number that is not finite.
        """
        text = None if error is not None else _finite(outcome, f"the result of {program!r}")
        self._write(
            "UPDATE programs SET outcome = ?, error = ?, seconds = seconds + ? WHERE id = ?",
            (text, error, seconds, program),
        )

    def outcomes(self, programs: Iterable[str] | None = None) -> dict[str, Any]:
        """Results of the programs that have one, by id; of ``programs``, None: of all."""
        chosen, values = _chosen(programs)
        with self._reading():
            rows = self._db.execute(
                f"SELECT id, outcome FROM programs WHERE outcome IS NOT NULL{chosen}", values
            )
            return {name: _outcome(self.path, name, outcome) for name, outcome in rows}

    def records(self, programs: Iterable[str] | None = None) -> Iterator[Record]:
        """What is known of ``programs``, None: of all, in the order of their places."""
        with self._reading():
            yield from _records(self._db, self.path, programs)

    def usage(self) -> Mapping[str, Usage]:
        """Tokens of all responses, by the role that gave them; see `totals`."""
        return self.totals().usage

    def totals(self) -> Totals:
        """What all programs took so far, those that were forgotten included."""
        with self._reading():
            return _forgotten(self._db) + _totals(self._db)

    def add(self, totals: Totals) -> None:
        """Counts in `totals` what another journal recorded, which is to be dropped."""
        with self._reading(), sqlite.transaction(self._db):
            self._set("forgotten", codec.dump(dataclasses.asdict(_forgotten(self._db) + totals)))

    def forget(self, programs: Sequence[str]) -> None:
        """Drops programs whose results are kept elsewhere by now; `totals` still counts them."""
        rows = [(program,) for program in programs]
        with self._reading(), sqlite.transaction(self._db):
            dropped = _totals(self._db, programs)
            self._set("forgotten", codec.dump(dataclasses.asdict(_forgotten(self._db) + dropped)))
            self._db.executemany("DELETE FROM responses WHERE program = ?", rows)
            self._db.executemany("DELETE FROM programs WHERE id = ?", rows)

    # --------------------------------------------------------------------------------- responses

    def replay(self, key: Key, request: Request) -> Response | RequestError | None:
        """The recorded response to this very request, or None.

        Raises:
          UserError: another request is recorded in its place: the method has changed since.
        """
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
            return codec.decode_response(request, _json(row[1]), self.passage)

    def record(self, key: Key, request: Request, response: Response | RequestError) -> None:
        """Writes a response; it is durable against a kill when this returns.

        Raises:
          UserError: it holds a number that is not finite, or the file cannot be written.
        """
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
        records = [(p.id, codec.dump(dataclasses.asdict(p))) for p in new]
        with self._named_errors(), sqlite.transaction(self._db):
            self._db.executemany("INSERT OR IGNORE INTO passages VALUES (?, ?)", records)
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
                self._passages[passage_id] = _passage(row[0])
        return self._passages[passage_id]


# ---------------------------------------------------------------------- several processes of a run


def share(folder: Path, index: int, count: int) -> Path:
    """The journal that one of the processes of a run writes; a single one's is `FILE`.

    Raises:
      UserError: ``folder`` holds a run of another number of processes.
    """
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

    Raises:
      UserError: a journal cannot be read, or the disk is full.
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


# --------------------------------------------------------------------------- reading what was left


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """What a journal knows of every program; the file is not changed.

    Raises:
      UserError: there is no journal, or a run is writing it.
    """
    with _reading(Path(path)) as db:
        return list(_records(db, Path(path)))


def read_counts(path: str | os.PathLike[str]) -> tuple[int, int]:
    """How many programs a journal knows, and how many of them have ended; as `read_records`."""
    with _reading(Path(path)) as db:
        ended = "SUM(outcome IS NOT NULL OR error IS NOT NULL)"
        return db.execute(f"SELECT COUNT(*), IFNULL({ended}, 0) FROM programs").fetchone()


def typed(path: Path, program: str, value: Any, kind: type[T], what: str = "result") -> T:
    """A program's result, or its input, as what it was when it was written.

    Args:
      path: of the journal.
      program: its id.
      value: as `Record` has it.
      kind: what msgspec makes of it.
      what: it is, for the message.

    Raises:
      UserError: it is no such thing, for it is damaged.
    """
    with _naming(path, program, what):
        return msgspec.convert(value, kind)


def read_passages(path: str | os.PathLike[str]) -> dict[str, Passage]:
    """All passages that the responses of a journal hold, by id; as `read_records`."""
    with _reading(Path(path)) as db:
        rows = db.execute("SELECT record FROM passages ORDER BY id")
        return {passage.id: passage for passage in (_passage(row[0]) for row in rows)}


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings with which a journal was begun; as `read_records`."""
    with _reading(Path(path)) as db:
        return _settings(_read_meta(db, Path(path)))


def read_totals(path: str | os.PathLike[str]) -> tuple[Totals, float]:
    """`Journal.totals`, and the seconds that `Journal.add_seconds` added up; as `read_records`."""
    with _reading(Path(path)) as db:
        seconds = db.execute("SELECT value FROM meta WHERE key = 'seconds'").fetchone()
        return _forgotten(db) + _totals(db), float(seconds[0]) if seconds else 0.0


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
        binds = _binds(db)
        old = _settings(_read_meta(db, Path(path)))
    if binds:
        check_same(path, old, settings)


def _binds(db: sqlite3.Connection) -> bool:
    """Whether anything is recorded that a run with other settings must not use."""
    results = "SELECT 1 FROM programs WHERE outcome IS NOT NULL"  # rules ask for no response
    return db.execute(f"SELECT 1 FROM responses UNION ALL {results} LIMIT 1").fetchone() is not None


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
        _read_meta(db, path)
        yield db


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """The file, or a copy of it and of what a killed run left beside it: SQLite reads that only
    where it may write.
    """
    log = path.with_name(f"{path.name}-wal")
    if not log.exists() or os.access(path.parent, os.W_OK):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="cirag_jax") as folder:
        for file in (path, log):
            shutil.copyfile(file, Path(folder) / file.name)
        yield Path(folder) / path.name


@contextlib.contextmanager
def _naming(path: Path, program: str, what: str = "result") -> Iterator[None]:
    """Says of which program a row is that cannot be read."""
    try:
        yield
    except sqlite.DAMAGE as error:
        raise damaged(path, program, error, what) from None


def damaged(path: Path, program: str, error: Exception, what: str = "result") -> UserError:
    """The exception to raise about a program whose result, or input, cannot be used."""
    return sqlite.damaged(f"{path}: the {what} of {program!r}", error)


def _outcome(path: Path, program: str, text: str) -> Any:
    with _naming(path, program):
        outcome = _json(text)
        if outcome is None:
            raise ValueError("null is no result")
        return outcome


def _json(text: str) -> Any:
    """JSON as it is written here, without NaN and infinities."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _settings(meta: Mapping[str, str]) -> dict[str, Any]:
    return msgspec.convert(_json(meta["settings"]), dict[str, Any])


def _finite(value: Any, what: str) -> str:
    """``value`` as JSON, which has no other numbers."""
    try:
        return codec.dump(value)
    except ValueError:
        raise UserError(
            f"{what} holds a number that is not finite: the weights of a model must be damaged."
        ) from None


def _read_meta(db: sqlite3.Connection, path: Path) -> dict[str, str]:
    meta = dict(db.execute("SELECT key, value FROM meta"))
    if meta.get("format") != str(FORMAT):
        raise UserError(
            f"{path} was written by another version of this program (format {meta.get('format')}, "
            f"not {FORMAT}); use another --workdir."
        )
    return meta


def _chosen(programs: Iterable[str] | None, column: str = "id") -> tuple[str, tuple[str, ...]]:
    """A further condition of a WHERE that is there, and its value; none where all are meant."""
    if programs is None:
        return "", ()
    names = list(programs)
    cut = [name for name in names if "\0" in name]  # json_each would end them there
    plain = codec.dump([name for name in names if "\0" not in name])
    more = f" OR {column} IN ({', '.join('?' * len(cut))})"
    return f" AND ({column} IN (SELECT value FROM json_each(?)){more})", (plain, *cut)


def _records(
    db: sqlite3.Connection, path: Path, programs: Iterable[str] | None = None
) -> Iterator[Record]:
    chosen, values = _chosen(programs)
    found = db.execute(
        f"SELECT id, input, outcome, error, seconds FROM programs WHERE TRUE{chosen} "
        "ORDER BY place, id",
        values,
    )
    for program, given, outcome, error, seconds in found:
        roles, calls = {}, dict.fromkeys(codec.KINDS.values(), 0)
        result = None if outcome is None else _outcome(path, program, outcome)
        rows = db.execute(
            "SELECT json_extract(request, '$.kind'), json_extract(request, '$.role'), response "
            "FROM responses WHERE program = ? ORDER BY ordinal, part",
            (program,),
        )
        for kind, role, response in rows:
            calls[kind] += 1
            if kind in ("generate", "score"):
                used = Usage(**_json(response).get("usage", {}))
                roles[role] = roles.get(role, Spent()) + Spent(1, used)
        usage = sum((spent.usage for spent in roles.values()), start=Usage())
        yield Record(program, _json(given), result, error, seconds, usage, calls, path, roles)


def _totals(db: sqlite3.Connection, programs: Sequence[str] | None = None) -> Totals:
    """Of ``programs``, None: of all that stand in the journal."""
    chosen, values = _chosen(programs)
    ended = db.execute(
        "SELECT COUNT(*) FROM programs WHERE (outcome IS NOT NULL OR error IS NOT NULL)" + chosen,
        values,
    )
    chosen, values = _chosen(programs, "program")
    rows = db.execute(
        "SELECT json_extract(request, '$.role'), response FROM responses "
        "WHERE json_extract(request, '$.kind') IN ('generate', 'score')" + chosen,
        values,
    )
    calls, usage = 0, collections.defaultdict[str, Usage](Usage)
    for role, response in rows:
        calls += 1
        usage[role] += Usage(**_json(response).get("usage", {}))
    return Totals(ended.fetchone()[0], calls, dict(usage))


def _forgotten(db: sqlite3.Connection) -> Totals:
    row = db.execute("SELECT value FROM meta WHERE key = 'forgotten'").fetchone()
    return Totals() if row is None else msgspec.convert(_json(row[0]), Totals)


def _passage(text: str) -> Passage:
    return msgspec.convert(_json(text), Passage)
