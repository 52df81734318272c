"""An index over units (sentences or triples) that ranks each passage by its best unit."""

from collections.abc import Collection, Sequence

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.retrieval.encode import Progress
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.search import ExactIndex, accelerators, empty_results
from cirag_jax.types import Feedback, Role

_DEPTH = 10  # Units searched per returned passage, because several good units may share a passage.


class UnitIndex:
    """Ranks passages by their best unit's inner product with the query (KiRAG's "w/o Retriever").

    An aligner works best with the kind of units that it was trained on.

    Args:
      texts: the units of every passage, in row order, in the form that the encoder expects.
      encoder: embeds units and queries.
      role: the role in which units are embedded.
      dtype: dtype of the stored vectors, ``float32`` or ``bfloat16``.
      progress: called with the number of texts just embedded.
    """

    def __init__(
        self,
        texts: Sequence[Collection[str]],
        encoder: Encoder,
        role: Role = "passage",
        *,
        dtype: str = "float32",
        progress: Progress | None = None,
    ):
        counts = [len(group) for group in texts]
        if not sum(counts):
            raise UserError("nothing to index: no passage has a sentence or a triple")
        self._encoder = encoder
        self._passage_of_N = np.repeat(np.arange(len(texts)), counts)
        self._start_P = np.concatenate([[0], np.cumsum(counts)])
        self.texts = [text for group in texts for text in group]
        vectors_ND = encoder.encode(self.texts, role, progress)
        self._search = ExactIndex(vectors_ND, dtype=dtype, mesh=accelerators())

    def search(
        self,
        queries: Sequence[str],
        k: int,
        allowed: Sequence[np.ndarray] | None = None,
        feedback: Sequence[Feedback | None] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the k best passages for every query, as `PassageIndex.search` does.

        Only passages with a unit among the 10 * k best units are found; the remaining places have
        row -1 and score -inf.
        """
        if any(feedback):
            raise UserError("an index over units does not support relevance feedback")
        return self.nearest(self._encoder.encode(list(queries), "query"), k, allowed)

    def nearest(
        self, query_QD: np.ndarray, k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same as `search`, but for embedded queries."""
        rows = None
        if allowed is not None:
            rows = [
                np.concatenate([np.arange(*self._start_P[p : p + 2]) for p in group] or [[]])
                .astype(np.int32)
                for group in allowed
            ]  # fmt: skip
        unit_QN, score_QN = self._search.search(query_QD, _DEPTH * k, rows)
        row_QK, score_QK = empty_results(len(query_QD), k)
        for query, (units, scores) in enumerate(zip(unit_QN, score_QN, strict=True)):
            best: dict[int, float] = {}
            for unit, score in zip(units, scores, strict=True):
                if unit >= 0:
                    best.setdefault(int(self._passage_of_N[unit]), float(score))
            for place, (row, score) in enumerate(list(best.items())[:k]):
                row_QK[query, place], score_QK[query, place] = row, score
        return row_QK, score_QK

    def counts(self, row_R: np.ndarray) -> np.ndarray:
        """Returns the number of units of each passage."""
        return self._start_P[row_R + 1] - self._start_P[row_R]

    def vectors(self, unit_N: np.ndarray) -> np.ndarray:
        """Returns the vectors of units by their indices, ``[N, D]`` float32."""
        return self._search.vectors(unit_N.tolist())

    def best(self, query_QD: np.ndarray, row_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds, for each query, the best unit of each of the passages ``row_R``.

        Every passage must have a unit.

        Returns:
          ``score_QR`` float32, inner products, and ``unit_QR``, the indices of the units.
        """
        count_R = self.counts(row_R)
        if not len(row_R):
            empty = np.zeros((len(query_QD), 0), np.float32)
            return empty, empty.astype(np.int64)
        first_R = np.concatenate([[0], np.cumsum(count_R)[:-1]])
        unit_N = np.arange(count_R.sum()) + np.repeat(self._start_P[row_R] - first_R, count_R)
        score_QN = query_QD @ self._search.vectors(unit_N).T
        best_QR = np.maximum.reduceat(score_QN, first_R, axis=1)
        # Ties go to the first unit.
        is_best_QN = score_QN == np.repeat(best_QR, count_R, axis=1)
        place_QN = np.where(is_best_QN, unit_N, self._start_P[-1])
        return best_QR, np.minimum.reduceat(place_QN, first_R, axis=1)
