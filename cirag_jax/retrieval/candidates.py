"""What a step of a search along links chooses from, and what is known of it.

`CandidateFinder` gathers the passages that may come next on a question's chain and describes each
from all sides: the aligner, words, links, a walk over them, names.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.special import softmax

from cirag_jax.datasets.chains import passage_text
from cirag_jax.retrieval.bm25 import BM25, best_places
from cirag_jax.retrieval.links import LinkWalk, TitleIndex, WalkOptions
from cirag_jax.retrieval.unit_index import UnitIndex
from cirag_jax.types import Passage

_NEAR = 25  # Passages that the aligner finds at a step, and BM25 for the question and for a step.
_REACHED = 60  # Passages where the walk ends most often.
_LINKED = 50  # Passages that the chain's passages name.
_UNRANKED = 100  # The place of what a ranking did not find.
_RARE = 1e-5  # Added to a walk's probability before its logarithm.
_FIRST = 3  # Passages of the chain that are ranked first; chosen on dev_tune halves.

# What the head sees of a candidate passage.
FEATURES = (
    "score",  # Of its best unit, by the aligner, after question and chain.
    "below_best",  # The same less the best candidate's.
    "place",  # Among the candidates by that score; of all places the logarithm.
    "first_score",  # Of its best unit after the question alone.
    "first_below_best",
    "bm25",  # For the question, over the best one's.
    "bm25_place",
    "left",  # BM25 for the question's words that no passage of the chain has, over the best one's.
    "told",  # For the words of the chain's last unit that the question and its own title have not.
    "words_place",  # By the sum of these two.
    "walk",  # Logarithm of the probability that a walk over links ends there.
    "walk_place",
    "named_by_last",  # By the chain's last unit: 1 / the passages of that title.
    "named_by_chain",  # By any of its units.
    "named_by_passages",  # By a passage of the chain.
    "names_passages",  # It names a passage of the chain.
    "named",  # By the question.
    "named_and_due",  # The same, while the question names more than the chain has visited.
    "same_title",  # As a passage of the chain.
    "title_asked",  # The share of its title's words that the question has.
    "title_told",  # That the passages of the chain have.
    "like_chain",  # Inner product with the nearest unit of the chain.
    "first_step",
    "titles_named",  # By the question: up to 4, over 4.
)
# Features that a corpus may lack together: each group is hidden now and then in training.
GROUPS = {
    "words": ("bm25", "bm25_place"),
    "next_words": ("left", "told", "words_place"),
    "walk": ("walk", "walk_place"),
    "links": ("named_by_last", "named_by_chain", "named_by_passages", "names_passages"),
    "names": ("named", "named_and_due", "titles_named", "same_title"),
    "titles": ("title_asked", "title_told"),
    "alike": ("like_chain",),
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


@dataclasses.dataclass
class Search:
    """One question, what is known of it from the start, and a chain so far.

    Attributes:
      question: its text.
      place: in its block.
      first_D: the vector of the question alone.
      first_best: the aligner's best score with it.
      asked: words of the question.
      words: BM25 over the best one's, by passage, best first.
      walk_N: where the walk ends.
      near: passages that the aligner finds at this step.
      named: passages that the question names: 1 / those of that title.
      num_titles: that the question names.
      allowed: rows that may be found; None: all.
      left_N, told_N: see `FEATURES`, of every passage, not over the best one's.
      query_D: the vector of question and chain.
      read: words of the chain's passages.
      rows, units: the chain.
      likely: for every step so far, the probability of each candidate that it is chosen.
      ended: nothing was left to choose from.
    """

    question: str
    place: int
    first_D: np.ndarray
    first_best: float
    asked: frozenset[str]
    words: dict[int, float]
    walk_N: np.ndarray
    near: list[int]
    named: dict[int, float]
    num_titles: int
    allowed: frozenset[int] | None
    left_N: np.ndarray
    told_N: np.ndarray
    query_D: np.ndarray
    read: frozenset[str] = frozenset()
    rows: list[int] = dataclasses.field(default_factory=list)
    units: list[int] = dataclasses.field(default_factory=list)
    likely: list[dict[int, float]] = dataclasses.field(default_factory=list)
    ended: bool = False

    def __post_init__(self):
        reached = best_places(self.walk_N, _REACHED)
        reached = reached[self.walk_N[reached] > 0].tolist()
        self.walk_place = _places(reached)
        self.word_place = _places(self.words)
        self.pool = [*self.named, *self.near, *list(self.words)[:_NEAR], *reached]

    def may_find(self, row: int) -> bool:
        """Whether ``row`` is allowed and not in the chain yet."""
        return row not in self.rows and (self.allowed is None or row in self.allowed)

    def choose(self, candidates: Candidates, score_R: np.ndarray) -> None:
        """Appends the candidate of the highest score to the chain; without any, the search ends."""
        if not len(score_R):
            self.ended = True
            return
        likely_R = softmax(score_R.astype(np.float64))
        rows = candidates.row_R.tolist()
        self.likely.append(dict(zip(rows, likely_R.tolist(), strict=True)))
        best = int(score_R.argmax())
        self.rows.append(rows[best])
        self.units.append(int(candidates.unit_R[best]))

    def ranked(self) -> list[int]:
        """The first passages of the chain, then all candidates by how likely any step chose them.

        Later steps may follow a wrong passage; what several found likely is the safer guess.
        """
        missed: dict[int, float] = {}
        for likely in self.likely:
            for row, p in likely.items():
                missed[row] = missed.get(row, 1.0) * (1 - p)
        likeliest = sorted(missed, key=missed.__getitem__)
        return list(dict.fromkeys([*self.rows[:_FIRST], *likeliest]))


class CandidateFinder:
    """Finds and describes the passages that may come next.

    Args:
      passages: the corpus.
      texts: the units of each.
      units: an index over them.
      options: of the walk.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        texts: Sequence[Sequence[str]],
        units: UnitIndex,
        options: WalkOptions | None = None,
    ):
        self._units, self._titles = units, TitleIndex(passages)
        self._names = [passage.title for passage in passages]
        self._texts = [passage_text(passage) for passage in passages]
        self._words = BM25(self._texts)
        self._title_words = [frozenset(words) for words in self._words.words(self._names)]
        mentions = [[self._titles.mentions(text) for text in found] for found in texts]
        self._unit_links = _unit_links(mentions, [self._titles.named(name) for name in self._names])
        owner_NP = _owners(texts)
        self._links = sparse.csr_array((owner_NP.T @ self._unit_links) > 0)
        self._links_back = self._links.T.tocsr()
        self._walk = LinkWalk(passages, options, titles=self._titles)

    def begin(
        self,
        questions: Sequence[str],
        query_QD: np.ndarray,
        allowed: Sequence[np.ndarray] | None,
    ) -> list[Search]:
        """A search for every question, of which ``query_QD`` are the vectors."""
        near_QK, score_QK = self._units.nearest(query_QD, _NEAR, allowed)
        words_QK, word_score_QK = self._words.search_scored(questions, _UNRANKED, allowed)
        # What shares no word with the question is no place to begin at.
        seeds_QK = np.where(word_score_QK > 0, words_QK, -1)
        walk_NQ = self._walk.probabilities(
            questions, (seeds_QK.tolist(), near_QK.tolist()), allowed
        )
        asked = self._words.words(questions)
        searches = []
        for place, question in enumerate(questions):
            titles = self._titles.mentions(question)
            left_N = self._words.scores(asked[place])
            searches.append(
                Search(
                    question=question,
                    place=place,
                    first_D=query_QD[place],
                    first_best=float(score_QK[place, 0]),
                    asked=frozenset(asked[place]),
                    words=_shares(words_QK[place], word_score_QK[place]),
                    walk_N=np.ascontiguousarray(walk_NQ[:, place]),
                    near=_present(near_QK[place]),
                    named={row: 1 / len(rows) for rows in titles for row in rows},
                    num_titles=len(titles),
                    allowed=None if allowed is None else frozenset(map(int, allowed[place])),
                    left_N=left_N,
                    told_N=np.zeros_like(left_N),
                    query_D=query_QD[place],
                )
            )
        return searches

    def follow(
        self,
        searches: Sequence[Search],
        query_QD: np.ndarray,
        allowed: Sequence[np.ndarray] | None,
    ) -> None:
        """Tells searches of their longer chains; ``query_QD`` are questions with these."""
        near_QK, _ = self._units.nearest(query_QD, _NEAR, allowed)
        read = self._words.words([self._texts[search.rows[-1]] for search in searches])
        told = self._words.words([self._units.texts[search.units[-1]] for search in searches])
        for place, search in enumerate(searches):
            search.query_D, search.near = query_QD[place], _present(near_QK[place])
            search.read = search.read.union(read[place])
            search.left_N = self._words.scores(sorted(search.asked - search.read))
            known = search.asked | self._title_words[search.rows[-1]]
            search.told_N = self._words.scores(sorted(set(told[place]) - known))

    def candidates(self, s: Search) -> Candidates:
        """What the next step of a search chooses from."""
        linked = self._linked(s)
        by_words = _rows_by_words(s)
        linked_rows = [*linked.by_chain, *list(linked.by_passages)[:_LINKED]]
        rows = dict.fromkeys([*s.pool, *s.near, *linked_rows, *by_words[:_NEAR]])
        row_R = np.array([row for row in rows if s.may_find(row)], np.int32)
        row_R = row_R[self._units.counts(row_R) > 0]

        score_2R, unit_2R = self._units.best(np.stack([s.query_D, s.first_D]), row_R)
        unit_R = unit_2R[0]
        known = {
            **self._by_aligner(s, score_2R, unit_R),
            **_by_words(s, row_R, _places(by_words)),
            **self._by_links(s, row_R, linked),
            **self._by_names(s, row_R),
        }
        feature_RF = np.stack([known[name] for name in FEATURES], axis=1).astype(np.float32)
        return Candidates(s.place, row_R, unit_R, feature_RF)

    def _linked(self, s: Search) -> "_Linked":
        by_unit = [_row(self._unit_links, unit) for unit in s.units]
        by_chain: dict[int, float] = {}
        for found in by_unit:
            for row, share in found.items():
                by_chain[row] = max(share, by_chain.get(row, 0.0))
        by_passages = {r: 1.0 for row in s.rows for r in _row(self._links, row)}
        return _Linked(by_unit[-1] if by_unit else {}, by_chain, by_passages)

    def _by_aligner(
        self, s: Search, score_2R: np.ndarray, unit_R: np.ndarray
    ) -> dict[str, np.ndarray]:
        score_R, first_R = score_2R
        like_R = np.zeros(len(unit_R))
        if s.units:
            chain_CD = self._units.vectors(np.array(s.units))
            like_R = (self._units.vectors(unit_R) @ chain_CD.T).max(axis=1)
        return {
            "score": score_R,
            "below_best": score_R - score_R.max(initial=-1.0),
            "place": np.log1p(np.argsort(np.argsort(-score_R, kind="stable"))),
            "first_score": first_R,
            "first_below_best": first_R - s.first_best,
            "like_chain": like_R,
        }

    def _by_links(self, s: Search, row_R: np.ndarray, linked: "_Linked") -> dict[str, np.ndarray]:
        back = np.concatenate([_indices(self._links_back, row) for row in s.rows] or [[]])
        return {
            "walk": np.log(s.walk_N[row_R] + _RARE),
            "walk_place": np.log1p(_get(s.walk_place, row_R, _UNRANKED)),
            "named_by_last": _get(linked.by_last, row_R),
            "named_by_chain": _get(linked.by_chain, row_R),
            "named_by_passages": _get(linked.by_passages, row_R),
            "names_passages": np.isin(row_R, back),
        }

    def _by_names(self, s: Search, row_R: np.ndarray) -> dict[str, np.ndarray]:
        visited = {self._names[row] for row in s.rows}
        named_R = _get(s.named, row_R)
        titles = [self._title_words[row] for row in row_R.tolist()]
        return {
            "named": named_R,
            "named_and_due": named_R * (s.num_titles > sum(row in s.named for row in s.rows)),
            "same_title": np.array([self._names[row] in visited for row in row_R.tolist()], bool),
            "title_asked": _share(titles, s.asked),
            "title_told": _share(titles, s.read),
            "first_step": np.full(len(row_R), not s.rows),
            "titles_named": np.full(len(row_R), min(s.num_titles, 4) / 4),
        }


