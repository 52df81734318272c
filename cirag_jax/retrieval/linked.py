"""Multi-hop retrieval without an LLM: a search that builds a chain of passages, hop by hop.

An aligner only compares wording: after the first hop it prefers sentences that are worded like the
question but concern other entities. However, the chain often contains the title of the next
passage. Each step of a `LinkedIndex` search therefore

1. embeds the question with the chain so far,
2. collects candidates from the aligner, BM25, links and titles (`retrieval/candidates.py`),
3. scores their features with a small link head (`models/link_head.py`), which was trained on
   searches with this aligner, and
4. appends the best candidate to the chain.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cirag_jax.datasets.chains import UnitKind, query_text, role_of
from cirag_jax.errors import UserError
from cirag_jax.io import local_path
from cirag_jax.models.link_head import FILE, LinkHead, load_link_head
from cirag_jax.retrieval import stopping
from cirag_jax.retrieval.candidates import FEATURES, CandidateFinder, SearchState, StepCandidates
from cirag_jax.retrieval.encode import Progress
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.links import WalkOptions
from cirag_jax.retrieval.search import empty_results
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.types import Feedback, Passage

# Questions are searched in blocks, because an encoder pads the last batch of every length.
_BLOCK_NUMBERS = 1 << 25  # Maximum of (questions per block) * (numbers per question).
_MIN_BLOCK, _MAX_BLOCK = 64, 1024  # Number of questions in a block.


class SearchResult(NamedTuple):
    """The result of one search.

    Attributes:
      rows: rows of the passages, best first.
      stop_KF: `stopping.stop_features` of the first passages.
    """

    rows: list[int]
    stop_KF: np.ndarray


Score = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
Observe = Callable[[StepCandidates], None]


class LinkedIndex:
    """An index over passages that follows a question's hops inside one search.

    The first passages of the chain are ranked first, then all candidates (`SearchState.ranked`).

    Args:
      passages: the corpus.
      texts: the units of each passage, as the encoder reads them.
      encoder: the aligner, which embeds queries and units.
      head: scores candidates; may be None if only `explore` is called.
      kind: kind of the units.
      steps: length of a chain.
      dtype: dtype of the stored vectors, see `UnitIndex`.
      stop: passages that are needed with a lower probability are dropped; None keeps all.
      options: options of the walk over links.
      progress: called with the number of texts just embedded.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        texts: Sequence[Sequence[str]],
        encoder: Encoder,
        head: LinkHead | None,
        kind: UnitKind,
        *,
        steps: int = 5,
        dtype: str = "float32",
        stop: float | None = None,
        options: WalkOptions | None = None,
        progress: Progress | None = None,
    ):
        if stop is not None and (head is None or head.stop is None):
            raise UserError(
                f"{FILE if head is None else head.source}: the link head has no stopping rule, "
                "which config.retriever.stop needs; retrain it."
            )
        self._head, self._steps, self._size, self._stop = head, steps, len(passages), stop
        self._kind: UnitKind = kind
        self._encoder = encoder
        self._units = UnitIndex(texts, encoder, role_of(kind), dtype=dtype, progress=progress)
        self._finder = CandidateFinder(passages, texts, self._units, options)

    def __len__(self) -> int:
        return self._size

    def search(
        self,
        queries: Sequence[str],
        k: int,
        allowed: Sequence[np.ndarray] | None = None,
        feedback: Sequence[Feedback | None] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the k best passages for every question, as `PassageIndex.search` does.

        Scores are negative ranks, because scores of different steps are not comparable. With
        ``stop``, passages may be dropped, but never the first one; the remaining places have row -1
        and score -inf.
        """
        if any(feedback):
            raise UserError("config.retriever.kind=linked does not support relevance feedback")
        assert self._head is not None
        row_QK, score_QK = empty_results(len(queries), k)
        for query, result in enumerate(self.explore(queries, self._head.score, allowed)):
            rows = self._needed_rows(result)[:k]
            row_QK[query, : len(rows)] = rows
            score_QK[query, : len(rows)] = -np.arange(len(rows))
        return row_QK, score_QK

    def _needed_rows(self, result: SearchResult) -> list[int]:
        if self._stop is None:
            return result.rows
        assert self._head is not None and self._head.stop is not None
        probability_K = self._head.stop.probability(result.stop_KF)
        return stopping.needed_rows(result.rows, probability_K, self._stop)

    def explore(
        self,
        questions: Sequence[str],
        score: Score,
        allowed: Sequence[np.ndarray] | None = None,
        observe: Observe = lambda candidates: None,
        progress: Progress = lambda count: None,
    ) -> list[SearchResult]:
        """Searches for every question with any scoring function.

        Args:
          questions: texts of the questions.
          score: returns the scores of the candidates of several steps, given their features.
          allowed: for each question, the rows that it may find; None allows all.
          observe: called with the candidates of every step before one is chosen.
          progress: called with the number of questions finished since the last call, where a step
            counts as a fraction of a question. Also called with 0 during long embeddings.
        """
        results = []
        # Three numbers per question and passage: the walk's probability and two BM25 scores.
        block = min(max(_BLOCK_NUMBERS // (3 * self._size), _MIN_BLOCK), _MAX_BLOCK)
        for start in range(0, len(questions), block):
            part = slice(start, start + block)
            query_QD = self._embed(questions[part], progress)
            states = self._finder.start(
                questions[part], query_QD, None if allowed is None else allowed[part]
            )
            for step in range(self._steps):
                if active := [state for state in states if not state.ended]:
                    if step:
                        queries = [self._query(state) for state in active]
                        self._finder.update(active, self._embed(queries, progress))
                    self._choose(active, score, start, observe)
                progress(
                    len(states) * (step + 1) // self._steps - len(states) * step // self._steps
                )
            results += [self._result(state) for state in states]
        return results

    def _embed(self, queries: Sequence[str], progress: Progress) -> np.ndarray:
        return self._encoder.encode(list(queries), "query", lambda count: progress(0))

    def _query(self, state: SearchState) -> str:
        """Returns the question and the chain so far, in the form that the aligner expects."""
        return query_text(state.question, [self._units.texts[u] for u in state.units], self._kind)

    def _choose(
        self, states: Sequence[SearchState], score: Score, start: int, observe: Observe
    ) -> None:
        """Appends one passage to each chain; ``start`` is the index of the first question."""
        steps = [self._finder.candidates(state) for state in states]
        for candidates in steps:
            observe(candidates._replace(question=start + candidates.question))
        scores = score([candidates.feature_RF for candidates in steps])
        for state, candidates, score_R in zip(states, steps, scores, strict=True):
            state.choose(candidates, score_R)

    def _result(self, state: SearchState) -> SearchResult:
        rows = state.ranked()
        return SearchResult(rows, stopping.stop_features(rows, state.probabilities, self._steps))


def open_link_head(spec: str) -> LinkHead | None:
    """Opens the link head of an aligner; returns None if the aligner has none.

    ``spec`` is a training workdir, an exported folder or ``shipped:NAME``.
    """
    head = load_link_head(local_path(spec), FEATURES)
    if head is not None and head.stop is not None:
        has, expected = len(head.stop.weight_F), stopping.num_features(head.steps)
        if has != expected:
            raise UserError(
                f"{head.source}: the stopping rule needs {has} features, but this version has "
                f"{expected}; retrain it."
            )
    return head


def require_link_head(spec: str) -> LinkHead:
    """Opens the link head of an aligner; raises UserError if the aligner has none."""
    head = open_link_head(spec)
    if head is None:
        raise UserError(
            f"{spec} has no {FILE}; config.retriever.kind=linked needs an aligner trained with "
            "--config=configs/aligner.py:linked"
        )
    return head
