"""A corpus read as a stream, as often as needed, however large it is."""

import contextlib
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cirag_jax.datasets.jsonl import CORPUS
from cirag_jax.datasets.records import read_lines
from cirag_jax.errors import UserError
from cirag_jax.types import Passage

_BATCH = 1000


class CorpusScan:
    """Passages in file order, and which ids there are; a context manager.

    Ids stand in a temporary SQLite file, not in memory.

    Args:
        source: A dataset folder (only its ``corpus.jsonl`` is read), or passages in memory.
    """

    def __init__(self, source: Path | Sequence[Passage]):
        self._source = source
        self._ids = sqlite3.connect("", isolation_level=None)  # a file of SQLite's own
        self._ids.execute("PRAGMA journal_mode = OFF")
        self._ids.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
        self.is_checked = False

    def __enter__(self) -> "CorpusScan":
        return self

    def __exit__(self, *_: object) -> None:
        self._ids.close()

    def check(self) -> Iterator[Passage]:
        """The passages, in order; the first pass, which finds what is wrong with them.

        Raises:
            UserError: The file cannot be read, a line is broken, or an id occurs twice.
        """
        self._ids.execute("DELETE FROM ids")
        self._ids.execute("BEGIN")
        for place, passage in self._passages():
            try:
                self._ids.execute("INSERT INTO ids VALUES (?)", (passage.id,))
            except sqlite3.IntegrityError:
                raise UserError(
                    f"{place}: field 'id' repeats the id {passage.id!r} of an earlier line."
                ) from None
            yield passage
        self._ids.execute("COMMIT")
        self.is_checked = True

    def __iter__(self) -> Iterator[Passage]:
        return (passage for _, passage in self._passages())

    def _passages(self) -> Iterator[tuple[str, Passage]]:
        if not isinstance(self._source, Path):
            yield from ((f"passage {i}", p) for i, p in enumerate(self._source, start=1))
            return
        path = self._source / CORPUS
        if not path.is_file():
            raise UserError(f"{path} does not exist; extraction reads the passages from it.")
        yield from read_lines(path, Passage)

    def missing(self, passage_ids: Iterable[str]) -> Iterator[str]:
        """Those of ``passage_ids`` that the corpus lacks; after `check`."""
        assert self.is_checked
        ids = iter(passage_ids)
        while batch := list(itertools.islice(ids, _BATCH)):
            known = set(self._known(batch))
            yield from (passage_id for passage_id in batch if passage_id not in known)

    def _known(self, batch: Sequence[str]) -> Iterator[Any]:
        for start in range(0, len(batch), 500):
            part = batch[start : start + 500]
            marks = ",".join("?" * len(part))
            rows = self._ids.execute(f"SELECT id FROM ids WHERE id IN ({marks})", part)
            yield from (row[0] for row in rows)


def open_corpus(folder: str | None, stack: contextlib.ExitStack) -> CorpusScan:
    """The corpus of a dataset folder, or the built-in dataset's where ``folder`` is None."""
    if folder is None:
        from cirag_jax.datasets import demo

        return stack.enter_context(CorpusScan(tuple(demo.build().corpus.values())))
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; it should hold {CORPUS}.")
    return stack.enter_context(CorpusScan(path))