class _Linked(NamedTuple):
    """What a chain names, with its weight: its last unit, all its units, their passages."""

    by_last: dict[int, float]
    by_chain: dict[int, float]
    by_passages: dict[int, float]


def _rows_by_words(s: Search) -> list[int]:
    """What BM25 finds for the words of a step, best first."""
    words_N = s.left_N + s.told_N
    row_R = np.arange(len(words_N)) if s.allowed is None else np.array(sorted(s.allowed), np.int32)
    best_K = row_R[best_places(words_N[row_R], _UNRANKED)]
    return best_K[words_N[best_K] > 0].tolist()


def _by_words(s: Search, row_R: np.ndarray, place: Mapping[int, int]) -> dict[str, np.ndarray]:
    left_R, told_R = s.left_N[row_R], s.told_N[row_R]
    return {
        "bm25": _get(s.words, row_R),
        "bm25_place": np.log1p(_get(s.word_place, row_R, _UNRANKED)),
        "left": left_R / max(float(left_R.max(initial=0)), 1.0),
        "told": told_R / max(float(told_R.max(initial=0)), 1.0),
        "words_place": np.log1p(_get(place, row_R, _UNRANKED)),
    }


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


def _share(titles: Sequence[frozenset[str]], words: Set[str]) -> np.ndarray:
    return np.array([len(t & words) / max(len(t), 1) for t in titles], np.float32)


def _places(rows: Iterable[int]) -> dict[int, int]:
    return {row: place for place, row in enumerate(rows)}


def _get(values: Mapping[int, float], row_R: np.ndarray, default: float = 0.0) -> np.ndarray:
    return np.array([values.get(row, default) for row in row_R.tolist()], np.float32)
