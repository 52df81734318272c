"""Candidate passages for each step of a linked search, and the features that score them.

A linked search builds a chain of passages for a question. `CandidateFinder` collects the passages
that may come next on the chain. They come from the aligner, from BM25, from a random walk over
links, and from titles mentioned in the question and the chain.
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

_NUM_NEAREST = 25  # Candidates from the aligner, and from BM25 for the question and for a step.
_NUM_REACHED = 60  # Candidates from the walk over links.
_NUM_LINKED = 50  # Candidates whose titles occur in the chain's passages.
_UNRANKED = 100  # Length of the BM25 rankings; also the rank of passages not in a ranking.
_MIN_PROBABILITY = 1e-5  # Added to a walk's probability before taking its logarithm.
_NUM_CHAIN_FIRST = 3  # Chain passages at the top of the result; chosen on dev_tune halves.

# Features of a candidate passage. The aligner scores a passage by its best unit. Places are
# log(1 + rank), and BM25 scores are divided by the best one. A text names a passage if it contains
# the passage's title. Below, "it" is the candidate.
FEATURES = (
    "score",  # Aligner score, given question and chain.
    "below_best",  # ``score`` minus the best candidate's ``score``.
    "place",  # Place among the candidates by ``score``.
    "first_score",  # Aligner score, given the question only.
    "first_below_best",  # ``first_score`` minus the best in the corpus.
    "bm25",  # BM25 for the question.
    "bm25_place",
    "left",  # BM25 for the question's words that occur in no passage of the chain.
    "told",  # BM25 for words of the chain's last unit, except words of the question and title.
    "words_place",  # Place by ``left`` + ``told``, before scaling.
    "walk",  # Logarithm of the probability that a walk over links ends at the candidate.
    "walk_place",
    "named_by_last",  # 1 / (passages with its title) if the chain's last unit names it, else 0.
    "named_by_chain",  # The same for any unit of the chain.
    "named_by_passages",  # A passage of the chain names it.
    "names_passages",  # It names a passage of the chain.
    "named",  # 1 / (passages with its title) if the question names it, else 0.
    "named_and_due",  # ``named`` if the question names titles that the chain lacks, else 0.
    "same_title",  # It shares its title with a passage of the chain.
    "title_asked",  # Share of its title's words that occur in the question.
    "title_told",  # Share of its title's words that occur in the passages of the chain.
    "like_chain",  # Inner product with the nearest unit of the chain.
    "first_step",  # The chain is empty.
    "titles_named",  # Number of titles that the question names, at most 4, divided by 4.
)
# Features that may be missing together in some corpora. Training hides groups at random.
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


class StepCandidates(NamedTuple):
    """The candidates of one step of one search.

    Attributes:
      question: index of the question.
      row_R: rows of the passages, int32.
      unit_R: the best unit of each passage, int64.
      feature_RF: float32, see `FEATURES`.
    """

    question: int
    row_R: np.ndarray
    unit_R: np.ndarray
    feature_RF: np.ndarray


@dataclasses.dataclass
class SearchState:
    """The search for one question: fixed rankings for the question, and the chain so far.

    Attributes:
      question: text of the question.
      index: place of the question in its block.
      question_D: embedding of the question.
      question_best: the aligner's best score for the question.
      question_words: words of the question.
      bm25: passage -> its BM25 score for the question, divided by the best score; best first.
      walk_N: probability that the walk ends at each passage.
      named: passage that the question names -> 1 / (passages with this title).
      num_titles: number of titles that the question names.
      allowed_R: sorted rows that may be returned; None allows all.
      query_D: embedding of question and chain.
      nearest: passages nearest to ``query_D``.
      left_N, told_N: BM25 scores of all passages for the words of the features ``left``, ``told``.
      chain_words: words of the chain's passages.
      rows, units: passages and units of the chain.
      probabilities: for each step so far, each candidate's probability of being chosen.
      ended: whether the search ran out of candidates.
    """

    question: str
    index: int
    question_D: np.ndarray
    question_best: float
    question_words: frozenset[str]
    bm25: dict[int, float]
    walk_N: np.ndarray
    named: dict[int, float]
    num_titles: int
    allowed_R: np.ndarray | None
    query_D: np.ndarray
    nearest: list[int]
    left_N: np.ndarray
    told_N: np.ndarray
    chain_words: frozenset[str] = frozenset()
    rows: list[int] = dataclasses.field(default_factory=list)
    units: list[int] = dataclasses.field(default_factory=list)
    probabilities: list[dict[int, float]] = dataclasses.field(default_factory=list)
    ended: bool = False

    def __post_init__(self):
        reached = best_places(self.walk_N, _NUM_REACHED)
        reached = reached[self.walk_N[reached] > 0].tolist()
        self.walk_rank, self.bm25_rank = _ranks(reached), _ranks(self.bm25)
        # Candidates of every step.
        self.pool = [*self.named, *self.nearest, *list(self.bm25)[:_NUM_NEAREST], *reached]
        self._allowed = None if self.allowed_R is None else frozenset(self.allowed_R.tolist())

    def is_open(self, row: int) -> bool:
        """Returns whether a passage is allowed and not in the chain yet."""
        return row not in self.rows and (self._allowed is None or row in self._allowed)

    def choose(self, candidates: StepCandidates, score_R: np.ndarray) -> None:
        """Appends the best candidate to the chain, or ends the search if there is none."""
        if not len(score_R):
            self.ended = True
            return
        probability_R = softmax(score_R.astype(np.float64))
        rows = candidates.row_R.tolist()
        self.probabilities.append(dict(zip(rows, probability_R.tolist(), strict=True)))
        best = int(score_R.argmax())
        self.rows.append(rows[best])
        self.units.append(int(candidates.unit_R[best]))

    def ranked(self) -> list[int]:
        """Ranks the chain's first passages, then all candidates by their chance of being chosen.

        Later steps may follow a wrong passage, so a candidate that was likely in several steps is
        more reliable than the end of the chain.
        """
        never_chosen: dict[int, float] = {}
        for step in self.probabilities:
            for row, p in step.items():
                never_chosen[row] = never_chosen.get(row, 1.0) * (1 - p)
        likeliest = sorted(never_chosen, key=never_chosen.__getitem__)
        return list(dict.fromkeys([*self.rows[:_NUM_CHAIN_FIRST], *likeliest]))


class CandidateFinder:
    """Finds the passages that may come next on a chain, and computes their features.

    Args:
      passages: the corpus.
      texts: the units of each passage.
      units: an index of these units.
      options: options of the walk over links.
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
        self._bm25 = BM25(self._texts)
        self._title_words = [frozenset(words) for words in self._bm25.words(self._names)]
        mentions = [[self._titles.mentions(text) for text in group] for group in texts]
        self._unit_links = _unit_links(mentions, [self._titles.named(name) for name in self._names])
        owner_NP = _unit_owners(texts)
        self._links = sparse.csr_array((owner_NP.T @ self._unit_links) > 0)
        self._links_back = self._links.T.tocsr()
        self._walk = LinkWalk(passages, options, titles=self._titles)

    def start(
        self,
        questions: Sequence[str],
        query_QD: np.ndarray,
        allowed: Sequence[np.ndarray] | None,
    ) -> list[SearchState]:
        """Starts one search per question; ``query_QD`` are the embeddings of the questions."""
        nearest_QK, score_QK = self._units.nearest(query_QD, _NUM_NEAREST, allowed)
        bm25_QK, bm25_score_QK = self._bm25.search(questions, _UNRANKED, allowed)
        walk_NQ = self._walk.probabilities(
            questions, (bm25_QK.tolist(), nearest_QK.tolist()), allowed
        )
        words = self._bm25.words(questions)
        states = []
        for index, question in enumerate(questions):
            titles = self._titles.mentions(question)
            left_N = self._bm25.scores(words[index])
            states.append(
                SearchState(
                    question=question,
                    index=index,
                    question_D=query_QD[index],
                    question_best=float(score_QK[index, 0]),
                    question_words=frozenset(words[index]),
                    bm25=_relative_scores(bm25_QK[index], bm25_score_QK[index]),
                    walk_N=np.ascontiguousarray(walk_NQ[:, index]),
                    named={row: 1 / len(rows) for rows in titles for row in rows},
                    num_titles=len(titles),
                    allowed_R=None if allowed is None else _sorted_rows(allowed[index]),
                    query_D=query_QD[index],
                    nearest=_valid_rows(nearest_QK[index]),
                    left_N=left_N,
                    told_N=np.zeros_like(left_N),
                )
            )
        return states

    def update(self, states: Sequence[SearchState], query_QD: np.ndarray) -> None:
        """Updates searches whose chains have grown; ``query_QD`` embeds question and chain."""
        allowed = [s.allowed_R for s in states if s.allowed_R is not None] or None
        nearest_QK, _ = self._units.nearest(query_QD, _NUM_NEAREST, allowed)
        passage_words = self._bm25.words([self._texts[s.rows[-1]] for s in states])
        unit_words = self._bm25.words([self._units.texts[s.units[-1]] for s in states])
        for place, s in enumerate(states):
            s.query_D, s.nearest = query_QD[place], _valid_rows(nearest_QK[place])
            s.chain_words = s.chain_words.union(passage_words[place])
            s.left_N = self._bm25.scores(sorted(s.question_words - s.chain_words))
            old_words = s.question_words | self._title_words[s.rows[-1]]
            s.told_N = self._bm25.scores(sorted(set(unit_words[place]) - old_words))

    def candidates(self, s: SearchState) -> StepCandidates:
        """Returns the candidates for the next step of a search."""
        links = self._chain_links(s)
        by_words = _rank_by_words(s)
        linked = [*links.from_chain, *list(links.from_passages)[:_NUM_LINKED]]
        rows = dict.fromkeys([*s.pool, *s.nearest, *linked, *by_words[:_NUM_NEAREST]])
        row_R = np.array([row for row in rows if s.is_open(row)], np.int32)
        row_R = row_R[self._units.counts(row_R) > 0]

        score_2R, unit_2R = self._units.best(np.stack([s.query_D, s.question_D]), row_R)
        unit_R = unit_2R[0]
        features = {
            **self._aligner_features(s, score_2R, unit_R),
            **_word_features(s, row_R, _ranks(by_words)),
            **self._link_features(s, row_R, links),
            **self._title_features(s, row_R),
        }
        feature_RF = np.stack([features[name] for name in FEATURES], axis=1).astype(np.float32)
        return StepCandidates(s.index, row_R, unit_R, feature_RF)

    def _chain_links(self, s: SearchState) -> "_ChainLinks":
        by_unit = [_entries(self._unit_links, unit) for unit in s.units]
        from_chain: dict[int, float] = {}
        for links in by_unit:
            for row, weight in links.items():
                from_chain[row] = max(weight, from_chain.get(row, 0.0))
        from_passages = {r: 1.0 for row in s.rows for r in _entries(self._links, row)}
        return _ChainLinks(by_unit[-1] if by_unit else {}, from_chain, from_passages)

    def _aligner_features(
        self, s: SearchState, score_2R: np.ndarray, unit_R: np.ndarray
    ) -> dict[str, np.ndarray]:
        score_R, question_score_R = score_2R
        like_chain_R = np.zeros(len(unit_R))
        if s.units:
            chain_CD = self._units.vectors(np.array(s.units))
            like_chain_R = (self._units.vectors(unit_R) @ chain_CD.T).max(axis=1)
        return {
            "score": score_R,
            "below_best": score_R - score_R.max(initial=-1.0),
            "place": np.log1p(np.argsort(np.argsort(-score_R, kind="stable"))),
            "first_score": question_score_R,
            "first_below_best": question_score_R - s.question_best,
            "like_chain": like_chain_R,
        }

    def _link_features(
        self, s: SearchState, row_R: np.ndarray, links: "_ChainLinks"
    ) -> dict[str, np.ndarray]:
        linking = {r for row in s.rows for r in _entries(self._links_back, row)}
        return {
            "walk": np.log(s.walk_N[row_R] + _MIN_PROBABILITY),
            "walk_place": np.log1p(_lookup(s.walk_rank, row_R, _UNRANKED)),
            "named_by_last": _lookup(links.from_last, row_R),
            "named_by_chain": _lookup(links.from_chain, row_R),
            "named_by_passages": _lookup(links.from_passages, row_R),
            "names_passages": np.array([row in linking for row in row_R.tolist()], bool),
        }

    def _title_features(self, s: SearchState, row_R: np.ndarray) -> dict[str, np.ndarray]:
        visited = {self._names[row] for row in s.rows}
        named_R = _lookup(s.named, row_R)
        titles = [self._title_words[row] for row in row_R.tolist()]
        return {
            "named": named_R,
            "named_and_due": named_R * (s.num_titles > sum(row in s.named for row in s.rows)),
            "same_title": np.array([self._names[row] in visited for row in row_R.tolist()], bool),
            "title_asked": _shares(titles, s.question_words),
            "title_told": _shares(titles, s.chain_words),
            "first_step": np.full(len(row_R), not s.rows),
            "titles_named": np.full(len(row_R), min(s.num_titles, 4) / 4),
        }


