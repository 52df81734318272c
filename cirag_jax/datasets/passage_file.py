"""A corpus that stays on disk."""

import array
import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from cirag_jax.datasets.records import decode, field_error, scan_lines
from cirag_jax.errors import UserError
from cirag_jax.types import Passage


class IdTable:
    """Finds the rows of ids, with 12 bytes of memory per id (20 while ids are added).

    The ids themselves are not kept, so the caller compares the ids of the rows that `candidates`
    returns.
    """

    def __init__(self):
        self._hashes = array.array("Q")
        self._sorted_N = self._row_N = np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self._sorted_N)

    def add(self, name: str) -> None:
        """Adds the id of the next row."""
        self._hashes.append(_hash(name))

    def finish(self) -> list[int]:
        """Sorts the ids; returns the rows whose id may be that of an earlier row, in order."""
        hash_N = np.frombuffer(self._hashes, np.uint64)
        self._row_N = np.argsort(hash_N, kind="stable").astype(np.int32)
        self._sorted_N = hash_N[self._row_N]
        self._hashes = array.array("Q")
        repeats = self._row_N[1:][self._sorted_N[1:] == self._sorted_N[:-1]]
        return sorted(repeats.tolist())

    def candidates(self, name: str) -> list[int]:
        """Returns the rows that may have an id, in order; nearly always one or none."""
        key = np.uint64(_hash(name))
        first = int(np.searchsorted(self._sorted_N, key))
        last = int(np.searchsorted(self._sorted_N, key, side="right"))
        return self._row_N[first:last].tolist()


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class PassageFile(Sequence[Passage]):
    """The passages of a ``corpus.jsonl``, in file order, each read when it is used.

    Opening reads and checks the complete file once. In memory are 20 bytes per passage: its place
    in the file and its `IdTable`.

    Attributes:
        digest: The hash of all passages, once `retrieval.index.hash_corpus` has computed it.
        close: Closes the file.
    """

    def __init__(self, path: Path):
        self._path = path
        self.digest: str | None = None
        offsets, self._ids = array.array("Q"), IdTable()
        for offset, _, passage in scan_lines(path, Passage):
            offsets.append(offset)
            self._ids.add(passage.id)
        offsets.append(path.stat().st_size)
        self._offset_N = np.frombuffer(offsets, np.uint64)
        self._descriptor = os.open(path, os.O_RDONLY)
        # Closes the file at the latest when this object is collected.
        self.close = weakref.finalize(self, os.close, self._descriptor)
        for row in self._ids.finish():
            if self.row(self[row].id) != row:
                self.close()
                raise self._repeated(row)

    def __len__(self) -> int:
        return len(self._offset_N) - 1

    def __iter__(self) -> Iterator[Passage]:
        return (passage for _, _, passage in scan_lines(self._path, Passage))

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Passage, ...]: ...
    def __getitem__(self, index: int | slice) -> Passage | tuple[Passage, ...]:
        if isinstance(index, slice):
            return tuple(self[row] for row in range(*index.indices(len(self))))
        row = range(len(self))[index]  # Raises IndexError.
        start, end = int(self._offset_N[row]), int(self._offset_N[row + 1])
        raw = os.pread(self._descriptor, end - start, start)
        place = f"{self._path}: passage {row + 1}"
        return decode(place, raw, Passage, first=not row)

    def row(self, passage_id: str) -> int | None:
        """Returns the row of a passage, or None if the file has no such passage."""
        rows = self._ids.candidates(passage_id)
        return next((row for row in rows if self[row].id == passage_id), None)

    def _repeated(self, row: int) -> UserError:
        for number, (_, place, passage) in enumerate(scan_lines(self._path, Passage)):
            if number == row:
                problem = f"repeats the id {passage.id!r} of an earlier line"
                return field_error(place, "id", problem)
        return UserError(f"{self._path} changed while it was read; run the command again.")


class PassagesById(Mapping[str, Passage]):
    """The passages of a file by id, in file order."""

    def __init__(self, passages: PassageFile):
        self.passages = passages

    def __len__(self) -> int:
        return len(self.passages)

    def __iter__(self) -> Iterator[str]:
        return (passage.id for passage in self.passages)

    def __contains__(self, passage_id: object) -> bool:
        return isinstance(passage_id, str) and self.passages.row(passage_id) is not None

    def __getitem__(self, passage_id: str) -> Passage:
        row = self.passages.row(passage_id)
        if row is None:
            raise KeyError(passage_id)
        return self.passages[row]

    def values(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the passages, which are read once per iteration."""
        return self.passages

    def items(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yields ids and passages, reading the file once."""
        return ((passage.id, passage) for passage in self.passages)
