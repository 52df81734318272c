"""Finds or downloads the official files of a benchmark, verifies them and streams their records."""

import contextlib
import csv
import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging

from cirag_jax.errors import UserError

_CHUNK = 1 << 20  # Characters read at a time.
# Errors of damaged, encrypted and unsupported archives.
_BAD_ARCHIVE = (zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


@dataclasses.dataclass(frozen=True, slots=True)
class OfficialFile:
    """An official file of a benchmark.

    Attributes:
      name: name of the file, such as ``dev.json``.
      url: address of the file, or of the zip ``archive`` that contains it.
      sha256: checksum of the download, if known, as stated by ``checksum_by``.
      split: key of the split, if the file is a JSON object ``{split: {id: record}}``.
      noun: name of a record in messages.
      lines: whether the file has one JSON object per line; always true for ``.jsonl``.
      columns: names of the columns of a tab-separated table that has no header.
    """

    name: str
    url: str
    archive: str | None = None
    sha256: str | None = None
    checksum_by: str | None = None
    split: str | None = None
    noun: str = "question"
    lines: bool = False
    columns: tuple[str, ...] = ()

    @property
    def download_name(self) -> str:
        """Name of the downloaded file."""
        return self.archive or self.name + (".gz" if self.url.endswith(".gz") else "")


@dataclasses.dataclass(frozen=True, slots=True)
class FoundFile:
    """An official file on this machine; if ``archived``, ``path`` is a zip that contains it.

    A file may be compressed with gzip.
    """

    file: OfficialFile
    path: Path
    archived: bool

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yields the place (for messages) and JSON value of every record, in order.

        A table row (``.csv``, ``.tsv``) becomes an object of strings; missing cells are omitted.
        Records are streamed, except from a file with several splits, which is loaded completely.
        """
        where = str(self.path)
        try:
            with contextlib.ExitStack() as stack:
                if self.archived:
                    archive = stack.enter_context(zipfile.ZipFile(self.path))
                    members = _members_called(archive, self.file.name)
                    if not members:
                        raise UserError(f"{self.path} does not contain {self.file.name}.")
                    where = f"{self.path}/{members[0]}"
                    raw = stack.enter_context(archive.open(members[0]))
                elif is_gzip(self.path):
                    raw = stack.enter_context(gzip.open(self.path))
                else:
                    raw = stack.enter_context(self.path.open("rb"))
                text = io.TextIOWrapper(raw, encoding="utf-8-sig")
                is_empty = True
                for record in _read(text, where, self.file):
                    is_empty = False
                    yield record
                if is_empty:
                    raise UserError(
                        f"{where} has no {self.file.noun}s; place the complete file there."
                    )
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not valid UTF-8.") from error
        except (*_BAD_ARCHIVE, gzip.BadGzipFile) as error:
            form = "zip archive" if self.archived else "gzip file"
            raise UserError(f"{self.path} is not a complete {form}.") from error
        except OSError as error:
            raise UserError(f"{where} cannot be read: {error.strerror or error}.") from error


def find_files(
    files: Mapping[str, OfficialFile],
    download_manager: tfds.download.DownloadManager,
    manual_dir: Path,
) -> dict[str, FoundFile]:
    """Finds the official file of every split.

    If ``manual_dir`` or one of its subfolders contains at least one of the files or archives,
    nothing is downloaded, and splits without a file are skipped with a warning. Otherwise all files
    are downloaded to the cache of TFDS.
    """
    placed = {split: path for split, file in files.items() if (path := _placed(file, manual_dir))}
    if placed:
        for split in files.keys() - placed.keys():
            logging.warning(
                "%s is not in %s; skipping split %s", files[split].name, manual_dir, split
            )
        found = {
            split: FoundFile(files[split], path, archived=path.name == files[split].archive)
            for split, path in placed.items()
        }
        for file in found.values():
            _verify(file, placed_by_hand=True)
        return found
    return {split: _download(file, download_manager, manual_dir) for split, file in files.items()}


def _placed(file: OfficialFile, manual_dir: Path) -> Path | None:
    if not manual_dir.is_dir():
        return None
    folders = [manual_dir, *sorted(path for path in manual_dir.iterdir() if path.is_dir())]
    names = dict.fromkeys((file.name, file.download_name))
    places = (folder / name for name in names for folder in folders)
    return next((place for place in places if place.is_file()), None)


def find_corpus(
    file: OfficialFile, download_manager: tfds.download.DownloadManager, manual_dir: Path
) -> Path:
    """Returns the path of a corpus: a file, the folder of an unpacked tar archive, or a download.

    If ``manual_dir`` exists, the corpus must be in it or in one of its subfolders.
    """
    if (path := _placed(file, manual_dir)) is not None:
        return path
    stem = file.name.removesuffix(".tar.bz2")
    if manual_dir.is_dir():
        unpacked = [manual_dir / stem, *manual_dir.glob(f"*/{stem}")]
        if manual_dir.name == stem:
            unpacked.append(manual_dir)
        if path := next((path for path in unpacked if path.is_dir()), None):
            return path
        if any(manual_dir.iterdir()):
            raise UserError(
                f"{manual_dir} does not contain {file.download_name}; download it from {file.url} "
                "and place it there."
            )
    return _download(file, download_manager, manual_dir).path


def is_gzip(path: Path) -> bool:
    """Returns whether a file is compressed with gzip."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def sha256_of(path: Path) -> str:
    """Returns the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def beside(found: FoundFile, file: OfficialFile) -> FoundFile | None:
    """Returns an optional official file from the folder or archive of another one, or None.

    A file in the folder takes precedence over one in the archive.
    """
    if (path := found.path.parent / file.name).is_file():
        return FoundFile(file, path, archived=False)
    if found.archived:
        with contextlib.suppress(OSError, *_BAD_ARCHIVE), zipfile.ZipFile(found.path) as archive:
            if _members_called(archive, file.name):
                return FoundFile(file, found.path, archived=True)
    return None


def _download(
    file: OfficialFile, download_manager: tfds.download.DownloadManager, manual_dir: Path
) -> FoundFile:
    advice = f"download it by hand and place {file.download_name} in {manual_dir}"
    try:
        _reach(file.url)
        # TFDS caches downloads by URL, so the files of one archive share a download.
        path = Path(download_manager.download(file.url))
    except (OSError, tfds.download.DownloadError) as error:
        raise UserError(f"{file.url} cannot be downloaded ({_reason(error)}); {advice}.") from error
    if file.archive and not zipfile.is_zipfile(path):
        path.unlink()
        raise UserError(f"{file.url} did not return a zip archive; {advice}.")
    found = FoundFile(file, path, archived=file.archive is not None)
    _verify(found, placed_by_hand=False)
    return found


def _reach(url: str) -> None:
    """Raises OSError at once if the host is unreachable, because TFDS would retry for minutes."""
    request = urllib.request.Request(url, method="HEAD")
    # Any response is enough; the download reports a missing file.
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=30).close()


def _reason(error: Exception) -> str:
    text = str(getattr(error, "reason", None) or error)
    return text.splitlines()[0][:200] if text else type(error).__name__


def _verify(found: FoundFile, *, placed_by_hand: bool) -> None:
    """Verifies a file's checksum; raises for a download, warns for a file placed by hand."""
    file = found.file
    if file.sha256 is None or (placed_by_hand and found.path.name != file.download_name):
        return
    actual = sha256_of(found.path)
    if actual == file.sha256:
        return
    message = (
        f"{found.path} has sha256 {actual}, not {file.sha256} as {file.checksum_by} states for "
        f"{file.download_name}"
    )
    if placed_by_hand:
        logging.warning("%s; the file is used, because it was placed by hand.", message)
        return
    found.path.unlink()
    raise UserError(f"{message}; the download was deleted, so try again or place it by hand.")


def _members_called(archive: zipfile.ZipFile, name: str) -> list[str]:
    members = [m for m in archive.namelist() if m.rsplit("/", 1)[-1] == name]
    # Archives from macOS contain a second, hidden copy of every name.
    return [m for m in members if not m.startswith("__MACOSX")]


_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def _read(text: io.TextIOWrapper, where: str, file: OfficialFile) -> Iterator[tuple[str, Any]]:
    suffix = Path(file.name).suffix
    if file.columns:
        return _rows(text, where, "\t", file.columns)
    if suffix in _DELIMITERS:
        return _rows(text, where, _DELIMITERS[suffix])
    if file.split is not None:
        return _members(text, where, file.split)
    return _objects(text, where, file.noun, lines=file.lines or suffix == ".jsonl")


def _rows(
    text: io.TextIOWrapper, where: str, delimiter: str, columns: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields the nonblank rows of a table as objects; the first row may name the columns."""
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = columns or next(rows, [])
        place = None
        for row in filter(None, rows):
            place = f"{where}:{rows.line_num}"
            if len(row) > len(header):
                raise UserError(
                    f"{place}: has {len(row)} fields, but the table has {len(header)}."
                    if columns
                    else f"{place}: has {len(row)} fields, but the header has {len(header)}."
                )
            yield place, dict(zip(header, row, strict=False))
    except csv.Error as error:
        raise UserError(f"{where}:{rows.line_num}: invalid table row ({error}).") from error
    if place is None:
        raise UserError(f"{where} is empty.")


def _members(text: io.TextIOWrapper, where: str, split: str) -> Iterator[tuple[str, Any]]:
    """Yields the records of a split, each with its key as ``id``."""
    try:
        value = json.loads(text.read())
    except RecursionError:
        raise UserError(f"{where} nests too deeply.") from None
    except ValueError as error:
        raise UserError(f"{where} is invalid or truncated JSON ({error}).") from error
    members = value.get(split) if isinstance(value, dict) else None
    if not isinstance(members, dict):
        raise UserError(f"{where}: field '{split}' must be an object of questions by id.")
    for key, record in members.items():
        place = f"{where}: question {key!r} of {split}"
        if not isinstance(record, dict):
            raise UserError(f"{place}: must be a JSON object.")
        yield place, {"id": key, **record}


def _objects(
    text: io.TextIOWrapper, where: str, noun: str, *, lines: bool
) -> Iterator[tuple[str, Any]]:
    """Yields the objects of a JSON array or of JSON lines, decoded one at a time."""
    decoder = json.JSONDecoder()
    buffer = text.read(_CHUNK).lstrip()
    position, count, size = 0, 0, _CHUNK
    if not lines:
        if buffer[:1] != "[":
            raise UserError(f"{where} must be a JSON list of {noun}s.")
        position = 1
    while True:
        position = _skip(buffer, position)
        if position == len(buffer):
            buffer, position = text.read(_CHUNK), 0
            if buffer:
                continue
            if lines and count:
                return
            raise UserError(f"{where} is {'truncated' if count else 'empty'}.")
        if buffer[position] == "]" and not lines:
            return
        try:
            value, position = decoder.raw_decode(buffer, position)
        except RecursionError:
            raise UserError(f"{where}: {noun} {count + 1} nests too deeply.") from None
        except ValueError as error:
            # The object may continue in the next chunk; doubling the chunk keeps this linear.
            more, size = text.read(size), 2 * size
            if not more:
                raise UserError(
                    f"{where}: {noun} {count + 1} is invalid or truncated JSON "
                    f"({getattr(error, 'msg', error)})."
                ) from error
            buffer, position = buffer[position:] + more, 0
            continue
        count, size = count + 1, _CHUNK
        place = f"{where}:{count}" if lines else f"{where}: {noun} {count}"
        if not isinstance(value, dict):
            raise UserError(f"{place}: must be a JSON object.")
        yield place, value


def _skip(buffer: str, position: int) -> int:
    while position < len(buffer) and buffer[position] in " \t\r\n,":
        position += 1
    return position