class _ChainLinks(NamedTuple):
    """Weights of passages named by a chain's last unit, by its units, and by its passages."""

    from_last: dict[int, float]
    from_chain: dict[int, float]
    from_passages: dict[int, float]


def _rank_by_words(s: SearchState) -> list[int]:
    """Ranks passages by the sum of the BM25 scores ``left`` and ``told``, best first."""
    words_N = s.left_N + s.told_N
    row_R = np.arange(len(words_N)) if s.allowed_R is None else s.allowed_R
    best_K = row_R[best_places(words_N[row_R], _UNRANKED)]
    return best_K[words_N[best_K] > 0].tolist()


def _word_features(
    s: SearchState, row_R: np.ndarray, rank: Mapping[int, int]
) -> dict[str, np.ndarray]:
    left_R, told_R = s.left_N[row_R], s.told_N[row_R]
    return {
        "bm25": _lookup(s.bm25, row_R),
        "bm25_place": np.log1p(_lookup(s.bm25_rank, row_R, _UNRANKED)),
        "left": left_R / max(float(left_R.max(initial=0)), 1.0),
        "told": told_R / max(float(told_R.max(initial=0)), 1.0),
        "words_place": np.log1p(_lookup(rank, row_R, _UNRANKED)),
    }


def _unit_owners(texts: Sequence[Sequence[str]]) -> sparse.csr_array:
    """Returns a matrix with 1 at [unit, passage] if the unit belongs to the passage."""
    owner_N = np.repeat(np.arange(len(texts)), [len(group) for group in texts])
    ones = np.ones(len(owner_N), np.float32)
    return sparse.csr_array(
        (ones, (np.arange(len(owner_N)), owner_N)), shape=(len(owner_N), len(texts))
    )


