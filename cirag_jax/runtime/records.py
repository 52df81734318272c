"""The records of a journal, one a program, and their reader."""

import collections
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.identity import check_same
from cirag_jax.llm.types import Usage
from cirag_jax.runtime import codec
from cirag_jax.runtime.requests import Request, RequestError, Response
from cirag_jax.sqlite import Database
from cirag_jax.types import Passage

T = TypeVar("T")

JOURNAL = "journal.sqlite"


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
    """What a journal has recorded since it was started, dropped programs included.

    ``programs`` ended; ``calls`` are responses of language models, ``usage`` is theirs by role.
    """

    programs: int = 0
    calls: int = 0
    usage: Mapping[str, Usage] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Totals") -> "Totals":
        roles = (*self.usage, *other.usage)
        usage = {r: self.usage.get(r, Usage()) + other.usage.get(r, Usage()) for r in roles}
        return Totals(self.programs + other.programs, self.calls + other.calls, usage)


def typed(path: Path, program: str, value: Any, kind: type[T], what: str = "result") -> T:
    """A program's result, or its input, as what it was when it was written.

    Args:
      path: of the journal.
      program: its id.
      value: as `Record` has it.
      kind: what msgspec makes of it.
      what: it is, for the message.
    """
    with _naming(path, program, what):
        return msgspec.convert(value, kind)


def damaged(path: Path, program: str, error: Exception, what: str = "result") -> UserError:
    """The exception to raise about a program whose result, or input, cannot be used."""
    return sqlite.damaged(f"{path}: the {what} of {program!r}", error)


@contextlib.contextmanager
def _naming(path: Path, program: str, what: str = "result") -> Iterator[None]:
    """Says of which program a row is that cannot be read."""
    try:
        yield
    except sqlite.DAMAGE as error:
        raise damaged(path, program, error, what) from None


# ------------------------------------------------------------------------------------ the reader


