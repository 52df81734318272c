"""Tables in folders, archives and compressed files, read row by row.

A table is one file, or several shards (``train-00000-of-00002.parquet``), of JSON lines, a JSON
list, tab- or comma-separated values, Parquet, or Arrow (folders that ``datasets`` saved). JSON and
separated values may be compressed (``.gz``, or a ``.zip`` with one file).
"""

import contextlib
import csv
import functools
import gzip
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from cirag_jax.datasets.records import decode
from cirag_jax.errors import UserError, parsing

_DELIMITERS = {".tsv": "\t", ".csv": ","}
_TEXTS = (".jsonl", ".json", *_DELIMITERS, ".txt", ".qrels", ".trec")
_ARROW = (".parquet", ".arrow")
_COMPRESSED = (".gz", ".zip")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_DEPTH = 3  # Folders below the source in which tables may be.
_DAMAGED = (zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError,
            RuntimeError, NotImplementedError)  # fmt: skip

Row = tuple[str, dict[str, Any]]  # The place (for messages) and the fields of a record.


class Source:
    """The tables of a folder, of a zip archive, or of a single file.

    Attributes:
        path: The folder, archive or file.
    """

    def __init__(self, path: Path):
        self.path = path.expanduser()
        self._fields: dict[str, frozenset[str]] = {}
        if not self.path.exists():
            raise UserError(f"{self.path} does not exist.")

    @functools.cached_property
    def tables(self) -> Mapping[str, tuple[str, ...]]:
        """Maps the name of each table, such as ``qrels/test``, to its files, in order."""
        tables: dict[str, list[str]] = {}
        for name in sorted(self._names()):
            if (stem := table_name(name)) is not None or self.path.is_file():
                tables.setdefault(stem or name, []).append(name)
        return {stem: tuple(names) for stem, names in tables.items()}

    def find(self, *stems: str) -> str | None:
        """Returns the first table with one of these names, or inside a folder of this name."""
        for stem in stems:
            if stem in self.tables:
                return stem
            if inside := [name for name in self.tables if name.startswith(f"{stem}/")]:
                return inside[0]
        return None

    def suffix(self, table: str) -> str:
        """Returns the suffix of a table's files, without compression."""
        return _suffix(self.tables[table][0])

    def fields(self, table: str | None) -> frozenset[str]:
        """Returns the fields of the first record; empty for an unreadable table or None."""
        if table is None:
            return frozenset()
        if table not in self._fields:
            try:
                self._fields[table] = frozenset(next(self.rows(table))[1])
            except UserError:
                self._fields[table] = frozenset()
        return self._fields[table]

    def rows(self, *tables: str) -> Iterator[Row]:
        """Yields the records of tables; a table without records raises UserError."""
        for table in tables:
            count = 0
            for name in self.tables[table]:
                for row in self._rows(name):
                    count += 1
                    yield row
            if not count:
                raise UserError(f"{self.place(self.tables[table][0])} has no records.")

    def rows_by_split(self, tables: Iterable[str]) -> Iterator[tuple[str, str, Row]]:
        """Yields the split of each record, a default for its id, and the record.

        The split is the name of the table.
        """
        for table in tables:
            split = table.rpartition("/")[2]
            for number, row in enumerate(self.rows(table)):
                yield split, f"{split}_{number}", row

    def columns(self, table: str) -> Iterator[tuple[str, list[str]]]:
        """Yields the place and the columns, separated by white space, of every nonblank line."""
        for name in self.tables[table]:
            with self._text(name) as text:
                for number, line in enumerate(text, start=1):
                    if columns := line.split():
                        yield f"{self.place(name)}:{number}", columns

    def json(self, table: str) -> Any:
        """Returns the value of a JSON file."""
        name = self.tables[table][0]
        with self._text(name) as text:
            content = text.read()
        try:
            return json.loads(content)
        except RecursionError:
            raise UserError(f"{self.place(name)} nests too deeply.") from None
        except ValueError as error:
            line = getattr(error, "lineno", 1)
            raise UserError(
                f"{self.place(name)}:{line}: invalid or truncated JSON ({error})."
            ) from None

    def place(self, name: str) -> str:
        """Returns the path of a file for messages."""
        is_single = self.path.is_file() and not self._archive
        return str(self.path) if is_single else f"{self.path}/{name}"

    # ------------------------------------------------------------------------------------- files

    @property
    def _archive(self) -> bool:
        return self.path.is_file() and self.path.suffix == ".zip" and not _suffix(self.path.name)

    def _names(self) -> list[str]:
        if self._archive:
            with _unpacking(self.path), zipfile.ZipFile(self.path) as archive:
                members = [m for m in archive.namelist() if not m.endswith("/")]
            members = [m for m in members if not m.startswith("__MACOSX")]
            top = {m.partition("/")[0] for m in members}
            self._top = f"{top.pop()}/" if len(top) == 1 and "/" in members[0] else ""
            return [member.removeprefix(self._top) for member in members]
        if self.path.is_file():
            return [self.path.name]
        return [
            path.relative_to(self.path).as_posix()
            for depth in range(1, _DEPTH + 1)
            for path in self.path.glob("/".join("*" * depth))
            if path.is_file()
        ]

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file for reading; errors of reading name it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_unpacking(self.place(name)))
            file: Any
            if self._archive:
                archive = stack.enter_context(zipfile.ZipFile(self.path))
                file = stack.enter_context(archive.open(self._top + name))
            else:
                path = self.path if self.path.is_file() else self.path / name
                file = stack.enter_context(path.open("rb"))
            if name.endswith(".gz"):
                file = stack.enter_context(gzip.GzipFile(fileobj=file))
            elif name.endswith(".zip"):
                inner = stack.enter_context(zipfile.ZipFile(file))
                members = [m for m in inner.namelist() if not m.startswith("__MACOSX")]
                if len(members) != 1:
                    raise UserError(
                        f"{self.place(name)} contains {len(members)} files instead of one; unpack "
                        "it, or pass the archive as the source."
                    )
                file = stack.enter_context(inner.open(members[0]))
            yield file

    @contextlib.contextmanager
    def _text(self, name: str) -> Iterator[IO[str]]:
        with self._open(name) as file:
            try:
                yield io.TextIOWrapper(file, "utf-8-sig", newline="")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{self.place(name)} is not valid UTF-8 (byte {error.start + 1} of a block); "
                    "convert it to UTF-8."
                ) from None

    def _rows(self, name: str) -> Iterator[Row]:
        suffix = _suffix(name)
        if suffix == ".jsonl":
            yield from self._lines(name)
        elif suffix in _DELIMITERS:
            yield from self._table(name, _DELIMITERS[suffix])
        elif suffix in _ARROW:
            yield from self._arrow(name, suffix)
        elif suffix == ".json":
            value = self.json(table_name(name) or name)
            if not isinstance(value, list):
                raise UserError(f"{self.place(name)} must be a JSON list of objects.")
            for number, record in enumerate(value):
                place = f"{self.place(name)}[{number}]"
                if not isinstance(record, dict):
                    raise UserError(f"{place}: must be a JSON object.")
                yield place, record
        else:
            raise UserError(f"{self.place(name)} is no table of records.")

    def _lines(self, name: str) -> Iterator[Row]:
        with self._open(name) as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    place = f"{self.place(name)}:{number}"
                    yield place, decode(place, raw, dict[str, Any], first=number == 1)

    def _table(self, name: str, delimiter: str) -> Iterator[Row]:
        with self._text(name) as text:
            # Tab-separated files of these formats have no quotes; a text may start with one.
            quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
            rows = csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True)
            try:
                header = next(rows, [])
                for row in filter(None, rows):
                    place = f"{self.place(name)}:{rows.line_num}"
                    if len(row) != len(header):
                        raise UserError(
                            f"{place}: has {len(row)} columns, but the header has {len(header)}."
                        )
                    yield place, dict(zip(header, row, strict=True))
            except csv.Error as error:
                raise UserError(
                    f"{self.place(name)}:{rows.line_num}: invalid table row ({error})."
                ) from None

    def _arrow(self, name: str, suffix: str) -> Iterator[Row]:
        import pyarrow
        import pyarrow.parquet

        number, problem = 0, f"{self.place(name)} cannot be read"
        with self._open(name) as file:
            with parsing(problem):
                content: Any = file if file.seekable() else io.BytesIO(file.read())
                if suffix == ".parquet":
                    batches = pyarrow.parquet.ParquetFile(content).iter_batches(batch_size=1024)
                else:
                    batches = iter(pyarrow.ipc.open_stream(content))
            while True:
                with parsing(problem):
                    batch = next(batches, None)
                    records = [] if batch is None else batch.to_pylist()
                for record in records:
                    yield f"{self.place(name)}: row {number}", record
                    number += 1
                if batch is None:
                    return


def table_name(name: str) -> str | None:
    """Returns the name of the table that a file belongs to, or None for other files."""
    path = PurePosixPath(name)
    if any(part.startswith(".") for part in path.parts) or not _suffix(name):
        return None
    stem = path.name.removesuffix(path.suffix) if path.suffix in _COMPRESSED else path.name
    stem = _SHARD.sub("", stem.removesuffix(_suffix(name)))
    parent = path.parent.as_posix()
    if _suffix(name) == ".arrow" and stem == "data":  # `datasets` names the folder instead.
        return "data" if parent == "." else parent
    return stem if parent == "." else f"{parent}/{stem}"


def _suffix(name: str) -> str:
    """Returns the suffix of a file without its compression; empty if it is no table."""
    path = PurePosixPath(name)
    suffix = PurePosixPath(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    known = _TEXTS if path.suffix in _COMPRESSED else (*_TEXTS, *_ARROW)
    return suffix if suffix in known else ""


@contextlib.contextmanager
def _unpacking(place: object) -> Iterator[None]:
    """Turns errors of damaged archives and unreadable files into `UserError`."""
    try:
        yield
    except _DAMAGED as error:
        raise UserError(f"{place} is damaged or truncated ({error}); copy it again.") from None
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror or error}.") from None
