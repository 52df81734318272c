"""Reading of journals, and the records of programs."""

import collections
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.identity import check_same
from cirag_jax.llm.types import Usage
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Generate, Generated, Request, RequestError, Response
from cirag_jax.sqlite import Database
from cirag_jax.types import Passage

T = TypeVar("T")

JOURNAL = "journal.sqlite"
_SUCCEEDED = "outcome IS NOT NULL AND error IS NULL"  # condition on programs


@dataclasses.dataclass(frozen=True, slots=True)
class RequestKey:
    """A request's position: the ``program``, its yield ``ordinal``, and the index in a list."""

    program: str
    ordinal: int
    part: int = 0


class Generation(NamedTuple):
    """A request for a text, its position, and its response."""

    key: RequestKey
    request: Generate
    response: Generated


@dataclasses.dataclass(frozen=True, slots=True)
class ModelUsage:
    """The number of language-model calls and their tokens."""

    calls: int = 0
    usage: Usage = Usage()

    def __add__(self, other: "ModelUsage") -> "ModelUsage":
        return ModelUsage(self.calls + other.calls, self.usage + other.usage)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The record of one program.

    Attributes:
      id: id of the program, such as a question's or a passage's id.
      input: input of the program, as JSON.
      outcome: result as JSON; None if the program has not ended. A failed program may have a
        partial result.
      error: the reason for a failure.
      seconds: wall time from start to end, summed over all runs.
      usage: total token usage of language models.
      calls: number of responses by kind of request.
      file: the journal.
      roles: usage of language models by role.
    """

    id: str
    input: Any
    outcome: Any
    error: str | None
    seconds: float
    usage: Usage
    calls: Mapping[str, int]
    file: Path = dataclasses.field(compare=False)
    roles: Mapping[str, ModelUsage] = dataclasses.field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether the program has a result or has failed."""
        return self.outcome is not None or self.error is not None

    def input_as(self, kind: type[T]) -> T:
        """Returns the input, converted to ``kind``."""
        return convert(self.file, self.id, self.input, kind, "input")

    @property
    def has_succeeded(self) -> bool:
        """Whether the program has a result and has not failed."""
        return self.outcome is not None and self.error is None

    def result(self, kind: type[T], *, partial: bool = False) -> T | None:
        """Returns the outcome, converted to ``kind``, or None without an outcome.

        The partial result of a failed program is only returned if ``partial`` is set.
        """
        if self.outcome is None or not (partial or self.has_succeeded):
            return None
        return convert(self.file, self.id, self.outcome, kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """Totals over all programs that a journal has ever recorded, including dropped programs.

    ``programs`` is the number of ended programs, ``calls`` the number of language-model calls, and
    ``usage`` the token usage by role.
    """

    programs: int = 0
    calls: int = 0
    usage: Mapping[str, Usage] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Totals") -> "Totals":
        roles = (*self.usage, *other.usage)
        usage = {r: self.usage.get(r, Usage()) + other.usage.get(r, Usage()) for r in roles}
        return Totals(self.programs + other.programs, self.calls + other.calls, usage)


def convert(path: Path, program: str, value: Any, kind: type[T], what: str = "result") -> T:
    """Converts a program's result or input, read from journal ``path``, to the type ``kind``.

    Raises `UserError` if the value is damaged; the message calls it ``what``.
    """
    with _reporting_damage(path, program, what):
        return msgspec.convert(value, kind)


def damaged(path: Path, program: str, error: Exception, what: str = "result") -> UserError:
    """Returns the exception for a program whose result or input is damaged."""
    return sqlite.damaged(f"{path}: the {what} of {program!r}", error)


@contextlib.contextmanager
def _reporting_damage(path: Path, program: str, what: str = "result") -> Iterator[None]:
    """Converts decoding errors to a `UserError` that names the program."""
    try:
        yield
    except sqlite.DAMAGE as error:
        raise damaged(path, program, error, what) from None


class JournalReader(Database):
    """A journal opened for reading, while no run writes to it; a context manager."""

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
    _FORMAT = 3  # since 3, with ranked texts and named rankers

    def __init__(
        self,
        path: str | os.PathLike[str],
        access: sqlite.Access = sqlite.READ,
        named: Path | None = None,
    ):
        """Opens a journal; if ``path`` is a copy of ``named``, error messages name ``named``."""
        if not access.writes and not Path(path).is_file():
            raise UserError(f"{path} does not exist; the journal of a run is {JOURNAL}.")
        self._passages: dict[str, Passage] = {}
        super().__init__(path, access, named)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with which the journal was created."""
        with self._reading():
            return msgspec.json.decode(self._meta("settings") or "", type=dict[str, Any])

    @property
    def is_bound(self) -> bool:
        """Whether the journal has responses or results, so its settings must not change."""
        results = f"SELECT 1 FROM programs WHERE {_SUCCEEDED}"  # some make no requests
        return self._row(f"SELECT 1 FROM responses UNION ALL {results} LIMIT 1") is not None

    @property
    def id(self) -> str:
        """A unique identifier of the journal."""
        return self._meta("id") or self.path.name  # journals of earlier versions have no id

    @property
    def seconds(self) -> float:
        """Total wall time of all runs that used this journal."""
        return self._number("seconds")

    @property
    def load_seconds(self) -> float:
        """Total wall time of all runs before their first requests."""
        return self._number("load_seconds")

    @property
    def is_sampled(self) -> bool:
        """Whether any text was sampled instead of decoded greedily."""
        query = "SELECT 1 FROM responses WHERE json_extract(request, '$.temperature') > 0 LIMIT 1"
        return self._row(query) is not None

    def _number(self, key: str) -> float:
        text = self._meta(key)
        with self._reading():
            return 0.0 if text is None else float(text)

    def records(self, programs: Iterable[str] | None = None) -> Iterator[Record]:
        """Yields the records of ``programs``, by default all, in the order of their places."""
        condition, values = _where_in(programs)
        query = (
            f"SELECT id, input, outcome, error, seconds FROM programs WHERE TRUE{condition} "
            "ORDER BY place, id"
        )
        with self._reading():
            for row in self._db.execute(query, values):
                yield self._record(*row)

    def _record(
        self, program: str, input: str, outcome: str | None, error: str | None, seconds: float
    ) -> Record:
        roles, calls = {}, dict.fromkeys(codec.KINDS.values(), 0)
        result = None if outcome is None else _decode_outcome(self.path, program, outcome)
        rows = self._db.execute(
            "SELECT json_extract(request, '$.kind'), json_extract(request, '$.role'), response "
            "FROM responses WHERE program = ? ORDER BY ordinal, part",
            (program,),
        )
        for kind, role, response in rows:
            calls[kind] += 1
            if kind in ("generate", "score"):
                roles[role] = roles.get(role, ModelUsage()) + ModelUsage(1, _usage(response))
        usage = sum((role.usage for role in roles.values()), start=Usage())
        decoded = msgspec.json.decode(input)
        return Record(program, decoded, result, error, seconds, usage, calls, self.path, roles)

    def outcomes(self, programs: Iterable[str] | None = None) -> dict[str, Any]:
        """Returns the existing results of ``programs``, by default all, by id."""
        condition, values = _where_in(programs)
        query = f"SELECT id, outcome FROM programs WHERE {_SUCCEEDED}{condition}"
        with self._reading():
            rows = self._db.execute(query, values)
            return {name: _decode_outcome(self.path, name, outcome) for name, outcome in rows}

    def counts(self) -> tuple[int, int]:
        """Returns the number of programs and the number of ended programs."""
        ended = "SUM(outcome IS NOT NULL OR error IS NOT NULL)"
        return self._row(f"SELECT COUNT(*), IFNULL({ended}, 0) FROM programs")

    def totals(self) -> Totals:
        """Returns the totals of all programs, including dropped programs."""
        with self._reading():
            return self._dropped_totals() + self._totals()

    def usage(self) -> Mapping[str, Usage]:
        """Returns the usage of all programs by role; see `totals`."""
        return self.totals().usage

    def _totals(self, programs: Sequence[str] | None = None) -> Totals:
        """Returns the totals of ``programs``, by default all in the journal."""
        condition, values = _where_in(programs)
        ended = self._db.execute(
            "SELECT COUNT(*) FROM programs WHERE (outcome IS NOT NULL OR error IS NOT NULL)"
            + condition,
            values,
        )
        condition, values = _where_in(programs, "program")
        rows = self._db.execute(
            "SELECT json_extract(request, '$.role'), response FROM responses "
            "WHERE json_extract(request, '$.kind') IN ('generate', 'score')" + condition,
            values,
        )
        calls, usage = 0, collections.defaultdict[str, Usage](Usage)
        for role, response in rows:
            calls += 1
            usage[role] += _usage(response)
        return Totals(ended.fetchone()[0], calls, dict(usage))

    def _dropped_totals(self) -> Totals:
        """Returns the totals of dropped programs and of the journals added by `Journal.count`."""
        rows = self._db.execute(
            "SELECT value FROM meta WHERE key = 'forgotten' OR key GLOB 'counted/*'"
        )
        return sum((msgspec.json.decode(row[0], type=Totals) for row in rows), start=Totals())

    def generations(self, program: str) -> list[Generation]:
        """Returns the generations of a program that did not fail, in order."""
        query = (
            "SELECT ordinal, part, request, response FROM responses WHERE program = ? "
            "AND json_extract(request, '$.kind') = 'generate' "
            "AND json_extract(response, '$.error') IS NULL ORDER BY ordinal, part"
        )
        with _reporting_damage(self.path, program, "conversation"):
            return [
                Generation(
                    RequestKey(program, ordinal, part),
                    msgspec.json.decode(request, type=Generate),
                    msgspec.json.decode(response, type=Generated),
                )
                for ordinal, part, request, response in self._rows(query, (program,))
            ]

    def replay(self, key: RequestKey, request: Request) -> Response | RequestError | None:
        """Returns the recorded response to a request, if there is one."""
        row = self._row(
            "SELECT request_hash, response FROM responses "
            "WHERE program = ? AND ordinal = ? AND part = ?",
            (key.program, key.ordinal, key.part),
        )
        if row is None:
            return None
        if row[0] != codec.digest(codec.dump(codec.encode_request(request))):
            raise UserError(
                f"{self.path} has a different request {key.ordinal} of {key.program!r}, because "
                "the method or its prompts have changed; use another --workdir."
            )
        with self._reading():
            return codec.decode_response(request, msgspec.json.decode(row[1]), self.passage)

    def passages(self) -> dict[str, Passage]:
        """Returns all passages in the recorded responses, by id."""
        with self._reading():
            rows = self._db.execute("SELECT record FROM passages ORDER BY id")
            return {passage.id: passage for passage in (_passage(row[0]) for row in rows)}

    def passage(self, passage_id: str) -> Passage:
        """Returns a passage from the recorded responses; raises KeyError if none has it."""
        if passage_id not in self._passages:
            row = self._row("SELECT record FROM passages WHERE id = ?", (passage_id,))
            if row is None:
                raise KeyError(passage_id)
            with self._reading():
                self._passages[passage_id] = _passage(row[0])
        return self._passages[passage_id]


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Returns the records of a journal."""
    with JournalReader(path) as journal:
        return list(journal.records())


def read_passages(path: str | os.PathLike[str]) -> dict[str, Passage]:
    """Returns the passages of a journal by id."""
    with JournalReader(path) as journal:
        return journal.passages()


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the settings of a journal."""
    with JournalReader(path) as journal:
        return journal.settings


def check_settings(path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Raises `UserError` if the journal ``path`` exists and has different settings."""
    if not Path(path).is_file():
        return
    with JournalReader(path) as journal:
        if journal.is_bound:
            check_same(path, journal.settings, settings)


def _where_in(programs: Iterable[str] | None, column: str = "id") -> tuple[str, tuple[str, ...]]:
    """Returns an SQL condition that selects programs and its values; empty for all programs."""
    if programs is None:
        return "", ()
    names = list(programs)
    with_null = [name for name in names if "\0" in name]  # json_each would truncate them
    others = codec.dump([name for name in names if "\0" not in name])
    more = f" OR {column} IN ({', '.join('?' * len(with_null))})"
    return f" AND ({column} IN (SELECT value FROM json_each(?)){more})", (others, *with_null)


def _decode_outcome(path: Path, program: str, text: str) -> Any:
    with _reporting_damage(path, program):
        outcome = msgspec.json.decode(text)  # rejects NaN and lone surrogates
        if outcome is None:
            raise ValueError("the result is null")
        return outcome


def _passage(text: str) -> Passage:
    return msgspec.json.decode(text, type=Passage)


def _usage(response: str) -> Usage:
    return Usage(**msgspec.json.decode(response).get("usage", {}))
