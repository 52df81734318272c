"""Passages along a chain, by aligner, links and words together: multi-hop retrieval without an LLM.

The aligner alone goes by wording: after the first hop it is drawn to sentences worded like the
question about other people. What names the next passage often stands in the chain itself, word for
word. `LinkedIndex` therefore looks at every candidate of a step from all sides
(`retrieval/candidates.py`), and a small head (`models/link_head.py`) that was trained on the
aligner's own searches weighs them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cirag_jax.datasets.chains import UnitKind, query_text
from cirag_jax.errors import UserError
from cirag_jax.io import local_path
from cirag_jax.models.link_head import FILE, LinkHead, load_link_head
from cirag_jax.retrieval import stopping
from cirag_jax.retrieval.candidates import FEATURES, CandidateFinder, Candidates, Search
from cirag_jax.retrieval.encoders import Encoder, Progress
from cirag_jax.retrieval.links import WalkOptions
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.types import Feedback, Passage

# Questions that are searched at once: as many as have this many numbers about passages, since an
# encoder pads the last batch of every length. At most 1,024, at least 64.
_NUMBERS = 1 << 25
_LEAST, _MOST = 64, 1024


class Found(NamedTuple):
    """What a search found.

    Attributes:
      rows: passages, best first.
      seen_KF: of the first of them, see `stopping.describe`.
    """

    rows: list[int]
    seen_KF: np.ndarray


Score = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
Observe = Callable[[Candidates], None]


class LinkedIndex:
    """An index over passages that follows a question's hops inside one search.

    Each of its steps asks the aligner with the question and the chain so far, gathers candidates
    (what aligner and BM25 find, where a walk over links ends, what the question and the chain
    name), and appends the best unit of the passage that the head puts first. The chain's first
    passages come first, then all that a step may have chosen; see `Search.ranked`.

    Args:
      passages: the corpus.
      texts: the units of each, as the encoder reads them.
      encoder: of queries and units: the aligner.
      head: None, where only `explore` is called.
      kind: of the units.
      steps: passages that are chosen one after the other.
      dtype: in which vectors are kept, see `UnitIndex`.
      stop: a search leaves out what is needed with a smaller probability; None: nothing.
      options: of the walk.
      progress: is told how many texts are embedded.
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
                f"{FILE if head is None else head.source}: its head has not learnt when to stop, "
                "which config.retriever.stop asks for; train it again."
            )
        self._head, self._steps, self._size, self._stop = head, steps, len(passages), stop
        self._kind: UnitKind = kind
        self._encoder = encoder
        self._units = UnitIndex(texts, encoder, dtype=dtype, progress=progress)
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
        """The k best passages for every question, as `PassageIndex.search`.

        A score is minus the place: no other orders passages of different steps. With ``stop`` there
        may be fewer: places beyond those that are likely needed hold row -1 and score -inf. The
        first passage is always there.
        """
        if any(feedback):
            raise UserError("retriever.kind=linked has no passage vectors that could move")
        assert self._head is not None
        row_QK = np.full((len(queries), k), -1, np.int32)
        score_QK = np.full((len(queries), k), -np.inf, np.float32)
        for query, found in enumerate(self.explore(queries, self._head.score, allowed)):
            rows = self._needed(found)[:k]
            row_QK[query, : len(rows)] = rows
            score_QK[query, : len(rows)] = -np.arange(len(rows))
        return row_QK, score_QK

    def _needed(self, found: Found) -> list[int]:
        if self._stop is None:
            return found.rows
        assert self._head is not None and self._head.stop is not None
        likely_K = self._head.stop.probability(found.seen_KF)
        return stopping.needed(found.rows, likely_K, self._stop)

    def explore(
        self,
        questions: Sequence[str],
        score: Score,
        allowed: Sequence[np.ndarray] | None = None,
        observe: Observe = lambda candidates: None,
        progress: Progress = lambda count: None,
    ) -> list[Found]:
        """What is found for every question, each step choosing by ``score`` of the features.

        ``observe`` is told the candidates of every step, before one is chosen; ``progress`` how
        many questions are through, where a step of four is a quarter of them.
        """
        found = []
        # Of every question: where a walk ends, and words twice.
        block = min(max(_NUMBERS // (3 * self._size), _LEAST), _MOST)
        for start in range(0, len(questions), block):
            part = slice(start, start + block)
            within = None if allowed is None else allowed[part]
            query_QD = self._embed(questions[part], progress)
            searches = self._finder.begin(questions[part], query_QD, within)
            for step in range(self._steps):
                going = [search for search in searches if not search.ended]
                if step:
                    self._follow(going, within, progress)
                self._choose(going, score, start, observe)
                through = [len(searches) * done // self._steps for done in (step, step + 1)]
                progress(through[1] - through[0])
            found += [self._found(search) for search in searches]
        return found

    def _embed(self, queries: Sequence[str], progress: Progress) -> np.ndarray:
        """``progress`` is told of no question, so that it is called now and then."""
        return self._encoder.encode(list(queries), "query", lambda count: progress(0))

    def _found(self, search: Search) -> Found:
        rows = search.ranked()
        return Found(rows, stopping.describe(rows, search.likely, self._steps))

    def _follow(
        self,
        searches: Sequence[Search],
        allowed: Sequence[np.ndarray] | None,
        progress: Progress,
    ) -> None:
        """Asks the aligner with the question and the chain so far."""
        if not searches:
            return
        queries = [
            query_text(s.question, [self._units.texts[u] for u in s.units], self._kind)
            for s in searches
        ]
        query_QD = self._embed(queries, progress)
        within = None if allowed is None else [allowed[s.place] for s in searches]
        self._finder.follow(searches, query_QD, within)

    def _choose(
        self, searches: Sequence[Search], score: Score, start: int, observe: Observe
    ) -> None:
        """Appends one passage to the chain of every question."""
        if not searches:
            return
        found = [self._finder.candidates(search) for search in searches]
        for search, candidates in zip(searches, found, strict=True):
            observe(candidates._replace(question=start + search.place))
        scores = score([candidates.feature_RF for candidates in found])
        for search, candidates, score_R in zip(searches, found, scores, strict=True):
            search.choose(candidates, score_R)


def find_link_head(spec: str) -> LinkHead | None:
    """The head of an aligner: of a training workdir, an exported folder or ``shipped:NAME``."""
    head = load_link_head(local_path(spec), FEATURES)
    if head is not None and head.stop is not None:
        has, wanted = len(head.stop.weight_F), stopping.num_features(head.steps)
        if has != wanted:
            raise UserError(
                f"{head.source}: its stop reads {has} features where this version has {wanted}; "
                "train it again."
            )
    return head


def needed_link_head(spec: str) -> LinkHead:
    """The same, where it must be there."""
    head = find_link_head(spec)
    if head is None:
        raise UserError(
            f"{spec} has no {FILE}: retrieval along links needs an aligner trained by "
            "--config=configs/aligner.py:linked"
        )
    return head