class JournalReader(Database):
    """A journal open for reading, while no run writes it; a context manager."""

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
    _FORMAT = 3  # 3: ranked texts, named rankers

    def __init__(
        self,
        path: str | os.PathLike[str],
        access: sqlite.Access = sqlite.READ,
        named: Path | None = None,
    ):
        """Opens a journal; ``named`` is the path in error messages, where ``path`` is a copy."""
        if not access.writes and not Path(path).is_file():
            raise UserError(f"{path} does not exist; the journal of a run is {JOURNAL}.")
        self._passages: dict[str, Passage] = {}
        super().__init__(path, access, named)

    # ---------------------------------------------------------------------------------- the run

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with which the journal was begun."""
        with self._reading():
            return msgspec.json.decode(self._meta("settings") or "", type=dict[str, Any])

    @property
    def is_bound(self) -> bool:
        """Whether anything is recorded that a run with other settings must not use."""
        results = "SELECT 1 FROM programs WHERE outcome IS NOT NULL"  # rules ask for no response
        return self._row(f"SELECT 1 FROM responses UNION ALL {results} LIMIT 1") is not None

    @property
    def id(self) -> str:
        """An identifier that no other journal has."""
        return self._meta("id") or self.path.name  # earlier versions wrote none

    @property
    def seconds(self) -> float:
        """Wall time of all runs on this journal."""
        return self._number("seconds")

    @property
    def load_seconds(self) -> float:
        """Wall time of all runs on this journal until their first requests."""
        return self._number("load_seconds")

    @property
    def is_sampled(self) -> bool:
        """Whether a text was sampled, not decoded greedily."""
        query = "SELECT 1 FROM responses WHERE json_extract(request, '$.temperature') > 0 LIMIT 1"
        return self._row(query) is not None

    def _number(self, key: str) -> float:
        text = self._meta(key)
        with self._reading():
            return 0.0 if text is None else float(text)

    # ----------------------------------------------------------------------------- the programs

    def records(self, programs: Iterable[str] | None = None) -> Iterator[Record]:
        """The records of ``programs``, or of all, in the order of their places."""
        chosen, values = _chosen(programs)
        query = (
            f"SELECT id, input, outcome, error, seconds FROM programs WHERE TRUE{chosen} "
            "ORDER BY place, id"
        )
        with self._reading():
            for row in self._db.execute(query, values):
                yield self._record(*row)

    def _record(
        self, program: str, given: str, outcome: str | None, error: str | None, seconds: float
    ) -> Record:
        roles, calls = {}, dict.fromkeys(codec.KINDS.values(), 0)
        result = None if outcome is None else _decoded(self.path, program, outcome)
        rows = self._db.execute(
            "SELECT json_extract(request, '$.kind'), json_extract(request, '$.role'), response "
            "FROM responses WHERE program = ? ORDER BY ordinal, part",
            (program,),
        )
        for kind, role, response in rows:
            calls[kind] += 1
            if kind in ("generate", "score"):
                roles[role] = roles.get(role, Spent()) + Spent(1, _usage(response))
        usage = sum((spent.usage for spent in roles.values()), start=Usage())
        given = msgspec.json.decode(given)
        return Record(program, given, result, error, seconds, usage, calls, self.path, roles)

    def outcomes(self, programs: Iterable[str] | None = None) -> dict[str, Any]:
        """Results of the programs that have one, by id; of ``programs``, or of all."""
        chosen, values = _chosen(programs)
        query = f"SELECT id, outcome FROM programs WHERE outcome IS NOT NULL{chosen}"
        with self._reading():
            rows = self._db.execute(query, values)
            return {name: _decoded(self.path, name, outcome) for name, outcome in rows}

    def counts(self) -> tuple[int, int]:
        """Number of programs, and how many of them have ended."""
        ended = "SUM(outcome IS NOT NULL OR error IS NOT NULL)"
        return self._row(f"SELECT COUNT(*), IFNULL({ended}, 0) FROM programs")

    def totals(self) -> Totals:
        """What all programs took so far, those that left the journal included."""
        with self._reading():
            return self._left() + self._totals()

    def usage(self) -> Mapping[str, Usage]:
        """Tokens of all responses, by the role that gave them; see `totals`."""
        return self.totals().usage

    def _totals(self, programs: Sequence[str] | None = None) -> Totals:
        """What ``programs``, or all in the journal, took."""
        chosen, values = _chosen(programs)
        ended = self._db.execute(
            "SELECT COUNT(*) FROM programs WHERE (outcome IS NOT NULL OR error IS NOT NULL)"
            + chosen,
            values,
        )
        chosen, values = _chosen(programs, "program")
        rows = self._db.execute(
            "SELECT json_extract(request, '$.role'), response FROM responses "
            "WHERE json_extract(request, '$.kind') IN ('generate', 'score')" + chosen,
            values,
        )
        calls, usage = 0, collections.defaultdict[str, Usage](Usage)
        for role, response in rows:
            calls += 1
            usage[role] += _usage(response)
        return Totals(ended.fetchone()[0], calls, dict(usage))

    def _left(self) -> Totals:
        """What the programs took that left the journal, and those of other journals."""
        rows = self._db.execute(
            "SELECT value FROM meta WHERE key = 'forgotten' OR key GLOB 'counted/*'"
        )
        return sum((msgspec.json.decode(row[0], type=Totals) for row in rows), start=Totals())

    # ---------------------------------------------------------------------------- the responses

    def replay(self, key: Key, request: Request) -> Response | RequestError | None:
        """The recorded response to this very request, or None."""
        row = self._row(
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

    def passages(self) -> dict[str, Passage]:
        """All passages of the recorded responses, by id."""
        with self._reading():
            rows = self._db.execute("SELECT record FROM passages ORDER BY id")
            return {passage.id: passage for passage in (_passage(row[0]) for row in rows)}

    def passage(self, passage_id: str) -> Passage:
        """A passage of a recorded response.

        Raises:
          KeyError: no response has it.
        """
        if passage_id not in self._passages:
            row = self._row("SELECT record FROM passages WHERE id = ?", (passage_id,))
            if row is None:
                raise KeyError(passage_id)
            with self._reading():
                self._passages[passage_id] = _passage(row[0])
        return self._passages[passage_id]


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The record of every program of a journal."""
    with JournalReader(path) as book:
        return list(book.records())


def read_passages(path: str | os.PathLike[str]) -> dict[str, Passage]:
    """All passages of the responses of a journal, by id."""
    with JournalReader(path) as book:
        return book.passages()


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings with which a journal was begun."""
    with JournalReader(path) as book:
        return book.settings


def check_settings(path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Raises `UserError` where the journal ``path``, if any, is of a run with other settings."""
    if not Path(path).is_file():
        return
    with JournalReader(path) as book:
        is_bound, old = book.is_bound, book.settings
    if is_bound:
        check_same(path, old, settings)


def _chosen(programs: Iterable[str] | None, column: str = "id") -> tuple[str, tuple[str, ...]]:
    """A further condition of a WHERE clause, and its values; both empty for all programs."""
    if programs is None:
        return "", ()
    names = list(programs)
    cut = [name for name in names if "\0" in name]  # json_each would end them there
    plain = codec.dump([name for name in names if "\0" not in name])
    more = f" OR {column} IN ({', '.join('?' * len(cut))})"
    return f" AND ({column} IN (SELECT value FROM json_each(?)){more})", (plain, *cut)


def _decoded(path: Path, program: str, text: str) -> Any:
    """A program's result."""
    with _naming(path, program):
        outcome = msgspec.json.decode(text)  # refuses NaN and halves of surrogate pairs
        if outcome is None:
            raise ValueError("null is no result")
        return outcome


def _passage(text: str) -> Passage:
    return msgspec.json.decode(text, type=Passage)


def _usage(response: str) -> Usage:
    return Usage(**msgspec.json.decode(response).get("usage", {}))
