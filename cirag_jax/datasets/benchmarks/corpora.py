"""Complete corpora of benchmarks, read from their official files as a stream.

HotpotQA's questions are about 5 million abstracts of Wikipedia, and those of DPR's versions of
Natural Questions and WebQuestions about 21 million passages. Nothing here holds a corpus in memory.
"""

import bz2
import csv
import dataclasses
import gzip
import hashlib
import io
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Literal

import msgspec
import tensorflow_datasets as tfds
from absl import logging

from cirag_jax.datasets.benchmarks.files import OfficialFile, find_corpus
from cirag_jax.datasets.records import decode
from cirag_jax.errors import UserError
from cirag_jax.io import say
from cirag_jax.types import NonEmptyStr, Passage

_BAD_FILE = (EOFError, OSError, tarfile.TarError, zlib.error, csv.Error)
_COLUMNS = ["id", "text", "title"]
_SECONDS_PER_REPORT = 30.0


@dataclasses.dataclass(frozen=True)
class OfficialCorpus:
    """The corpus of a benchmark's config.

    Attributes:
      file: the official file.
      format: ``abstracts`` (a tar.bz2 archive of bz2 files of JSON lines, or the folder that it
        contains) or ``passages`` (a table of ids, texts and titles).
      count: number of passages of the official file, including those without a text.
      key: the part of a passage that the questions name: ``title`` or ``id``.
    """

    file: OfficialFile
    format: Literal["abstracts", "passages"]
    count: int
    key: Literal["title", "id"]

    def find(self, downloads: tfds.download.DownloadManager, manual_dir: Path) -> "CorpusSource":
        """Finds the file in ``manual_dir`` or its subfolders, or downloads it."""
        return CorpusSource(self, find_corpus(self.file, downloads, manual_dir))


class CorpusSource:
    """The passages of an official corpus on this machine.

    Attributes:
      corpus: the official corpus.
      path: its file, or for ``abstracts`` the folder that the archive contains.
      num_empty: passages without a text, which the last iteration skipped.
      sha256: the checksum of the file, once it was read; None for a folder.
    """

    def __init__(self, corpus: OfficialCorpus, path: Path):
        self.corpus, self.path = corpus, path
        self.num_empty, self.sha256 = 0, None

    @property
    def num_bytes(self) -> int:
        """The size of the file or of the folder's files."""
        files = self._members() if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files)

    def passages(
        self, report: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Passage]]:
        """Yields the place (for messages) and the passage of every row that has a text, in order.

        ``report`` is called with the number of bytes of the file that have been read.
        """
        self.num_empty = count = 0
        place = str(self.path)
        rows = self._abstracts if self.corpus.format == "abstracts" else self._table
        try:
            for place, passage in rows(report or (lambda _: None)):
                if not passage.text.strip():
                    self.num_empty += 1
                    continue
                count += 1
                yield place, passage
        except _BAD_FILE as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{self.path} is truncated or damaged after {count:,} passages, the last at "
                f"{place} ({reason}); download it again from {self.corpus.file.url}"
            ) from None
        if not count:
            raise UserError(f"{self.path} has no passages; place the complete file there.")

    def _table(self, report: Callable[[int], None]) -> Iterator[tuple[str, Passage]]:
        with _Monitored(self.path, report) as raw:
            unpacked = gzip.GzipFile(fileobj=raw) if raw.starts_with(b"\x1f\x8b") else raw
            text = io.TextIOWrapper(
                io.BufferedReader(unpacked, 1 << 20),  # pyright: ignore[reportArgumentType]
                encoding="utf-8-sig",
                newline="",
            )
            rows = csv.reader(text, delimiter="\t")
            try:
                if (header := next(rows, [])) != _COLUMNS:
                    raise UserError(
                        f"{self.path}:1: must name the columns id, text and title, not "
                        f"{', '.join(header)[:80]!r}."
                    )
                for row in rows:
                    place = f"{self.path}:{rows.line_num}"
                    if len(row) != len(_COLUMNS):
                        raise UserError(
                            f"{place}: has {len(row)} columns, but the header has "
                            f"{len(_COLUMNS)} (id, text, title)."
                        )
                    passage_id, body, title = row
                    if not passage_id.strip():
                        raise UserError(f"{place}: column 'id' is empty.")
                    yield place, Passage(passage_id, title, body)
            except UnicodeDecodeError:
                raise UserError(f"{self.path}:{rows.line_num + 1}: not valid UTF-8.") from None
            self.sha256 = raw.sha256()

    def _abstracts(self, report: Callable[[int], None]) -> Iterator[tuple[str, Passage]]:
        if self.path.is_dir():
            done = 0
            for member in self._members():
                with member.open("rb") as file:
                    yield from _read_abstracts(str(member), file)
                report(done := done + member.stat().st_size)
            return
        with (
            _Monitored(self.path, report) as raw,
            bz2.BZ2File(raw) as unpacked,  # Unlike "r|bz2" of tarfile, reports a missing end.
            tarfile.open(fileobj=unpacked, mode="r|") as archive,
        ):
            for member in archive:
                if member.isfile() and PurePosixPath(member.name).match("wiki_*.bz2"):
                    file = archive.extractfile(member)
                    assert file is not None
                    yield from _read_abstracts(f"{self.path}/{member.name}", file)
            while unpacked.read(1 << 20):  # The padding, for the checksum.
                pass
            self.sha256 = raw.sha256()

    def _members(self) -> list[Path]:
        return sorted(self.path.rglob("wiki_*.bz2"))


