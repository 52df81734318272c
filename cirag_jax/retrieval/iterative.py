"""Iterative retrieval with the aligner alone: KiRAG without its constructor (Table 4).

Every step finds passages for the question and the chain so far, scores their units against the same
query, and appends the best unit to the chain. Passages come from a passage index (K_0 a step), or
from the aligner's own search over every unit of the corpus, which is the paper's "w/o Retriever".
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from cirag_jax.datasets.chains import Unit, UnitKind, query_text
from cirag_jax.errors import UserError
from cirag_jax.retrieval.search import ExactIndex, score_candidates

Embed = Callable[[Sequence[str], Literal["query", "passage"]], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Ranking:
    """What iterative retrieval found for one question.

    ``passages`` are corpus rows, best first, with ``scores``; ``chain`` the units appended, in
    order.
    """

    passages: tuple[int, ...]
    scores: tuple[float, ...]
    chain: tuple[Unit, ...]


class PassageSearch(Protocol):
    """Finds passages for queries: what retrieves at every step."""

    def __call__(self, queries: Sequence[str], query_QD: np.ndarray, /) -> list[list[int]]:
        """For each query, the passages found, best first; ``query_QD`` are the aligner's
        vectors.
        """
        ...


class UnitStore:
    """Units of passages and their embeddings, embedded once, when first asked for."""

    def __init__(self, units_of: Callable[[int], Sequence[Unit]], embed: Embed):
        self._units_of = units_of
        self._embed = embed
        self._rows: dict[int, np.ndarray] = {}
        self.units: list[Unit] = []
        self.passage_of_unit: list[int] = []
        self._blocks: list[np.ndarray] = []

    def add(self, passages: Sequence[int]) -> None:
        """Embeds the units of passages not seen before, in one call."""
        new: list[Unit] = []
        for passage in dict.fromkeys(passages):
            if passage in self._rows:
                continue
            units = list(self._units_of(passage))
            start = len(self.units)
            self._rows[passage] = np.arange(start, start + len(units))
            self.units += units
            self.passage_of_unit += [passage] * len(units)
            new += units
        if new:
            self._blocks.append(self._embed([unit.text for unit in new], "passage"))

    @property
    def unit_ND(self) -> np.ndarray:
        """Embeddings of all units so far, float32."""
        if len(self._blocks) > 1:
            self._blocks = [np.concatenate(self._blocks)]
        return self._blocks[0] if self._blocks else np.zeros((0, 1), np.float32)

    def rows(self, passages: Sequence[int]) -> np.ndarray:
        """Rows of the units of these passages, in passage order."""
        parts = [self._rows[passage] for passage in passages]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def by_passage(
    index: ExactIndex, embed: Embed | None, k: int, allowed: Sequence[np.ndarray] | None = None
) -> PassageSearch:
    """The k passages whose own embedding is nearest.

    ``embed`` is the retriever's; None takes the aligner's query vectors, for an index of its own.
    """

    def search(queries: Sequence[str], query_QD: np.ndarray) -> list[list[int]]:
        vectors_QD = query_QD if embed is None else embed(queries, "query")
        row_QK, _ = index.search(vectors_QD, k, allowed)
        return [[int(row) for row in rows if row >= 0] for rows in row_QK]

    return search


def by_unit(
    store: UnitStore,
    num_passages: int,
    k: int,
    depth: int = 100,
    allowed: Sequence[np.ndarray] | None = None,
) -> PassageSearch:
    """The passages of the nearest units in the whole corpus, at most k, among the ``depth``
    best.
    """
    store.add(range(num_passages))
    index = ExactIndex(store.unit_ND)
    rows = None if allowed is None else [store.rows(list(passages)) for passages in allowed]

    def search(queries: Sequence[str], query_QD: np.ndarray) -> list[list[int]]:
        del queries
        row_QK, _ = index.search(query_QD, depth, rows)
        found = (
            dict.fromkeys(store.passage_of_unit[r] for r in rows_K if r >= 0) for rows_K in row_QK
        )
        return [list(passages)[:k] for passages in found]

    return search


def iterative_retrieve(
    questions: Sequence[str],
    kind: UnitKind,
    aligner: Embed,
    store: UnitStore,
    search: PassageSearch,
    *,
    steps: int,
    ranking: str = "chain",
) -> list[Ranking]:
    """Ranks passages for all questions, which advance together, one step at a time.

    A passage's score is the best that one of its units reached at any step (KiRAG, section 3.3).
    ``ranking="chain"`` puts the passages of the chain first, in the chain's order, and the rest by
    score: the aligner chose them, and its scores of different steps are not comparable. KiRAG's
    released code raises the chosen triples' scores by 0.5 to the same end. ``ranking="score"`` is
    the printed rule.

    Args:
      questions: question texts.
      kind: what the store's units are.
      aligner: embeds queries as the aligner does.
      store: the aligner's unit embeddings.
      search: finds passages at every step; all found so far stay candidates.
      steps: iterations L.
      ranking: ``chain`` or ``score``.

    Raises:
      UserError: unknown ranking.
    """
    if ranking not in ("chain", "score"):
        raise UserError(f"config.ranking is {ranking!r}; it must be chain or score")
    found: list[dict[int, None]] = [{} for _ in questions]  # Ordered sets of passages.
    chains: list[list[int]] = [[] for _ in questions]
    best: list[dict[int, float]] = [{} for _ in questions]
    for _ in range(steps):
        queries = [
            query_text(question, [store.units[row].text for row in chain], kind)
            for question, chain in zip(questions, chains, strict=True)
        ]
        query_QD = aligner(queries, "query")
        for seen, passages in zip(found, search(queries, query_QD), strict=True):
            seen.update(dict.fromkeys(passages))
        store.add([passage for seen in found for passage in seen])
        candidates = [store.rows(list(seen)) for seen in found]
        scores = score_candidates(query_QD, store.unit_ND, candidates)
        for index, (rows_C, scores_C) in enumerate(zip(candidates, scores, strict=True)):
            _extend(chains[index], best[index], rows_C, scores_C, store)
    return [
        _ranking(chain, scores, seen, store, ranking)
        for chain, scores, seen in zip(chains, best, found, strict=True)
    ]


def _extend(
    chain: list[int],
    best: dict[int, float],
    rows_C: np.ndarray,
    scores_C: np.ndarray,
    store: UnitStore,
) -> None:
    """Appends the best new unit to the chain and raises the passages' scores."""
    order = np.argsort(-scores_C, kind="stable")
    for position in order:
        passage = store.passage_of_unit[rows_C[position]]
        best[passage] = max(best.get(passage, -np.inf), float(scores_C[position]))
    taken = {store.units[row].text for row in chain}
    for position in order:
        if store.units[rows_C[position]].text not in taken:
            chain.append(int(rows_C[position]))
            return


def _ranking(
    chain: list[int], best: dict[int, float], found: dict[int, None], store: UnitStore, ranking: str
) -> Ranking:
    first = [store.passage_of_unit[row] for row in chain] if ranking == "chain" else []
    # Passages without units (no triple was extracted) follow in the order they were retrieved.
    rest = [passage for passage in found if passage not in best]
    by_score = sorted(best, key=lambda passage: -best[passage])
    ordered = tuple(dict.fromkeys([*first, *by_score, *rest]))
    return Ranking(
        ordered,
        tuple(best.get(passage, float("-inf")) for passage in ordered),
        tuple(store.units[row] for row in chain),
    )
