"""SQLite files: one way to open, read and write journals, response caches and triple stores."""

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from cirag_jax.errors import InUse, UserError
from cirag_jax.io import Closing, replacing

# SQLite's own, and Python's for a message that quotes bytes of a damaged file.
ERRORS = (sqlite3.Error, UnicodeDecodeError)
# Like a full disk: a quota, a limit on the size of files, a disk that has failed.
_NOT_WRITTEN = ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_TRUNCATE")
# Raised when a value has another shape than the one that was written.
DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError),
    msgspec.MsgspecError,
)
MEMORY = ":memory:"  # the path of a database without a file
_LOGS = ("-wal", "-journal")  # suffixes of the logs that a killed writer leaves


class Access(NamedTuple):
    """How a process shares a file with others.

    Attributes:
      pragmas: settings of the connection.
      timeout: seconds to wait for another writer.
      writes: whether the file is created where absent and may be changed.
    """

    pragmas: tuple[str, ...] = ()
    timeout: float = 1.0
    writes: bool = True


READ = Access(("query_only = ON",), writes=False)
# One writer at a time, others may read.
WRITE = Access()
# One process only, until it ends: two runs on one workdir would each repeat the other's work.
WRITE_ALONE = Access(
    # A kill loses nothing, a power cut little.
    ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL")
)
WRITE_TOGETHER = Access(("journal_mode = WAL", "synchronous = NORMAL"), timeout=60.0)


