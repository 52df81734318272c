"""SQLite files: the common base of journals, response caches and triple stores."""

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

# UnicodeDecodeError arises if SQLite's message quotes bytes of a damaged file.
ERRORS = (sqlite3.Error, UnicodeDecodeError)
# A full quota, a limit on file sizes, or a failed disk.
_NOT_WRITTEN = ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_TRUNCATE")
# Errors from decoding a damaged value.
DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError),
    msgspec.MsgspecError,
)
MEMORY = ":memory:"  # the path of a database without a file
_LOGS = ("-wal", "-journal")  # suffixes of the log files of a killed writer


class Access(NamedTuple):
    """A mode of access to a file that several processes may open.

    Attributes:
      pragmas: settings of the connection.
      timeout: seconds to wait for another writer.
      writes: whether the file is created if missing and may be changed.
    """

    pragmas: tuple[str, ...] = ()
    timeout: float = 1.0
    writes: bool = True


READ = Access(("query_only = ON",), writes=False)
WRITE = Access()  # one writer at a time; others may read
# Only one process may have the file open, so that two runs in one workdir do not repeat each
# other's work. A killed process loses no data; a power cut may lose the last transactions.
WRITE_ALONE = Access(("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"))
WRITE_TOGETHER = Access(("journal_mode = WAL", "synchronous = NORMAL"), timeout=60.0)


class Database(Closing):
    """An open SQLite file.

    Errors of SQLite and of the disk become a `UserError` that names the file. Subclasses define the
    tables and, if there is a table ``meta``, the format number stored in it.
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
        """Opens ``path``; if ``path`` is a copy of ``named``, error messages show ``named``."""
        self.path = named or Path(path)
        with contextlib.ExitStack() as stack, self._named_errors():
            if access.writes:
                connection = contextlib.closing(_connect(Path(path), "rwc", access.timeout))
            else:
                connection = _opened_for_reading(Path(path), access.timeout)
            self._db = stack.enter_context(connection)
            for pragma in access.pragmas:
                self._db.execute(f"PRAGMA {pragma}")
            if access.writes:
                self._create()
            self._check_format()
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Closes the file."""
        self._opened.close()

    def _create(self) -> None:
        with transaction(self._db):
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in self._SCHEMA.split(";"):
                    self._db.execute(statement)
                for row in self._first_meta().items():
                    self._db.execute("INSERT INTO meta VALUES (?, ?)", row)

    def _first_meta(self) -> dict[str, str]:
        """Returns the initial rows of the table ``meta``."""
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
        with self._named_errors(), transaction(self._db):
            yield

    def _named_errors(self) -> contextlib.AbstractContextManager[None]:
        return named_errors(self.path)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns errors, including those from decoding damaged values, into a `UserError`."""
        with self._named_errors():
            try:
                yield
            except DAMAGE as error:
                raise damaged(self.path, error) from None


# --------------------------------------------------------------------------------------- opening


def _connect(path: Path, mode: str, timeout: float = 1.0) -> sqlite3.Connection:
    """Connects with explicit transactions; ``mode`` is ``rwc``, ``rw`` or ``ro``.

    Other threads may use the connection, because clients of model servers report from threads.
    """
    in_memory = str(path) == MEMORY
    where = "file::memory:" if in_memory else f"{path.resolve().as_uri()}?mode={mode}"
    return sqlite3.connect(
        where, uri=True, isolation_level=None, timeout=timeout, check_same_thread=False
    )


@contextlib.contextmanager
def _opened_for_reading(path: Path, timeout: float) -> Iterator[sqlite3.Connection]:
    """Connects without changing the content.

    If a writer was killed, SQLite first reads its write-ahead log or rolls back its unfinished
    transaction. Both need a writable folder; otherwise, a copy is read.
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
    """Returns whether there is an unfinished transaction that a read-only ``db`` cannot undo."""
    try:
        db.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname == "SQLITE_READONLY_ROLLBACK":
            return True
        raise
    return False


@contextlib.contextmanager
def copied(path: Path) -> Iterator[Path]:
    """Yields a temporary copy of a file and of its logs, if there are any."""
    with tempfile.TemporaryDirectory(prefix="cirag_jax") as folder:
        for part in (path, *(path.with_name(path.name + log) for log in _LOGS)):
            if part.is_file():
                shutil.copyfile(part, Path(folder) / part.name)
        yield Path(folder) / path.name


# --------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commits the block's statements, or rolls them back after an error."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite may already have rolled back
            db.execute("ROLLBACK")
        raise


def merge(
    parts: Sequence[Path], target: Path, create: Callable[[Path], object], statements: Sequence[str]
) -> None:
    """Merges ``parts``, which must be closed, into the file ``target``.

    Args:
      parts: files; each is attached in turn under the name ``part``.
      target: the file to replace.
      create: creates an empty file at the given path.
      statements: executed for each part.
    """
    with named_errors(target), replacing(target) as temporary:
        create(temporary)
        with contextlib.closing(_connect(temporary, "rw")) as db:
            for part in parts:
                db.execute("ATTACH ? AS part", (str(part),))
                for statement in statements:
                    db.execute(statement)
                db.execute("DETACH part")


# ---------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turns errors of SQLite and of the disk into a `UserError` that names the file."""
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
                f"{path} cannot be written: {'the disk is full' if is_full else text}; progress "
                "is saved; free some space and run the same command to resume."
            ) from None
        raise UserError(
            f"{path} cannot be used: {text}; restore it or use another --workdir."
        ) from None


def damaged(path: Path | str, error: Exception) -> UserError:
    """Returns the exception for a damaged file or row; reading it raised ``error``."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return UserError(f"{path} is damaged ({text}); restore it or use another --workdir.")
