"""Exact maximum-inner-product search and candidate scoring, jitted."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_QUERIES = 128  # Queries a call: one compilation, bounded score matrix.
_QUERY_BUCKETS = (1, 8, 32, _QUERIES)  # A call's queries are padded to one of these.
_CANDIDATE_BUCKETS = (16, 32, 64, 128, 256, 512, 1024)


class ExactIndex:
    """Inner-product search over all rows of one matrix.

    Args:
      vectors_ND: float32; stays on the default device.
    """

    def __init__(self, vectors_ND: np.ndarray, *, dtype: str = "float32", mesh: Any = None):
        self._vectors_ND = jnp.asarray(vectors_ND[:], jnp.float32)

    def __len__(self) -> int:
        return self._vectors_ND.shape[0]

    def search(
        self, query_QD: np.ndarray, k: int, allowed: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best rows for every query, best first.

        Args:
          query_QD: float32 queries.
          k: rows wanted; fewer come back where the index is smaller.
          allowed: for each query, the rows it may find (``corpus="per_question"``); places beyond
            them hold row -1 and score -inf.

        Returns:
          ``row_QK`` int32 and ``score_QK`` float32.
        """
        k = min(k, len(self))
        rows, scores = [], []
        for start in range(0, len(query_QD), _QUERIES):
            part_QD = _pad_rows(
                np.asarray(query_QD[start : start + _QUERIES], np.float32), _QUERIES
            )
            mask_QN = None
            if allowed is not None:
                mask_QN = np.zeros((_QUERIES, len(self)), bool)
                for row, may in enumerate(allowed[start : start + _QUERIES]):
                    mask_QN[row, may] = True
            score_QK, row_QK = _top_k(part_QD, self._vectors_ND, k, mask_QN)
            rows.append(np.asarray(row_QK))
            scores.append(np.asarray(score_QK))
        if not rows:
            return np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
        row_QK = np.concatenate(rows)[: len(query_QD)].astype(np.int32)
        score_QK = np.concatenate(scores)[: len(query_QD)]
        return np.where(np.isneginf(score_QK), -1, row_QK), score_QK


@functools.partial(jax.jit, static_argnums=2)
def _top_k(query_QD, vectors_ND, k, mask_QN):
    scores_QN = jnp.einsum("qd,nd->qn", query_QD, vectors_ND, preferred_element_type=jnp.float32)
    if mask_QN is not None:
        scores_QN = jnp.where(mask_QN, scores_QN, -jnp.inf)
    return jax.lax.top_k(scores_QN, k)


def score_candidates(
    query_QD: np.ndarray, unit_ND: np.ndarray, candidates: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Inner products of each query with its own candidates.

    Args:
      query_QD: float32 queries.
      unit_ND: float32 matrix on the host; only the rows asked for travel to the device.
      candidates: for each query, int rows of ``unit_ND``.

    Returns:
      For each query, float32 scores in the order of its candidates.
    """
    result: list[np.ndarray] = []
    for start in range(0, len(candidates), _QUERIES):
        part = candidates[start : start + _QUERIES]
        longest = max(map(len, part), default=0)
        width = next((b for b in _CANDIDATE_BUCKETS if b >= longest), longest)
        index_QC = np.zeros((_QUERIES, width), np.int64)
        for row, rows in enumerate(part):
            index_QC[row, : len(rows)] = rows
        if not len(unit_ND):
            result += [np.zeros(0, np.float32) for _ in part]
            continue
        queries = _pad_rows(np.asarray(query_QD[start : start + _QUERIES], np.float32), _QUERIES)
        score_QC = np.asarray(_score(queries, unit_ND[index_QC]))
        result += [score_QC[row, : len(rows)] for row, rows in enumerate(part)]
    return result


@jax.jit
def _score(query_QD, unit_QCD):
    return jnp.einsum("qd,qcd->qc", query_QD, unit_QCD, preferred_element_type=jnp.float32)


def _pad_rows(x: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(x, ((0, rows - len(x)), (0, 0)))
