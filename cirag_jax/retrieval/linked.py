"""Passages along a chain, by aligner, links and words together: multi-hop retrieval without an LLM.

The aligner alone goes by wording: after the first hop it is drawn to sentences worded like the
question about other people. What names the next passage often stands in the chain itself, word for
word. `LinkedIndex` therefore looks at every candidate of a step from all sides (`FEATURES`), and a
small head (`models/link_head.py`) that was trained on the aligner's own searches weighs them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from cirag_jax.datasets.chains import UnitKind, passage_text, query_text
from cirag_jax.errors import UserError
from cirag_jax.io import local_path
from cirag_jax.models.link_head import FILE, LinkHead, load_link_head
from cirag_jax.retrieval.bm25 import BM25
from cirag_jax.retrieval.encoders import Encoder, Progress
from cirag_jax.retrieval.links import LinkWalk, TitleIndex, WalkOptions
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.types import Feedback, Passage

_BLOCK = 64  # Questions that are searched at once.
_NEAR = 25  # Passages that the aligner finds at a step, and BM25 for the question.
_REACHED = 60  # Passages where the walk ends most often.
_LINKED = 50  # Passages that the chain's passages name.
_UNRANKED = 100  # The place of what a ranking did not find.
_RARE = 1e-5  # Added to a walk's probability before its logarithm.

# What the head sees of a candidate passage.
FEATURES = (
    "score",  # Of its best unit, by the aligner, after question and chain.
    "below_best",  # The same less the best candidate's.
    "place",  # Among the candidates by that score; of all places the logarithm.
    "first_score",  # Of its best unit after the question alone.
    "first_below_best",
    "bm25",  # For the question, over the best one's.
    "bm25_place",
    "walk",  # Logarithm of the probability that a walk over links ends there.
    "walk_place",
    "named_by_last",  # By the chain's last unit: 1 / the passages of that title.
    "named_by_chain",  # By any of its units.
    "named_by_passages",  # By a passage of the chain.
    "names_passages",  # It names a passage of the chain.
    "named",  # By the question.
    "named_and_due",  # The same, while the question names more than the chain has visited.
    "same_title",  # As a passage of the chain.
    "first_step",
    "titles_named",  # By the question: up to 4, over 4.
)
# Features that a corpus may lack together: each group is hidden now and then in training.
GROUPS = {
    "words": ("bm25", "bm25_place"),
    "walk": ("walk", "walk_place"),
    "links": ("named_by_last", "named_by_chain", "named_by_passages", "names_passages"),
    "names": ("named", "named_and_due", "titles_named", "same_title"),
    "first": ("first_score", "first_below_best"),
}


class Candidates(NamedTuple):
    """What a step chooses from.

    Attributes:
      question: its place among those that are searched for.
      row_R: passages, int32.
      unit_R: the best unit of each, int64.
      feature_RF: float32, see `FEATURES`.
    """

    question: int
    row_R: np.ndarray
    unit_R: np.ndarray
    feature_RF: np.ndarray


Score = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
Observe = Callable[[Candidates], None]


class LinkedIndex:
    """An index over passages that follows a question's hops inside one search.

    Each of its steps asks the aligner with the question and the chain so far, gathers candidates
    (what aligner and BM25 find, where a walk over links ends, what the question and the chain
    name), and appends the best unit of the passage that the head puts first. Passages of the chain
    come first, in its order, then the last step's candidates.

    Args:
      passages: the corpus.
      texts: the units of each, as the encoder reads them.
      encoder: of queries and units: the aligner.
      head: None, where only `explore` is called.
      kind: of the units.
      steps: passages that are chosen one after the other.
      dtype: in which vectors are kept, see `UnitIndex`.
      options: of the walk.
      progress: is told how many texts are embedded.

    Raises:
      UserError: there is no unit.
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
        options: WalkOptions | None = None,
        progress: Progress | None = None,
    ):
        self._titles, self._head = TitleIndex(passages), head
        self._kind: UnitKind = kind
        self._steps = steps
        self._names = [passage.title for passage in passages]
        self._units = UnitIndex(texts, encoder, dtype=dtype, progress=progress)
        self._encoder = encoder
        self._words = BM25([passage_text(passage) for passage in passages])
        mentions = [[self._titles.mentions(text) for text in found] for found in texts]
        self._unit_links = _unit_links(mentions, [self._titles.named(name) for name in self._names])
        owner_NP = _owners(texts)
        self._links = sparse.csr_array((owner_NP.T @ self._unit_links) > 0)
        self._links_back = self._links.T.tocsr()
        self._walk = LinkWalk(passages, options, titles=self._titles)

    def __len__(self) -> int:
        return len(self._names)

    def search(
        self,
        queries: Sequence[str],
        k: int,
        allowed: Sequence[np.ndarray] | None = None,
        feedback: Sequence[Feedback | None] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best passages for every question, as `PassageIndex.search`.

        A score is minus the place: no other orders passages of different steps.

        Raises:
          UserError: feedback, which moves vectors of passages.
        """
        if any(feedback):
            raise UserError("retriever.kind=linked has no passage vectors that could move")
        assert self._head is not None
        row_QK = np.full((len(queries), k), -1, np.int32)
        score_QK = np.full((len(queries), k), -np.inf, np.float32)
        found = self.explore(queries, self._head.score, allowed)
        for query, rows in enumerate(found):
            row_QK[query, : len(rows[:k])] = rows[:k]
            score_QK[query, : len(rows[:k])] = -np.arange(len(rows[:k]))
        return row_QK, score_QK

    def explore(
        self,
        questions: Sequence[str],
        score: Score,
        allowed: Sequence[np.ndarray] | None = None,
        observe: Observe = lambda candidates: None,
        progress: Progress = lambda count: None,
    ) -> list[list[int]]:
        """Ranked rows for every question, each chosen by ``score`` of the features of a step.

        ``observe`` is told the candidates of every step, before one is chosen; ``progress`` how
        many questions are through.
        """
        ranked = []
        for start in range(0, len(questions), _BLOCK):
            part = slice(start, start + _BLOCK)
            within = None if allowed is None else allowed[part]
            searches = self._begin(questions[part], within)
            for step in range(self._steps):
                going = [search for search in searches if not search.ended]
                if step:
                    self._ask(going, within)
                self._choose(going, score, start, observe)
            ranked += [search.ranked() for search in searches]
            progress(len(searches))
        return ranked

    def _begin(
        self, questions: Sequence[str], allowed: Sequence[np.ndarray] | None
    ) -> list["_Search"]:
        query_QD = self._encoder.encode(list(questions), "query")
        near_QK, score_QK = self._units.nearest(query_QD, _NEAR, allowed)
        words_QK, word_score_QK = self._words.search_scored(questions, _UNRANKED, allowed)
        # What shares no word with the question is no place to begin at.
        seeds_QK = np.where(word_score_QK > 0, words_QK, -1)
        walk_NQ = self._walk.probabilities(
            questions, (seeds_QK.tolist(), near_QK.tolist()), allowed
        )
        return [
            _Search(
                question=question,
                place=place,
                first_D=query_QD[place],
                first_best=float(score_QK[place, 0]),
                words=_shares(words_QK[place], word_score_QK[place]),
                walk_N=np.ascontiguousarray(walk_NQ[:, place]),
                near=_present(near_QK[place]),
                named={
                    row: 1 / len(rows) for rows in self._titles.mentions(question) for row in rows
                },
                num_titles=len(self._titles.mentions(question)),
                allowed=None if allowed is None else frozenset(map(int, allowed[place])),
            )
            for place, question in enumerate(questions)
        ]

    def _ask(self, searches: Sequence["_Search"], allowed: Sequence[np.ndarray] | None) -> None:
        """Searches with the question and the chain so far."""
        if not searches:
            return
        queries = [
            query_text(s.question, [self._units.texts[u] for u in s.units], self._kind)
            for s in searches
        ]
        query_QD = self._encoder.encode(queries, "query")
        within = None if allowed is None else [allowed[search.place] for search in searches]
        near_QK, _ = self._units.nearest(query_QD, _NEAR, within)
        for search, query_D, near_K in zip(searches, query_QD, near_QK, strict=True):
            search.query_D, search.near = query_D, _present(near_K)

    def _choose(
        self, searches: Sequence["_Search"], score: Score, start: int, observe: Observe
    ) -> None:
        """Appends one passage to the chain of every search."""
        if not searches:
            return
        found = [self._candidates(search) for search in searches]
        scores = score([candidates.feature_RF for candidates in found])
        for search, candidates, score_R in zip(searches, found, scores, strict=True):
            observe(candidates._replace(question=start + search.place))
            search.choose(candidates, score_R)

    def _candidates(self, s: "_Search") -> Candidates:
        by_unit = [_row(self._unit_links, unit) for unit in s.units]
        by_chain: dict[int, float] = {}
        for found in by_unit:
            for row, share in found.items():
                by_chain[row] = max(share, by_chain.get(row, 0.0))
        by_passages = {r: 1.0 for row in s.rows for r in _row(self._links, row)}
        linked = _Linked(by_unit[-1] if by_unit else {}, by_chain, by_passages)

        rows = dict.fromkeys([*s.pool, *s.near, *by_chain, *list(by_passages)[:_LINKED]])
        row_R = np.array([row for row in rows if s.may_find(row)], np.int32)
        row_R = row_R[self._units.counts(row_R) > 0]
        score_2R, unit_2R = self._units.best(np.stack([s.query_D, s.first_D]), row_R)
        score_R, first_R = score_2R
        known = self._known(s, row_R, score_R, first_R, linked)
        feature_RF = np.stack([known[name] for name in FEATURES], axis=1).astype(np.float32)
        return Candidates(s.place, row_R, unit_2R[0], feature_RF)

    def _known(
        self,
        s: "_Search",
        row_R: np.ndarray,
        score_R: np.ndarray,
        first_R: np.ndarray,
        linked: "_Linked",
    ) -> dict[str, np.ndarray]:
        """`FEATURES` of these passages, of which the aligner's scores are given."""
        back = np.concatenate([_indices(self._links_back, row) for row in s.rows] or [[]])
        visited = {self._names[row] for row in s.rows}
        named_R = _get(s.named, row_R)
        return {
            "score": score_R,
            "below_best": score_R - score_R.max(initial=-1.0),
            "place": np.log1p(np.argsort(np.argsort(-score_R, kind="stable"))),
            "first_score": first_R,
            "first_below_best": first_R - s.first_best,
            "bm25": _get(s.words, row_R),
            "bm25_place": np.log1p(_get(s.word_place, row_R, _UNRANKED)),
            "walk": np.log(s.walk_N[row_R] + _RARE),
            "walk_place": np.log1p(_get(s.walk_place, row_R, _UNRANKED)),
            "named_by_last": _get(linked.by_last, row_R),
            "named_by_chain": _get(linked.by_chain, row_R),
            "named_by_passages": _get(linked.by_passages, row_R),
            "names_passages": np.isin(row_R, back),
            "named": named_R,
            "named_and_due": named_R * (s.num_titles > sum(row in s.named for row in s.rows)),
            "same_title": np.array([self._names[row] in visited for row in row_R.tolist()], bool),
            "first_step": np.full(len(row_R), not s.rows),
            "titles_named": np.full(len(row_R), min(s.num_titles, 4) / 4),
        }


class _Linked(NamedTuple):
    """What a chain names, with its weight: its last unit, all its units, their passages."""

    by_last: dict[int, float]
    by_chain: dict[int, float]
    by_passages: dict[int, float]


@dataclasses.dataclass
class _Search:
    """One question, what is known of it from the start, and its chain so far."""

    question: str
    place: int  # In its block.
    first_D: np.ndarray  # The question alone.
    first_best: float
    words: dict[int, float]  # BM25 over the best one's, best first.
    walk_N: np.ndarray
    near: list[int]  # By the aligner, at this step.
    named: dict[int, float]
    num_titles: int
    allowed: frozenset[int] | None
    rows: list[int] = dataclasses.field(default_factory=list)
    units: list[int] = dataclasses.field(default_factory=list)
    rest: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False

    def __post_init__(self):
        reached = np.argsort(-self.walk_N, kind="stable")[:_REACHED]
        reached = reached[self.walk_N[reached] > 0].tolist()
        self.walk_place = {row: place for place, row in enumerate(reached)}
        self.word_place = {row: place for place, row in enumerate(self.words)}
        self.query_D = self.first_D  # Question and chain.
        self.pool = [*self.named, *self.near, *list(self.words)[:_NEAR], *reached]

    def may_find(self, row: int) -> bool:
        return row not in self.rows and (self.allowed is None or row in self.allowed)

    def choose(self, candidates: Candidates, score_R: np.ndarray) -> None:
        if not len(score_R):
            self.ended = True
            return
        best = int(np.argmax(score_R))
        self.rows.append(int(candidates.row_R[best]))
        self.units.append(int(candidates.unit_R[best]))
        self.rest = candidates.row_R[np.argsort(-score_R, kind="stable")].tolist()

    def ranked(self) -> list[int]:
        return list(dict.fromkeys([*self.rows, *self.rest]))


def find_link_head(spec: str) -> LinkHead | None:
    """The head of an aligner: of a training workdir, an exported folder or ``shipped:NAME``.

    Raises:
      UserError: see `load_link_head`.
    """
    return load_link_head(local_path(spec), FEATURES)


def needed_link_head(spec: str) -> LinkHead:
    """The same, where it must be there.

    Raises:
      UserError: also where there is none.
    """
    head = find_link_head(spec)
    if head is None:
        raise UserError(
            f"{spec} has no {FILE}: retrieval along links needs an aligner trained by "
            "--config=configs/aligner.py:linked"
        )
    return head


def _owners(texts: Sequence[Sequence[str]]) -> sparse.csr_array:
    """Which passage each unit is of, 1 at [unit, passage]."""
    owner_N = np.repeat(np.arange(len(texts)), [len(found) for found in texts])
    ones = np.ones(len(owner_N), np.float32)
    return sparse.csr_array(
        (ones, (np.arange(len(owner_N)), owner_N)), shape=(len(owner_N), len(texts))
    )


def _unit_links(
    mentions: Sequence[Sequence[Sequence[Sequence[int]]]], own: Sequence[Sequence[int]]
) -> sparse.csr_array:
    """What each unit names, 1 / the passages of that title at [unit, passage]; not its own title.

    Args:
      mentions: of every unit of every passage, see `TitleIndex.mentions`.
      own: rows that each passage's title names.
    """
    unit, links = 0, list[tuple[int, int, float]]()
    for titles_of, mine in zip(mentions, map(set, own), strict=True):
        for titles in titles_of:
            links += [
                (unit, row, 1 / len(rows)) for rows in titles for row in rows if row not in mine
            ]
            unit += 1
    source_L, target_L, share_L = np.array(links, np.float64).reshape(-1, 3).T
    ends = (source_L.astype(np.int64), target_L.astype(np.int64))
    return sparse.csr_array((share_L.astype(np.float32), ends), shape=(unit, len(own)))


def _indices(matrix: sparse.csr_array, row: int) -> np.ndarray:
    return matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]]


def _row(matrix: sparse.csr_array, row: int) -> dict[int, float]:
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return dict(zip(matrix.indices[part].tolist(), matrix.data[part].tolist(), strict=True))


def _present(row_K: np.ndarray) -> list[int]:
    return [row for row in row_K.tolist() if row >= 0]


def _shares(row_K: np.ndarray, score_K: np.ndarray) -> dict[int, float]:
    best = max(float(score_K[0]), 1e-9) if len(score_K) else 1.0
    return {
        row: score / best
        for row, score in zip(row_K.tolist(), score_K.tolist(), strict=True)
        if row >= 0 and score > 0
    }


def _get(values: Mapping[int, float], row_R: np.ndarray, default: float = 0.0) -> np.ndarray:
    return np.array([values.get(row, default) for row in row_R.tolist()], np.float32)
