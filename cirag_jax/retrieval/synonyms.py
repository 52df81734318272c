"""Synonyms in HippoRAG 2's graph: entities whose names have similar embeddings.

The search is exact for few entities and approximate for many. There is one cell (exact search) for
fewer than 4^6 entities, and 4 * 2^j cells of similar entities for 4^j entities or more, which keeps
the cost below E^1.5.
"""

import numpy as np
from scipy import sparse

_BLOCK = 1 << 24  # Maximum number of similarities in memory: 64 MiB.
_EXACT_LEVEL = 6
_CELLS_PER_ROOT = 4
_PROBES = 16  # Cells searched for each entity.
_TRAIN_PER_CELL = 32  # Entities per cell from which the cells' centers are computed.
_ROUNDS = 6  # Rounds of k-means.

# Rows and cosines of each entity's neighbors [E, M], best first; -1 and -inf if there are fewer.
Synonyms = tuple[np.ndarray, np.ndarray]


def synonyms(
    vectors_ED: np.ndarray,
    has_synonyms_E: np.ndarray,
    min_score: float,
    most: int,
    *,
    known: Synonyms | None = None,
) -> Synonyms:
    """Returns at most ``most`` neighbors of each entity with a cosine of at least ``min_score``.

    With several cells, each entity is compared with the entities in the `_PROBES` cells nearest to
    it. The centers of the cells depend on the first entities only and change when the number of
    entities passes a power of four. Otherwise, ``known``, the result for the first entities, saves
    the comparisons among them.

    Args:
      vectors_ED: unit-length vectors, float32.
      has_synonyms_E: entities that have synonyms and are synonyms.
      min_score: lowest cosine of synonyms.
      most: maximum number of neighbors per entity.
      known: the result for the first entities; None compares all.
    """
    num_entities = len(vectors_ED)
    near_EM, score_EM = no_synonyms(num_entities, most)
    num_cells = _num_cells(num_entities)
    start = 0
    if known is not None and _num_cells(len(known[0])) == num_cells:
        start = len(known[0])
        near_EM[:start], score_EM[:start] = known
    if not most or start == num_entities:
        return near_EM, score_EM
    probe_EP = _probes(vectors_ED, num_cells)
    probing = _members(probe_EP, num_cells)
    homes = _members(probe_EP[:, :1], num_cells)
    for queries, keys in zip(probing, homes, strict=True):
        queries, keys = (rows[has_synonyms_E[rows]] for rows in (queries, keys))
        is_new = queries >= start
        for rows, others in ((queries[is_new], keys), (queries[~is_new], keys[keys >= start])):
            block = max(_BLOCK // max(len(others), 1), 1)
            for at in range(0, len(rows) if len(others) else 0, block):
                _add_nearest(
                    near_EM, score_EM, vectors_ED, rows[at : at + block], others, min_score
                )
    return near_EM, score_EM


def no_synonyms(num_entities: int, most: int) -> Synonyms:
    """Returns empty lists of synonyms."""
    shape = (num_entities, most)
    return np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)


def _level(num_entities: int) -> int:
    """Returns the largest j with 4^j <= ``num_entities``."""
    return max(num_entities.bit_length() - 1, 0) // 2


def _num_cells(num_entities: int) -> int:
    level = _level(num_entities)
    return 1 if level < _EXACT_LEVEL else _CELLS_PER_ROOT << level