def _unit_links(
    mentions: Sequence[Sequence[Sequence[Sequence[int]]]], namesakes: Sequence[Sequence[int]]
) -> sparse.csr_array:
    """Returns a matrix: [unit, passage] is 1 / (passages with the title that the unit names).

    Links between passages with the same title are omitted.

    Args:
      mentions: the `TitleIndex.mentions` of every unit of every passage.
      namesakes: rows that each passage's title names.
    """
    unit, links = 0, list[tuple[int, int, float]]()
    for passage_mentions, own_rows in zip(mentions, map(set, namesakes), strict=True):
        for titles in passage_mentions:
            links += [
                (unit, row, 1 / len(rows)) for rows in titles for row in rows if row not in own_rows
            ]
            unit += 1
    source_L, target_L, weight_L = np.array(links, np.float64).reshape(-1, 3).T
    ends = (source_L.astype(np.int64), target_L.astype(np.int64))
    return sparse.csr_array((weight_L.astype(np.float32), ends), shape=(unit, len(namesakes)))


def _entries(matrix: sparse.csr_array, row: int) -> dict[int, float]:
    """Returns the stored columns of a row and their values."""
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return dict(zip(matrix.indices[part].tolist(), matrix.data[part].tolist(), strict=True))


def _sorted_rows(rows: np.ndarray) -> np.ndarray:
    return np.unique(rows).astype(np.int32)


def _valid_rows(row_K: np.ndarray) -> list[int]:
    return [row for row in row_K.tolist() if row >= 0]


def _relative_scores(row_K: np.ndarray, score_K: np.ndarray) -> dict[int, float]:
    """Returns the scores of the valid rows, divided by the best score."""
    best = max(float(score_K[0]), 1e-9) if len(score_K) else 1.0
    pairs = zip(row_K.tolist(), score_K.tolist(), strict=True)
    return {row: score / best for row, score in pairs if row >= 0}


def _shares(titles: Sequence[frozenset[str]], words: Set[str]) -> np.ndarray:
    """Returns the share of each title's words that are in ``words``."""
    return np.array([len(t & words) / max(len(t), 1) for t in titles], np.float32)


def _ranks(rows: Iterable[int]) -> dict[int, int]:
    return {row: rank for rank, row in enumerate(rows)}


def _lookup(values: Mapping[int, float], row_R: np.ndarray, default: float = 0.0) -> np.ndarray:
    return np.array([values.get(row, default) for row in row_R.tolist()], np.float32)
