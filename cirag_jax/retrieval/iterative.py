"""Iterative retrieval with the aligner alone: KiRAG without its constructor (Table 4).

Every step retrieves passages for the question and the chain so far, scores all their units against the
same query, and appends the best unit to the chain. A passage's score is the best score that one of its
units reached at any step (section 3.3, "document ranking").
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from cirag_jax.datasets.chains import Unit, UnitKind, query_text
from cirag_jax.retrieval.search import ExactIndex, score_candidates

Embed = Callable[[Sequence[str], Literal["query", "passage"]], np.ndarray]


class Progress(Protocol):
    """Called with the number of questions that finished a step."""

    def __call__(self, done: int, /) -> object: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Ranking:
    """What iterative retrieval found for one question.

    ``passages`` are corpus rows, best first, with ``scores``; ``chain`` the units appended, in order.
    """

    passages: tuple[int, ...]
    scores: tuple[float, ...]
    chain: tuple[Unit, ...]


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


def iterative_retrieve(
    questions: Sequence[str],
    kind: UnitKind,
    aligner: Embed,
    store: UnitStore,
    passages: ExactIndex,
    retriever: Embed,
    *,
    steps: int,
    k: int,
    allowed: Sequence[np.ndarray] | None = None,
    progress: Progress | None = None,
) -> list[Ranking]:
    """Ranks passages for all questions, which advance together, one step at a time.

    Args:
      questions: question texts.
      kind: what the store's units are.
      aligner: embeds queries as the aligner does.
      store: the aligner's unit embeddings.
      passages: passage embeddings of the retriever.
      retriever: embeds queries as the retriever does (the frozen encoder, or the aligner itself).
      steps: iterations L.
      k: passages retrieved a step, K_0.
      allowed: passages that each question may find.
      progress: see ``Progress``.
    """
    found: list[dict[int, None]] = [{} for _ in questions]  # Ordered sets of passages.
    chains: list[list[int]] = [[] for _ in questions]
    best: list[dict[int, float]] = [{} for _ in questions]
    for _ in range(steps):
        queries = [
            query_text(question, [store.units[row].text for row in chain], kind)
            for question, chain in zip(questions, chains, strict=True)
        ]
        query_QD = aligner(queries, "query")
        retriever_QD = query_QD if retriever is aligner else retriever(queries, "query")
        row_QK, _ = passages.search(retriever_QD, k, allowed)
        for seen, rows_K in zip(found, row_QK, strict=True):
            seen.update(dict.fromkeys(int(row) for row in rows_K if row >= 0))
        store.add([passage for seen in found for passage in seen])
        candidates = [store.rows(list(seen)) for seen in found]
        scores = score_candidates(query_QD, store.unit_ND, candidates)
        for index, (rows_C, scores_C) in enumerate(zip(candidates, scores, strict=True)):
            _extend(chains[index], best[index], rows_C, scores_C, store)
        if progress is not None:
            progress(len(questions))
    return [
        _ranking(chain, scores, seen, store)
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
    chain: list[int], best: dict[int, float], found: dict[int, None], store: UnitStore
) -> Ranking:
    # Passages without units (no triple was extracted) follow in the order they were retrieved.
    rest = [passage for passage in found if passage not in best]
    ordered = sorted(best, key=lambda passage: -best[passage]) + rest
    return Ranking(
        tuple(ordered),
        tuple(best.get(passage, float("-inf")) for passage in ordered),
        tuple(store.units[row] for row in chain),
    )