def _probes(vectors_ED: np.ndarray, num_cells: int) -> np.ndarray:
    """Returns the cells nearest to each entity, ``[E, P]``, its home first."""
    if num_cells == 1:
        return np.zeros((len(vectors_ED), 1), np.int64)
    num_trained = min(4 ** _level(len(vectors_ED)), _TRAIN_PER_CELL * num_cells)
    center_CD = _centers(vectors_ED[:num_trained], num_cells)
    return np.concatenate(
        [
            _best_places(vectors_ED[at : at + _BLOCK // num_cells] @ center_CD.T, _PROBES)
            for at in range(0, len(vectors_ED), _BLOCK // num_cells)
        ]
    )


def _centers(vectors_ND: np.ndarray, num_cells: int) -> np.ndarray:
    """Returns the unit-length centers of spherical k-means, ``[cells, D]``."""
    first = np.linspace(0, len(vectors_ND) - 1, num_cells).astype(np.int64)
    center_CD = vectors_ND[first]
    for _ in range(_ROUNDS):
        cell_N = np.argmax(vectors_ND @ center_CD.T, axis=1)
        ones = np.ones(len(cell_N), np.float32)
        member_CN = sparse.csr_array(
            (ones, (cell_N, np.arange(len(cell_N)))), shape=(num_cells, len(cell_N))
        )
        sum_CD = member_CN @ vectors_ND
        length_C1 = np.linalg.norm(sum_CD, axis=1, keepdims=True)
        center_CD = np.where(length_C1 > 0, sum_CD / np.maximum(length_C1, 1e-12), center_CD)
    return center_CD


def _members(cell_EP: np.ndarray, num_cells: int) -> list[np.ndarray]:
    """Returns the entities of each cell, in ascending order."""
    entity_N = np.repeat(np.arange(len(cell_EP)), cell_EP.shape[1])
    order = np.argsort(cell_EP.reshape(-1), kind="stable")
    counts = np.bincount(cell_EP.reshape(-1), minlength=num_cells)
    return np.split(entity_N[order], np.cumsum(counts)[:-1])


def _best_places(score_BK: np.ndarray, most: int) -> np.ndarray:
    """Returns the places of the ``most`` highest scores of each row, best first."""
    if most < score_BK.shape[1]:
        lowest_B1 = -np.partition(-score_BK, most - 1, axis=1)[:, most - 1 : most]
        # Among scores equal to the lowest one, the first are kept.
        is_tie_BK = score_BK == lowest_B1
        room_B1 = most - (score_BK > lowest_B1).sum(axis=1, keepdims=True)
        is_best_BK = (score_BK > lowest_B1) | (is_tie_BK & (is_tie_BK.cumsum(axis=1) <= room_B1))
        place_BM = np.nonzero(is_best_BK)[1].reshape(len(score_BK), most)
    else:
        place_BM = np.broadcast_to(np.arange(score_BK.shape[1]), score_BK.shape)
    part_BM = np.take_along_axis(score_BK, place_BM, 1)
    return np.take_along_axis(place_BM, np.argsort(-part_BM, axis=1, kind="stable"), 1)


def _add_nearest(
    near_EM: np.ndarray,
    score_EM: np.ndarray,
    vectors_ED: np.ndarray,
    row_B: np.ndarray,
    other_K: np.ndarray,
    min_score: float,
) -> None:
    """Merges the nearest of the entities ``other_K`` into the lists of the entities ``row_B``."""
    # Rounding errors depend on the size of the product. Without them, ties go to the lower row.
    score_BK = vectors_ED[row_B].astype(np.float64) @ vectors_ED[other_K].astype(np.float64).T
    score_BK = score_BK.round(6).astype(np.float32)
    score_BK[(score_BK < min_score) | (row_B[:, None] == other_K)] = -np.inf
    has_some = np.isfinite(score_BK).any(axis=1)
    row_B, score_BK = row_B[has_some], score_BK[has_some]
    if not len(row_B):
        return
    best_BM = _best_places(score_BK, near_EM.shape[1])
    near_BN = np.concatenate([near_EM[row_B], other_K[best_BM].astype(np.int32)], 1)
    score_BN = np.concatenate([score_EM[row_B], np.take_along_axis(score_BK, best_BM, 1)], 1)
    near_BN[np.isinf(score_BN)] = -1
    order = np.lexsort((near_BN, -score_BN), axis=1)[:, : near_EM.shape[1]]
    near_EM[row_B] = np.take_along_axis(near_BN, order, 1)
    score_EM[row_B] = np.take_along_axis(score_BN, order, 1)