class Database(Closing):
    """An open SQLite file; a context manager.

    Every error of SQLite and of the disk becomes a `UserError` that names the file. Subclasses
    state their tables and, if the file has a table ``meta``, the format that it must have there.
    """

    _SCHEMA: ClassVar[str]
    _FORMAT: ClassVar[int | None] = None
    _OTHER_FORMAT: ClassVar[str] = (
        "{path} was written by another version of this program (format {found}, not {format}); "
        "use another --workdir."
    )

    def __init__(
        self, path: str | os.PathLike[str], access: Access = READ, named: Path | None = None
    ):
        """Opens ``path``; ``named`` is the path in error messages, where ``path`` is a copy."""
        self.path = named or Path(path)
        with contextlib.ExitStack() as stack, self._named_errors():
            opened = _opened_for_writing if access.writes else _opened_for_reading
            self._db = stack.enter_context(opened(Path(path), access.timeout))
            for pragma in access.pragmas:
                self._db.execute(f"PRAGMA {pragma}")
            if access.writes:
                self._create()
            self._check_format()
            self._opened = stack.pop_all()  # a file that is refused is closed

    def close(self) -> None:
        """Closes the file."""
        self._opened.close()

    def _create(self) -> None:
        """Creates the tables of a new file."""
        with transaction(self._db):
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in self._SCHEMA.split(";"):
                    self._db.execute(statement)
                for row in self._first_meta().items():
                    self._db.execute("INSERT INTO meta VALUES (?, ?)", row)

    def _first_meta(self) -> dict[str, str]:
        """Rows of the table ``meta`` in a new file."""
        return {} if self._FORMAT is None else {"format": str(self._FORMAT)}

    def _check_format(self) -> None:
        if self._FORMAT is None:
            return
        found = self._meta("format")
        if found != str(self._FORMAT):
            text = self._OTHER_FORMAT.format(path=self.path, found=found, format=self._FORMAT)
            raise UserError(text)

    # ------------------------------------------------------------------------------- statements

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        with self._named_errors():
            yield from self._db.execute(statement, values)

    def _row(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """The first row, or None."""
        with self._named_errors():
            return self._db.execute(statement, values).fetchone()

    def _write(self, statement: str, values: Sequence[Any] = ()) -> None:
        with self._named_errors():
            self._db.execute(statement, values)

    def _meta(self, key: str) -> str | None:
        row = self._row("SELECT value FROM meta WHERE key = ?", (key,))
        return row[0] if row else None

    def _set_meta(self, key: str, value: str) -> None:
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of the block's statements or, after an error, none."""
        with self._named_errors(), transaction(self._db):
            yield

    def _named_errors(self) -> contextlib.AbstractContextManager[None]:
        return named_errors(self.path)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """As `named_errors`, and for values that have other shapes than those that were written:
        SQLite does not notice changed bytes within a value.
        """
        with self._named_errors():
            try:
                yield
            except DAMAGE as error:
                raise damaged(self.path, error) from None


# --------------------------------------------------------------------------------------- opening


def _connect(path: Path, mode: str, timeout: float = 1.0) -> sqlite3.Connection:
    """A connection with explicit transactions; ``mode`` is ``rwc``, ``rw`` or ``ro``.

    A server's client may report from a thread of its own, while this one waits for it.
    """
    in_memory = str(path) == MEMORY
    where = "file::memory:" if in_memory else f"{path.resolve().as_uri()}?mode={mode}"
    return sqlite3.connect(
        where, uri=True, isolation_level=None, timeout=timeout, check_same_thread=False
    )


def _opened_for_writing(
    path: Path, timeout: float
) -> contextlib.AbstractContextManager[sqlite3.Connection]:
    return contextlib.closing(_connect(path, "rwc", timeout))


@contextlib.contextmanager
def _opened_for_reading(path: Path, timeout: float) -> Iterator[sqlite3.Connection]:
    """The file, whose content is not changed.

    What a killed writer left half-done is undone first; its write-ahead log is read beside the
    file. Where the folder may not be written, SQLite can do neither, and a copy is read.
    """
    has_log = path.with_name(f"{path.name}-wal").exists()
    may_write = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    if may_write or not has_log:
        mode = "rw" if may_write and not has_log else "ro"
        with contextlib.closing(_connect(path, mode, timeout)) as db:
            if not _needs_undoing(db):
                yield db
                return
    with copied(path) as copy, contextlib.closing(_connect(copy, "rw", timeout)) as db:
        yield db


def _needs_undoing(db: sqlite3.Connection) -> bool:
    """Whether a killed writer left the file half-done and ``db`` may not undo that."""
    try:
        db.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname == "SQLITE_READONLY_ROLLBACK":
            return True
        raise
    return False


@contextlib.contextmanager
def copied(path: Path) -> Iterator[Path]:
    """A temporary copy of a file and of the logs beside it, of those that exist."""
    with tempfile.TemporaryDirectory(prefix="cirag_jax") as folder:
        for part in (path, *(path.with_name(path.name + log) for log in _LOGS)):
            if part.is_file():
                shutil.copyfile(part, Path(folder) / part.name)
        yield Path(folder) / path.name


# --------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it or, after an error, nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # else SQLite has rolled back by itself
            db.execute("ROLLBACK")
        raise


def merge(
    parts: Sequence[Path],
    target: Path,
    begin: Callable[[Path], object],
    statements: Sequence[str],
) -> None:
    """Writes the file ``target`` from ``parts``, which are closed.

    Args:
      parts: files, of which each is attached in turn under the name ``part``.
      target: replaced at the end.
      begin: writes the first state of the file, whose path it is given.
      statements: are executed for every part.
    """
    with named_errors(target), replacing(target) as aside:
        begin(aside)
        with contextlib.closing(_connect(aside, "rw")) as db:
            for part in parts:
                db.execute("ATTACH ? AS part", (str(part),))
                for statement in statements:
                    db.execute(statement)
                db.execute("DETACH part")


# ---------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """SQLite's own errors, and the disk's, as one sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from None
    except ERRORS as error:
        text = " ".join(str(error).split())
        if "locked" in text:
            raise InUse(f"{path} is in use by another run.") from None
        is_full = "full" in text
        if is_full or getattr(error, "sqlite_errorname", "") in _NOT_WRITTEN:
            raise UserError(
                f"{path} cannot be written: {'the disk is full' if is_full else text}; what is "
                "recorded is kept, so make room and run the same command again."
            ) from None
        raise UserError(
            f"{path} cannot be used: {text}; restore it or use another --workdir."
        ) from None


def damaged(path: Path | str, error: Exception) -> UserError:
    """The exception to raise about a file, or a row of one, in which reading ran into ``error``."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return UserError(f"{path} is damaged ({text}); restore it or use another --workdir.")
