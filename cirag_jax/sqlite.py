"""SQLite files as the journal and the triple store keep them."""

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from cirag_jax.errors import InUse, UserError

# SQLite's own, and what Python makes of a message that quotes bytes of a damaged file.
ERRORS = (sqlite3.Error, UnicodeDecodeError)
# Beside a full disk: a quota, a limit on the size of files, a disk that has failed.
_NOT_WRITTEN = ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_TRUNCATE")


def connect(path: Path, mode: str = "rwc") -> sqlite3.Connection:
    """Opens a file; ``mode``: ``rwc``, ``rw`` or ``ro``.

    Transactions are begun by hand; a second writer is refused after a second, not waited for. A
    server's client may report from a thread of its own, while this one waits for it.
    """
    in_memory = str(path) == ":memory:"
    where = "file::memory:" if in_memory else f"{path.resolve().as_uri()}?mode={mode}"
    return sqlite3.connect(
        where, uri=True, isolation_level=None, timeout=1.0, check_same_thread=False
    )


def create(db: sqlite3.Connection, schema: str, meta: Sequence[tuple[str, str]]) -> None:
    """Makes the tables of a new file, one of which is ``meta``, and fills that."""
    if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
        for statement in schema.split(";"):
            db.execute(statement)
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta)


def needs_undoing(db: sqlite3.Connection) -> bool:
    """Whether a killed writer left the file half-done and ``db`` may not undo that."""
    try:
        db.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname == "SQLITE_READONLY_ROLLBACK":
            return True
        raise
    return False


@contextlib.contextmanager
def copied(path: Path, log: str) -> Iterator[Path]:
    """A copy of a file and of the log that a killed run left beside it (``-wal``, ``-journal``),
    which SQLite reads only where it may write; of what there is of both.
    """
    with tempfile.TemporaryDirectory(prefix="cirag_jax") as folder:
        for part in (path, path.with_name(path.name + log)):
            if part.is_file():
                shutil.copyfile(part, Path(folder) / part.name)
        yield Path(folder) / path.name


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


# What reading values of another shape than was written raises.
DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError),
    msgspec.MsgspecError,
)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """As `named_errors`, and for values that are not what was written: SQLite does not notice bytes
    that changed within one.
    """
    with named_errors(path):
        try:
            yield
        except DAMAGE as error:
            raise damaged(path, error) from None


def damaged(path: Path | str, error: Exception) -> UserError:
    """The exception to raise about a file, or a row of one, in which reading ran into ``error``."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return UserError(f"{path} is damaged ({text}); restore it or use another --workdir.")
