"""Atomic writing of files, and messages to the terminal."""

import abc
import contextlib
import json
import os
import shutil
import sys
import typing
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

import tqdm

from cirag_jax.errors import UserError

# Joiners for Persian, Indic scripts and emoji, and white space. None of them moves the cursor back.
_HARMLESS = ("\u200c", "\u200d", "\n", "\t")


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Reads a JSON object; if ``optional``, a missing file or null is an empty object."""
    if optional and not os.path.isfile(path):  # also False for strings that are not valid paths
        return {}
    value = read_json(path)
    if optional and value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object.")
    return value


def read_json(path: Path) -> Any:
    """Reads a JSON value."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object per line; see `write_text`."""
    write_text(path, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_json(path: Path, value: Any) -> None:
    """Writes an indented JSON value, which must not contain NaN or infinity; see `write_text`."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, (text, "\n"))


def write_text(path: Path, parts: Iterable[str]) -> None:
    """Writes a UTF-8 file atomically; lone surrogates are written as JSON escapes."""
    with (
        replacing(path) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        file.writelines(parts)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path; when the block ends, the file or folder there replaces ``path``.

    After an error, ``path`` is unchanged. Files are flushed to disk before they are renamed.

    Raises:
      OSError: the folder cannot be written. The error names ``path``, even if the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with naming(path):
            yield temporary
        if temporary.is_file():
            with naming(path), temporary.open("rb") as file:
                os.fsync(file.fileno())
        elif path.exists():  # os.replace cannot replace a folder
            old = temporary.with_suffix(".old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old, ignore_errors=True)
            return
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an `OSError` without a file name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def writing(place: object) -> Iterator[None]:
    """Turns an `OSError` into a `UserError`, which says that ``place`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror or error}.") from error


def remove_parts(folder: Path) -> None:
    """Removes temporary files of `replacing` that killed processes left in a folder.

    No other process may be writing there.
    """
    for part in folder.glob(".*.part"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def machine_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Closing(abc.ABC):
    """Base class of objects whose `close` method is called at the end of a ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Releases all resources."""


def is_training_workdir(spec: str | None) -> bool:
    """Returns whether ``spec`` has checkpoints of a trainer, or a file that names their folder."""
    return spec is not None and (Path(spec).expanduser() / "checkpoints").exists()


def local_path(spec: str) -> Path:
    """Returns the path of a model; ``shipped:NAME`` is a model in this package."""
    name = spec.removeprefix("shipped:")
    return Path(spec).expanduser() if name == spec else Path(__file__).parent / "shipped" / name


def cache_folder(name: str) -> Path | None:
    """Returns a folder of the user's cache, or None if ``CIRAG_JAX_CACHE=0`` disables it."""
    setting = os.environ.get("CIRAG_JAX_CACHE", "")
    if setting == "0":
        return None
    return Path(setting or Path.home() / ".cache" / "cirag_jax") / name


class _Standard:
    """A standard stream that discards what is written after its reader has gone (``| head``)."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._discarding():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            self._stream.flush()

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # The stream itself still has text in its buffer, which it writes when it is closed.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Lets a command run although standard streams are closed or lose their readers.

    Without a stream 0, 1 or 2, the next file that is opened would get its number.
    """
    before = sys.stdin, sys.stdout, sys.stderr
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    written = standard_stream(sys.stdout), standard_stream(sys.stderr)
    sys.stdout, sys.stderr = written
    try:
        yield
    finally:
        for stream in written:  # Otherwise, Python writes what is buffered at its exit.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def standard_stream(stream: TextIO) -> TextIO:
    """Returns a stream that discards what is written after its reader has gone."""
    return stream if isinstance(stream, _Standard) else typing.cast(TextIO, _Standard(stream))


def bar(description: str, total: int, unit: str = "text") -> tqdm.tqdm:
    """Returns a progress bar; if stderr is not a terminal, only one line is printed."""
    if description and not sys.stderr.isatty():
        print(f"{description}: {total:,} {unit}s", file=sys.stderr, flush=True)
    return tqdm.tqdm(
        total=total, desc=description, unit=unit, file=sys.stderr, disable=None, leave=False
    )


def one_line(text: str) -> str:
    """Replaces every run of white space by a space, so a text cannot imitate lines of a prompt."""
    return " ".join(text.split())


def say(text: str) -> None:
    """Prints a line on standard error, above any progress bar; see `visible`."""
    tqdm.tqdm.write(visible(text), file=sys.stderr)
    sys.stderr.flush()


def is_utf8(text: str) -> bool:
    """Returns whether UTF-8 can store a text, that is, whether it has no half surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_arguments(arguments: Iterable[str]) -> None:
    """Raises UserError for an argument of a command line that is not valid UTF-8."""
    for argument in arguments:
        if not is_utf8(argument):
            raise UserError(f"the argument {argument!r} is not valid UTF-8")


def replace_surrogates(text: str) -> str:
    """Joins pairs of surrogates, and replaces lone ones, which no file can store."""
    if is_utf8(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def visible(text: str) -> str:
    r"""Escapes control characters ("\\x1b"), except line ends and tabs.

    The result cannot move the cursor, recolor, reorder or hide text. C0 and C1 controls, Unicode
    format characters (such as bidirectional overrides), line and paragraph separators, lone
    surrogates, and private and unassigned code points are escaped.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    kind = unicodedata.category(char)
    if (kind[0] != "C" and kind not in ("Zl", "Zp")) or char in _HARMLESS:
        return char
    return char.encode("unicode_escape").decode("ascii")
