"""What the rows of a journal say: of each program, and of all that was spent."""

import collections
import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cirag_jax import sqlite
from cirag_jax.errors import UserError
from cirag_jax.llm.types import Usage
from cirag_jax.runtime import codec
from cirag_jax.types import Passage

T = TypeVar("T")

FORMAT = 3  # 3: ranked texts, named rankers


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


# ------------------------------------------------------------------------- of an open database


def read_meta(db: sqlite3.Connection, path: Path) -> dict[str, str]:
    """Its table ``meta``."""
    meta = dict(db.execute("SELECT key, value FROM meta"))
    if meta.get("format") != str(FORMAT):
        raise UserError(
            f"{path} was written by another version of this program (format {meta.get('format')}, "
            f"not {FORMAT}); use another --workdir."
        )
    return meta


def settings(meta: Mapping[str, str]) -> dict[str, Any]:
    """Those with which the journal was begun, of its `read_meta`."""
    return msgspec.json.decode(meta["settings"], type=dict[str, Any])


def binds(db: sqlite3.Connection) -> bool:
    """Whether anything is recorded that a run with other settings must not use."""
    results = "SELECT 1 FROM programs WHERE outcome IS NOT NULL"  # rules ask for no response
    return db.execute(f"SELECT 1 FROM responses UNION ALL {results} LIMIT 1").fetchone() is not None


def of_programs(
    db: sqlite3.Connection, path: Path, programs: Iterable[str] | None = None
) -> Iterator[Record]:
    """What is known of ``programs``, None: of all, in the order of their places."""
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
                used = Usage(**msgspec.json.decode(response).get("usage", {}))
                roles[role] = roles.get(role, Spent()) + Spent(1, used)
        usage = sum((spent.usage for spent in roles.values()), start=Usage())
        given = msgspec.json.decode(given)
        yield Record(program, given, result, error, seconds, usage, calls, path, roles)


def outcomes(
    db: sqlite3.Connection, path: Path, programs: Iterable[str] | None = None
) -> dict[str, Any]:
    """Results of the programs that have one, by id; of ``programs``, None: of all."""
    chosen, values = _chosen(programs)
    rows = db.execute(f"SELECT id, outcome FROM programs WHERE outcome IS NOT NULL{chosen}", values)
    return {name: _outcome(path, name, outcome) for name, outcome in rows}


def totals(db: sqlite3.Connection, programs: Sequence[str] | None = None) -> Totals:
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
        usage[role] += Usage(**msgspec.json.decode(response).get("usage", {}))
    return Totals(ended.fetchone()[0], calls, dict(usage))


def forgotten(db: sqlite3.Connection) -> Totals:
    """Of the programs that `Journal.forget` dropped."""
    row = db.execute("SELECT value FROM meta WHERE key = 'forgotten'").fetchone()
    return Totals() if row is None else msgspec.json.decode(row[0], type=Totals)


def passage(text: str) -> Passage:
    """A row of the table ``passages``."""
    return msgspec.json.decode(text, type=Passage)


def _chosen(programs: Iterable[str] | None, column: str = "id") -> tuple[str, tuple[str, ...]]:
    """A further condition of a WHERE that is there, and its value; none where all are meant."""
    if programs is None:
        return "", ()
    names = list(programs)
    cut = [name for name in names if "\0" in name]  # json_each would end them there
    plain = codec.dump([name for name in names if "\0" not in name])
    more = f" OR {column} IN ({', '.join('?' * len(cut))})"
    return f" AND ({column} IN (SELECT value FROM json_each(?)){more})", (plain, *cut)


def _outcome(path: Path, program: str, text: str) -> Any:
    with _naming(path, program):
        outcome = msgspec.json.decode(text)  # refuses NaN and halves of surrogate pairs
        if outcome is None:
            raise ValueError("null is no result")
        return outcome
