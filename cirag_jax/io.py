"""Files that are never seen half-written, and what a person at the terminal is told."""

import abc
import contextlib
import json
import os
import shutil
import sys
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import tqdm

from cirag_jax.errors import UserError

# Joiners that Persian and Indic scripts and emoji need, and what lays out a table; none moves the
# cursor back.
_HARMLESS = ("\u200c", "\u200d", "\n", "\t")


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object of a file; an empty one where it is ``optional`` and not there, or null."""
    if optional and not os.path.isfile(path):  # False of what can be no path, too
        return {}
    found = read_json(path)
    if optional and found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError(f"{path}: there is no JSON object.")
    return found


def read_json(path: Path) -> Any:
    """The JSON value of a file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line; see `write_text`."""
    write_text(path, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_json(path: Path, value: Any) -> None:
    """Writes one indented JSON value, without NaN and infinities; see `write_text`."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, (text, "\n"))


def write_text(path: Path, parts: Iterable[str]) -> None:
    """Writes a file of UTF-8; see `replacing`.

    Halves of surrogate pairs, for which UTF-8 has no bytes, are written as JSON escapes them.
    """
    with (
        replacing(path) as aside,
        aside.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        file.writelines(parts)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a new file or folder, which takes its place at the block's end.

    A file is on the disk before it is renamed.

    Raises:
      OSError: the folder cannot be written; what ``path`` held before is still there, as after any
        other error in the block. A full disk's, which names no file, gets this one's name.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with naming(path):
            yield aside
        if aside.is_file():
            with naming(path), aside.open("rb") as file:
                os.fsync(file.fileno())
        elif path.exists():  # a folder replaces no other one
            old = aside.with_suffix(".old")
            path.rename(old)
            aside.rename(path)
            shutil.rmtree(old, ignore_errors=True)
            return
        os.replace(aside, path)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an `OSError` of the block the name of the file, where the system named none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def remove_parts(folder: Path) -> None:
    """Removes what `replacing` left in a folder when its process was killed.

    Nobody may be writing there.
    """
    for part in folder.glob(".*.part"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


class Closing(abc.ABC):
    """Something open; as a context manager it is closed at the block's end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of what it holds."""


def is_training_workdir(spec: str | None) -> bool:
    """Whether a trainer left its checkpoints there."""
    return spec is not None and (Path(spec).expanduser() / "checkpoints").is_dir()


def local_path(spec: str) -> Path:
    """The path that names a model: ``shipped:NAME`` lies in this package."""
    name = spec.removeprefix("shipped:")
    return Path(spec).expanduser() if name == spec else Path(__file__).parent / "shipped" / name


def cache_folder(name: str) -> Path | None:
    """Where the user keeps what can be computed again (``CIRAG_JAX_CACHE``); None: nowhere."""
    setting = os.environ.get("CIRAG_JAX_CACHE", "")
    if setting == "0":
        return None
    return Path(setting or Path.home() / ".cache" / "cirag_jax") / name


def bar(description: str, total: int, unit: str = "text") -> tqdm.tqdm:
    """A progress bar on a terminal; elsewhere one line that says what has begun, if anything."""
    if description and not sys.stderr.isatty():
        print(f"{description}: {total:,} {unit}s", file=sys.stderr, flush=True)
    return tqdm.tqdm(
        total=total, desc=description, unit=unit, file=sys.stderr, disable=None, leave=False
    )


def one_line(text: str) -> str:
    """``text`` with a space for every run of white space."""
    return " ".join(text.split())


def say(text: str) -> None:
    """Prints a line on standard error; a progress bar that is shown there goes on below it.

    What it quotes cannot drive the terminal: see `visible`.
    """
    tqdm.tqdm.write(visible(text), file=sys.stderr)
    sys.stderr.flush()


def visible(text: str) -> str:
    r"""``text`` with its control characters shown as escapes ("\\x1b"), but for line ends and tabs.

    That covers everything that moves the cursor, recolours, reorders or hides text: C0 and C1
    controls, Unicode's format characters (bidirectional overrides among them), its line and
    paragraph separators, lone surrogates, private and unassigned code points.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    kind = unicodedata.category(char)
    if (kind[0] != "C" and kind not in ("Zl", "Zp")) or char in _HARMLESS:
        return char
    return char.encode("unicode_escape").decode("ascii")