class _Abstract(msgspec.Struct):
    """A line of HotpotQA's archive of abstracts."""

    id: int | NonEmptyStr
    title: NonEmptyStr
    text: list[str]


def _read_abstracts(where: str, file: IO[bytes]) -> Iterator[tuple[str, Passage]]:
    with bz2.open(file) as lines:
        for number, raw in enumerate(lines, start=1):
            place = f"{where}:{number}"
            record = decode(place, raw, _Abstract)
            sentences = tuple(sentence.strip() for sentence in record.text)
            text = " ".join(filter(None, sentences))
            yield place, Passage(str(record.id), record.title, text, sentences)


class _Monitored(io.RawIOBase):
    """A file whose bytes are counted and hashed while it is read."""

    def __init__(self, path: Path, report: Callable[[int], None]):
        self._file, self._report = path.open("rb"), report
        self._digest, self._position = hashlib.sha256(), 0

    def starts_with(self, start: bytes) -> bool:
        """Returns whether the file starts with these bytes."""
        return self._file.peek(len(start))[: len(start)] == start

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        self._position += count
        self._report(self._position)
        return count

    def sha256(self) -> str:
        """Returns the checksum of the file, after reading its rest."""
        buffer = bytearray(1 << 20)
        while self.readinto(buffer):
            pass
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


class Reporter:
    """Reports progress and the remaining time on standard error, twice a minute."""

    def __init__(self, name: str, num_bytes: int):
        self._name, self._total = name, max(num_bytes, 1)
        self._start = self._last = time.monotonic()
        self.passages = 0

    def __call__(self, position: int) -> None:
        """Reports that ``position`` bytes have been read."""
        now = time.monotonic()
        if now - self._last < _SECONDS_PER_REPORT or not position:
            return
        self._last = now
        minutes = (now - self._start) * (self._total - position) / position / 60
        say(
            f"{self._name}: {100 * position / self._total:.0f} %, {self.passages:,} passages, "
            f"about {minutes:.0f} minutes left"
        )


def check_source(source: CorpusSource, count: int) -> None:
    """Warns if a corpus is not the official one.

    Args:
      source: the corpus, after it was read.
      count: the number of its passages, including those without a text.
    """
    official, sha256 = source.corpus.count, source.corpus.file.sha256
    if count != official:
        logging.warning(
            "%s has %s passages, but the official file has %s; results are not comparable with "
            "those on the official corpus.",
            source.path, f"{count:,}", f"{official:,}",
        )  # fmt: skip
    elif sha256 and source.sha256 and source.sha256 != sha256:
        logging.warning("%s has sha256 %s, not %s.", source.path, source.sha256, sha256)
