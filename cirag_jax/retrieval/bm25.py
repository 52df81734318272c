"""BM25 with the bm25s library: Lucene's formula, k1 = 1.5, b = 0.75, English stems.

A score is the sum of the scores of two indexes. The first has the words that bm25s finds. The
second has tokens that bm25s does not find, such as pairs of Chinese characters
(`words.other_tokens`). ASCII texts have no such tokens.
"""

import functools
import logging
import os
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import Stemmer
from absl import logging as log

from cirag_jax.errors import UserError, parsing
from cirag_jax.identity import of_packages
from cirag_jax.io import machine_memory
from cirag_jax.retrieval.search import empty_results
from cirag_jax.retrieval.words import other_tokens

# Identifies the tokens. Change it with them, so that indexes of earlier versions are refused.
TOKENS = "words, NFC, NFKC, bigrams"

# Memory while an index is built: the texts, their words as Python strings, and the scores.
_BYTES_PER_CHARACTER = 8

_OTHERS, _ROWS = "others", "rows.npy"  # The second index and its rows, in the index's folder.


def packages() -> dict[str, str]:
    """Returns the versions of the packages that tokenize, stem and score."""
    return of_packages("bm25s", "PyStemmer")


def _bm25s() -> Any:
    import bm25s  # Late, because importing it starts JAX's backends.

    # The import sets the level to DEBUG, which reports every index.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def check_memory(characters: int) -> None:
    """Raises UserError if texts of this total length are too long to index on this machine."""
    needed = characters * _BYTES_PER_CHARACTER
    available = machine_memory()
    if needed > available:
        raise UserError(
            f"building a bm25 index of {characters / 1e9:.1f} billion characters needs about "
            f"{needed / 2**30:.0f} GiB of memory, but this machine has {available / 2**30:.0f}; "
            "use config.retriever.kind=faiss_ivfpq or exact, or a machine with more memory"
        )


