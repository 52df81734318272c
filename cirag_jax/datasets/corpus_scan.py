"""A corpus of any size, read as a stream."""

from collections.abc import Iterator
from pathlib import Path

from cirag_jax.datasets import demo, formats
from cirag_jax.datasets.jsonl import CORPUS
from cirag_jax.datasets.passage_file import PassageFile, PassagesById
from cirag_jax.errors import UserError
from cirag_jax.io import Closing
from cirag_jax.types import Passage


class CorpusScan(Closing):
    """Passages in file order, which are read from disk when they are used.

    Reads only ``corpus.jsonl`` from ``folder``, or the built-in dataset if ``folder`` is None. The
    passages of other projects' formats are kept in memory.
    """

    def __init__(self, folder: str | None):
        if folder is None:
            self._by_id = demo.build().corpus
            return
        if not formats.is_own(Path(folder)):
            dataset = formats.read(Path(folder), corpus=False, questions=False, triples=False)
            self._by_id = dataset.corpus
            return
        path = Path(folder).expanduser() / CORPUS
        if not path.is_file():
            raise UserError(f"{path} does not exist; put the passages there.")
        self._by_id = PassagesById(PassageFile(path))

    def close(self) -> None:
        """Closes the file."""
        if isinstance(self._by_id, PassagesById):
            self._by_id.passages.close()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self._by_id.values())

    def __contains__(self, passage_id: object) -> bool:
        return passage_id in self._by_id
