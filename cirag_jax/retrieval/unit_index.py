"""An index over sentences or triples that finds passages: each by its best one."""

from collections.abc import Collection, Sequence

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.retrieval.encoders import Encoder, Progress
from cirag_jax.retrieval.search import ExactIndex, accelerators
from cirag_jax.types import Feedback

# Units looked at for each passage wanted: a query's best units share passages.
_DEPTH = 10


class UnitIndex:
    """Passages by the inner product of query and best unit (KiRAG's "w/o Retriever").

    An aligner knows passages best by the units that it was trained on. ``texts`` are the units of
    every passage, in the order of the rows, as the encoder reads them; vectors are kept in
    ``dtype``, ``float32`` or ``bfloat16``.
    """

    def __init__(
        self,
        texts: Sequence[Collection[str]],
        encoder: Encoder,
        *,
        dtype: str = "float32",
        progress: Progress | None = None,
    ):
        counts = [len(found) for found in texts]
        if not sum(counts):
            raise UserError("there is nothing to index: no passage has a sentence or a triple")
        self._encoder = encoder
        self._passage_of_N = np.repeat(np.arange(len(texts)), counts)
        self._start_P = np.concatenate([[0], np.cumsum(counts)])
        self.texts = [text for found in texts for text in found]
        vectors_ND = encoder.encode(self.texts, "passage", progress)
        self._search = ExactIndex(vectors_ND, dtype=dtype, mesh=accelerators())

    def search(
        self,
        queries: Sequence[str],
        k: int,
        allowed: Sequence[np.ndarray] | None = None,
        feedback: Sequence[Feedback | None] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best passages for every query, as `PassageIndex.search`.

        Places beyond those whose units are among the best ten times k hold row -1 and score
        -inf.
        """
        if any(feedback):
            raise UserError("an index over units has no passage vectors that could move")
        return self.nearest(self._encoder.encode(list(queries), "query"), k, allowed)

    def nearest(
        self, query_QD: np.ndarray, k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, for queries that are embedded already."""
        rows = None
        if allowed is not None:
            rows = [
                np.concatenate([np.arange(*self._start_P[p : p + 2]) for p in found] or [[]])
                .astype(np.int32)
                for found in allowed
            ]  # fmt: skip
        unit_QN, score_QN = self._search.search(query_QD, _DEPTH * k, rows)
        row_QK = np.full((len(query_QD), k), -1, np.int32)
        score_QK = np.full((len(query_QD), k), -np.inf, np.float32)
        for query, (units, scores) in enumerate(zip(unit_QN, score_QN, strict=True)):
            best: dict[int, float] = {}
            for unit, score in zip(units, scores, strict=True):
                if unit >= 0:
                    best.setdefault(int(self._passage_of_N[unit]), float(score))
            for place, (row, score) in enumerate(list(best.items())[:k]):
                row_QK[query, place], score_QK[query, place] = row, score
        return row_QK, score_QK

    def counts(self, row_R: np.ndarray) -> np.ndarray:
        """How many units each passage has."""
        return self._start_P[row_R + 1] - self._start_P[row_R]

    def vectors(self, unit_N: np.ndarray) -> np.ndarray:
        """Of units by their numbers, ``[N, D]`` float32."""
        return self._search.vectors(unit_N.tolist())

    def best(self, query_QD: np.ndarray, row_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best unit of each of these passages, all of which must have one.

        Returns:
          ``score_QR`` float32, inner products, and ``unit_QR``, the numbers of the units.
        """
        count_R = self.counts(row_R)
        if not len(row_R):
            none = np.zeros((len(query_QD), 0), np.float32)
            return none, none.astype(np.int64)
        first_R = np.concatenate([[0], np.cumsum(count_R)[:-1]])
        unit_N = np.arange(count_R.sum()) + np.repeat(self._start_P[row_R] - first_R, count_R)
        score_QN = query_QD @ self._search.vectors(unit_N).T
        best_QR = np.maximum.reduceat(score_QN, first_R, axis=1)
        # The first unit of its passage that has the best score.
        is_best_QN = score_QN == np.repeat(best_QR, count_R, axis=1)
        place_QN = np.where(is_best_QN, unit_N, self._start_P[-1])
        return best_QR, np.minimum.reduceat(place_QN, first_R, axis=1)
