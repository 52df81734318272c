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

    Raises:
      UserError: there is no unit.
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
        flat = [text for found in texts for text in found]
        vectors_ND = encoder.encode(flat, "passage", progress)
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

        Raises:
          UserError: feedback, which moves vectors of passages.
        """
        if any(feedback):
            raise UserError("an index over units has no passage vectors that could move")
        rows = None
        if allowed is not None:
            rows = [
                np.concatenate([np.arange(*self._start_P[p : p + 2]) for p in found] or [[]])
                .astype(np.int32)
                for found in allowed
            ]  # fmt: skip
        query_QD = self._encoder.encode(list(queries), "query")
        unit_QN, score_QN = self._search.search(query_QD, _DEPTH * k, rows)
        row_QK = np.full((len(queries), k), -1, np.int32)
        score_QK = np.full((len(queries), k), -np.inf, np.float32)
        for query, (units, scores) in enumerate(zip(unit_QN, score_QN, strict=True)):
            best: dict[int, float] = {}
            for unit, score in zip(units, scores, strict=True):
                if unit >= 0:
                    best.setdefault(int(self._passage_of_N[unit]), float(score))
            for place, (row, score) in enumerate(list(best.items())[:k]):
                row_QK[query, place], score_QK[query, place] = row, score
        return row_QK, score_QK
