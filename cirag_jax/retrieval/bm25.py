"""BM25 with the bm25s library (Lucene's formula, k1 = 1.5, b = 0.75), English stems."""

import logging
from collections.abc import Sequence
from typing import Any

import bm25s
import numpy as np
import Stemmer

logging.getLogger("bm25s").setLevel(logging.WARNING)  # It reports every index at DEBUG.


class BM25:
    """An in-memory BM25 index over passage texts."""

    def __init__(self, texts: Sequence[str]):
        self._stemmer = Stemmer.Stemmer("english")
        self._index = bm25s.BM25()
        self._index.index(self._tokens(texts), show_progress=False)
        self._size = len(texts)

    def _tokens(self, texts: Sequence[str]) -> Any:
        return bm25s.tokenize(
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
        k = min(k, self._size)
        row_QK = np.full((len(queries), k), -1, np.int32)
        for row, tokens in enumerate(self._tokens(queries)):
            if not tokens:  # Only stop words: nothing matches, and bm25s refuses an empty query.
                scores_N = np.zeros(self._size, np.float32)
            else:
                scores_N = self._index.get_scores(tokens)
            rows = np.arange(self._size) if allowed is None else np.sort(allowed[row])
            best = rows[np.argsort(-scores_N[rows], kind="stable")[:k]]
            row_QK[row, : len(best)] = best
        return row_QK
