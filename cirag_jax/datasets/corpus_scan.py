"""A corpus of any size, read as a stream."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from cirag_jax.datasets import demo
from cirag_jax.datasets.jsonl import CORPUS
from cirag_jax.datasets.records import field_error, read_lines
from cirag_jax.errors import UserError
from cirag_jax.io import Closing
from cirag_jax.types import Passage


class CorpusScan(Closing):
    """Passages in file order; their ids are indexed in a temporary file, not in memory.

    Reads only ``corpus.jsonl`` from ``folder``, or the built-in dataset if ``folder`` is None.
    """

    def __init__(self, folder: str | None):
        self._folder = None if folder is None else Path(folder).expanduser()
        if self._folder is not None and not (self._folder / CORPUS).is_file():
            raise UserError(f"{self._folder / CORPUS} does not exist; put the passages there.")
        self._ids = sqlite3.connect("", isolation_level=None)  # A temporary file.
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self._ids))  # If the corpus is invalid.
            self._ids.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
            self._ids.execute("BEGIN")
            for place, passage in self._passages():
                self._add(place, passage.id)
            stack.pop_all()

    def close(self) -> None:
        """Closes the index of ids."""
        self._ids.close()

    def __len__(self) -> int:
        return self._ids.execute("SELECT COUNT(*) FROM ids").fetchone()[0]

    def __iter__(self) -> Iterator[Passage]:
        return (passage for _, passage in self._passages())

    def __contains__(self, passage_id: object) -> bool:
        row = self._ids.execute("SELECT 1 FROM ids WHERE id = ?", (passage_id,)).fetchone()
        return row is not None

    def _add(self, place: str, passage_id: str) -> None:
        try:
            self._ids.execute("INSERT INTO ids VALUES (?)", (passage_id,))
        except sqlite3.IntegrityError:
            problem = f"repeats the id {passage_id!r} of an earlier line"
            raise field_error(place, "id", problem) from None

    def _passages(self) -> Iterator[tuple[str, Passage]]:
        if self._folder is None:
            yield from demo.build().corpus.items()
        else:
            yield from read_lines(self._folder / CORPUS, Passage)