class BM25:
    """A BM25 index over ``texts``; with None, an empty index that `load` fills."""

    def __init__(self, texts: Sequence[str] | None):
        self._stemmer = Stemmer.Stemmer("english")
        self._index, self._others = _bm25s().BM25(), _bm25s().BM25()
        self._rows = np.zeros(0, np.int64)  # The rows of the second index.
        self._size, self._has_warned = 0, False
        if texts is not None:
            tokens, others = self._tokens(texts)
            if not any(tokens):  # bm25s cannot index these; no query has the empty word.
                tokens = [[""]] * len(texts)
            self._index.index(tokens, show_progress=False)
            self._size = len(texts)
            self._rows = np.flatnonzero([bool(words) for words in others])
            if len(self._rows):
                self._others.index([others[row] for row in self._rows], show_progress=False)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], size: int) -> "BM25":
        """Reads an index of ``size`` texts that `save` wrote; its arrays stay on disk."""
        index = cls(None)
        folder = os.fspath(folder)
        with parsing(f"{folder} is damaged", "; remove the index and build it again"):
            rows = np.load(os.path.join(folder, _ROWS))
            if rows.ndim != 1 or (np.diff(rows, prepend=-1, append=size) < 1).any():
                raise ValueError("its rows are invalid")
            index._index = _load(folder, size)
            if len(rows):
                index._others = _load(os.path.join(folder, _OTHERS), len(rows))
        index._rows, index._size = rows, size
        return index

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the index as a folder.

        Raises:
          OSError: the disk is full.
        """
        self._index.save(os.fspath(folder), show_progress=False)
        np.save(os.path.join(folder, _ROWS), self._rows)
        if len(self._rows):
            self._others.save(os.path.join(folder, _OTHERS), show_progress=False)
        try:  # NumPy does not report a disk that is full at the last bytes of a file.
            BM25.load(folder, self._size)
        except UserError as error:
            raise OSError(f"the index is incomplete; is the disk full? {error}") from None

    def __len__(self) -> int:
        return self._size

    def words(self, texts: Sequence[str]) -> list[list[str]]:
        """Returns each text's stems, without stop words, and its tokens of the second index."""
        return [words + others for words, others in zip(*self._tokens(texts), strict=True)]

    def _tokens(self, texts: Sequence[str]) -> tuple[list[list[str]], list[list[str]]]:
        """Returns each text's tokens of the first and of the second index."""
        tokenize = functools.partial(
            _bm25s().tokenize,
            stopwords="en",
            stemmer=self._stemmer,
            show_progress=False,
            return_ids=False,
        )
        # Otherwise, a letter and its accent would be two words.
        composed = [unicodedata.normalize("NFC", text) for text in texts]
        others = [" ".join(other_tokens(text)) for text in composed]
        return tokenize(composed), tokenize(others, token_pattern=r"\S+")

    def search(
        self, queries: Sequence[str], k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``row_QK`` int32 and ``score_QK`` float32, as `ExactIndex.search` does.

        Only texts that share a word with the query are results; the remaining places have row -1
        and score -inf.
        """
        k = min(k, self._size)
        row_QK, score_QK = empty_results(len(queries), k)
        for row, words in enumerate(self.words(queries)):
            scores_N = self.scores(words)
            rows = np.arange(self._size) if allowed is None else np.unique(allowed[row])
            rows = rows[scores_N[rows] > 0]
            if not len(rows):
                self._warn(queries[row])
            best = rows[best_places(scores_N[rows], k)]
            row_QK[row, : len(best)] = best
            score_QK[row, : len(best)] = scores_N[best]
        return row_QK, score_QK

    def scores(self, words: Sequence[str]) -> np.ndarray:
        """Returns ``score_N`` float32, the score of every text for a query of ``words``."""
        if not words:  # The query had only stop words; bm25s rejects an empty one.
            return np.zeros(self._size, np.float32)
        scores_N = self._index.get_scores(list(words))
        if len(self._rows):
            scores_N[self._rows] += self._others.get_scores(list(words))
        return scores_N

    def _warn(self, query: str) -> None:
        if not self._has_warned:
            log.warning(
                "BM25 finds nothing for %r, because no passage has a word of it; later queries "
                "without results are not reported.",
                query,
            )
        self._has_warned = True


def _load(folder: str, size: int) -> Any:
    loaded = _bm25s().BM25.load(folder, mmap=True)
    _check(loaded, _bm25s().BM25(), size)
    return loaded


def _check(loaded: Any, new: Any, size: int) -> None:
    """Raises ValueError unless a loaded index is valid and has ``size`` texts.

    This is necessary because bm25s reads the arrays without checking bounds.
    """
    names = ("method", "idf_method", "k1", "b", "delta", "dtype", "int_dtype", "backend")
    changed = [name for name in names if getattr(loaded, name) != getattr(new, name)]
    if changed:
        raise ValueError(f"different {changed[0]}")
    count = loaded.scores["num_docs"]
    if type(count) is not int or count != size:
        raise ValueError(f"it has {count} texts, not {size}")
    data, indices, indptr = (loaded.scores[name] for name in ("data", "indices", "indptr"))
    # bm25s numbers the empty word beyond `indptr`; no text or query contains this word.
    words = [number for word, number in loaded.vocab_dict.items() if word]
    if any(array.ndim != 1 for array in (data, indices, indptr)) or len(data) != len(indices):
        raise ValueError("its arrays have inconsistent shapes")
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != len(data) or (np.diff(indptr) < 0).any():
        raise ValueError("its offsets are invalid")
    if len(indices) and (indices.min() < 0 or indices.max() >= size):
        raise ValueError("a text number is out of range")
    if not all(type(number) is int and 0 <= number < len(indptr) - 1 for number in words):
        raise ValueError("its vocabulary does not match its arrays")
    if not np.isfinite(data).all():
        raise ValueError("a score is not finite")


def best_places(scores_N: np.ndarray, k: int) -> np.ndarray:
    """Returns the indices of the k highest scores, best first; ties go to the lower index."""
    if 0 < k < len(scores_N):
        threshold = np.partition(scores_N, -k)[-k]
        places = np.flatnonzero(scores_N >= threshold)
    else:
        places = np.arange(len(scores_N))
    return places[np.argsort(-scores_N[places], kind="stable")[:k]]
