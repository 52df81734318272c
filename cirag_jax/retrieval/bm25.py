"""BM25 with the bm25s library (Lucene's formula, k1 = 1.5, b = 0.75), English stems."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import Stemmer

from cirag_jax.errors import UserError, parsing
from cirag_jax.identity import of_packages


def packages() -> dict[str, str]:
    """Versions of what cuts, stems and scores: a text is searched as it was indexed."""
    return of_packages("bm25s", "PyStemmer")


def _bm25s() -> Any:
    """The library, imported late: doing so starts JAX's backends, which is not for an import."""
    import bm25s

    # It reports every index at DEBUG, and asks for that level when it is imported.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


class BM25:
    """A BM25 index over passage texts; without texts, one to be filled by `load`."""

    def __init__(self, texts: Sequence[str] | None):
        self._stemmer = Stemmer.Stemmer("english")
        self._index = _bm25s().BM25()
        self._size = 0
        if texts is not None:
            tokens = self.words(texts)
            if not any(tokens):  # The library cannot index that; the empty word is in no query.
                tokens = [[""]] * len(texts)
            self._index.index(tokens, show_progress=False)
            self._size = len(texts)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], size: int) -> "BM25":
        """Reads what `save` wrote; ``size`` is the number of texts. Its arrays stay on disk."""
        index = cls(None)
        with parsing(f"{os.fspath(folder)} is damaged", "; remove the index and build it anew"):
            found = _bm25s().BM25.load(os.fspath(folder), mmap=True)
            _check(found, index._index, size)
        index._index, index._size = found, size
        return index

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the index as a folder.

        Raises:
          OSError: there is no room.
        """
        self._index.save(os.fspath(folder), show_progress=False)
        try:  # NumPy does not say when the last bytes of a file find no room
            BM25.load(folder, self._size)
        except UserError as error:
            raise OSError(f"it was not written whole, is the disk full? {error}") from None

    def __len__(self) -> int:
        return self._size

    def words(self, texts: Sequence[str]) -> list[list[str]]:
        """The words of each text as they are searched: stems, without those that say nothing."""
        return _bm25s().tokenize(
            list(texts),
            stopwords="en",
            stemmer=self._stemmer,
            show_progress=False,
            return_ids=False,
        )

    def search(
        self, queries: Sequence[str], k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """The k best rows for every query, best first: ``row_QK`` int32.

        ``allowed`` and -1 mean what they mean in ``ExactIndex.search``; ties go to the lower row.
        """
        return self.search_scored(queries, k, allowed)[0]

    def search_scored(
        self, queries: Sequence[str], k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, with ``score_QK`` float32; -inf where the row is -1."""
        k = min(k, self._size)
        row_QK = np.full((len(queries), k), -1, np.int32)
        score_QK = np.full((len(queries), k), -np.inf, np.float32)
        for row, words in enumerate(self.words(queries)):
            scores_N = self.scores(words)
            rows = np.arange(self._size) if allowed is None else np.unique(allowed[row])
            best = best_places(scores_N[rows], k)
            row_QK[row, : len(best)] = rows[best]
            score_QK[row, : len(best)] = scores_N[rows[best]]
        return row_QK, score_QK

    def scores(self, words: Sequence[str]) -> np.ndarray:
        """Of every text for a query of such words, ``score_N`` float32."""
        if not words:  # Only stop words: nothing matches, and bm25s refuses an empty query.
            return np.zeros(self._size, np.float32)
        return self._index.get_scores(list(words))


def _check(found: Any, new: Any, size: int) -> None:
    """Raises ValueError where an index that was read is none over ``size`` texts, as a new one is.

    The library looks scores up by what the files say, without a look at their bounds.
    """
    names = ("method", "idf_method", "k1", "b", "delta", "dtype", "int_dtype", "backend")
    changed = [name for name in names if getattr(found, name) != getattr(new, name)]
    if changed:
        raise ValueError(f"another {changed[0]}")
    count = found.scores["num_docs"]
    if type(count) is not int or count != size:
        raise ValueError(f"it is over {count} texts")
    data, indices, indptr = (found.scores[name] for name in ("data", "indices", "indptr"))
    # The library gives the empty word a number that has no place; no text and no query has that.
    words = [number for word, number in found.vocab_dict.items() if word]
    if any(array.ndim != 1 for array in (data, indices, indptr)) or len(data) != len(indices):
        raise ValueError("its arrays do not fit")
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != len(data) or (np.diff(indptr) < 0).any():
        raise ValueError("its words have no places")
    if len(indices) and (indices.min() < 0 or indices.max() >= size):
        raise ValueError("it names texts that there are not")
    if not all(type(number) is int and 0 <= number < len(indptr) - 1 for number in words):
        raise ValueError("its vocabulary does not fit")
    if not np.isfinite(data).all():
        raise ValueError("a score is not finite")


def best_places(scores_N: np.ndarray, k: int) -> np.ndarray:
    """Places of the k highest scores, best first, ties by place.

    Only what may be among them is sorted.
    """
    if 0 < k < len(scores_N):
        threshold = np.partition(scores_N, -k)[-k]
        places = np.flatnonzero(scores_N >= threshold)
    else:
        places = np.arange(len(scores_N))
    return places[np.argsort(-scores_N[places], kind="stable")[:k]]
