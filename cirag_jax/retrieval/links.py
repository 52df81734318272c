"""Links between passages: a text links to every passage whose title it names.

An encyclopedia calls things by their titles, so that the passage of a question's next hop is often
named, word for word, in the fact before it. `LinkWalk` ranks by that alone: personalised PageRank,
as HippoRAG's, over titles instead of extracted phrases.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
from scipy import sparse

from cirag_jax.errors import UserError, check_at_least
from cirag_jax.types import Config, Passage

# A title of one word is a name only if it is written so and not short: "Selena", not "Run" or "It".
_LEAST_LETTERS = 4
_WORD = re.compile(r"\w+")

_PRECISION = 1e-7  # What more steps of a walk could still move.
_BLOCK = 1 << 25  # Probabilities that are kept at once: 128 MiB.


class TitleIndex:
    """Finds the passages that a text names.

    A title is known with and without what stands in parentheses at its end ("Tuos (film)"). Words
    are compared without case, but one of them must begin with a capital in the text, or with a
    letter of a script that has none. A title of one word has at least 4 letters. Where titles
    overlap the longer is meant.

    Args:
      passages: the corpus; several may share a title.
    """

    def __init__(self, passages: Sequence[Passage]):
        self._rows: dict[tuple[str, ...], list[int]] = {}
        # Words of the longest title that begins with these two. Far fewer places of a text fit them
        # than a first word alone, which may be "the".
        self._longest: dict[tuple[str, ...], int] = {}
        for row, passage in enumerate(passages):
            plain = re.sub(r"\s*\([^()]*\)\s*$", "", passage.title)
            for title in dict.fromkeys((_folded(passage.title), _folded(plain))):
                if title:
                    self._rows.setdefault(title, []).append(row)
                    self._longest[title[:2]] = max(len(title), self._longest.get(title[:2], 1))

    def named(self, text: str) -> tuple[int, ...]:
        """Rows of the passages that ``text`` names, in the order of the text, each once."""
        return tuple(dict.fromkeys(row for rows in self.mentions(text) for row in rows))

    def mentions(self, text: str) -> list[list[int]]:
        """The same by title: rows of the passages that share one, each title once."""
        words = _WORD.findall(text)
        folded = tuple(map(str.casefold, words))
        found, place = dict[tuple[str, ...], list[int]](), 0
        # A name has a capital: what ends before the next one need not be looked up.
        for capital in [at for at, word in enumerate(words) if _is_capital(word[0])]:
            while place <= capital:
                step = 1
                longest = self._longest.get(folded[place : place + 2], 1)
                longest = min(longest, len(words) - place)
                for size in range(longest, capital - place, -1):
                    title = folded[place : place + size]
                    if title in self._rows and (size > 1 or len(words[place]) >= _LEAST_LETTERS):
                        found[title] = self._rows[title]
                        step = size
                        break
                place += step
        return list(found.values())


def _folded(text: str) -> tuple[str, ...]:
    return tuple(map(str.casefold, _WORD.findall(text)))


def _is_capital(letter: str) -> bool:
    return letter.isalpha() and not letter.islower()


@dataclasses.dataclass(frozen=True, slots=True)
class WalkOptions:
    """How a walk goes (configs/retrieval.py explains the fields)."""

    restart: float = 0.5
    seeds: int = 5
    title_weight: float = 2.0
    backward: float = 0.3

    @classmethod
    def of(cls, config: Config) -> "WalkOptions":
        """The fields of ``config.links``."""
        options = cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})
        check_at_least(0, options, "seeds", "title_weight", "backward", prefix="config.links.")
        if not 0 < options.restart < 1:
            raise UserError(f"config.links.restart={options.restart} must lie between 0 and 1.")
        return options


class LinkWalk:
    """Ranks passages by where a walk over links ends that began at a question.

    It begins, and at every step may begin anew, at the passages that the question names and at the
    first ones of another ranking: a name weighs ``title_weight``, the passage at place i of the
    ranking 1 / i. Passages that share a title share its weight.

    Args:
      passages: the corpus.
      options: of the walk.
      titles: of the same corpus, where they have been indexed already.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        options: WalkOptions | None = None,
        titles: TitleIndex | None = None,
    ):
        self._options = options or WalkOptions()
        self._titles = titles or TitleIndex(passages)
        mentions = [self._titles.mentions(passage.text) for passage in passages]
        self._num_rows = len(passages)
        self._step_NN = transitions(mentions, self._options.backward)

    def search(
        self,
        questions: Sequence[str],
        first: Sequence[Sequence[int]],
        k: int,
        allowed: Sequence[np.ndarray] | None = None,
    ) -> list[list[int]]:
        """The k best rows for every question, best first.

        Args:
          questions: their texts.
          first: rows that another ranking found for each question, best first. Those that no walk
            reaches come last, in their order.
          k: rows wanted; fewer come back where neither walk nor ranking has more.
          allowed: for each question, the rows it may find; None: all. No walk leaves them.
        """
        block, found = max(_BLOCK // max(self._num_rows, 1), 1), []
        for start in range(0, len(questions), block):
            part = slice(start, start + block)
            within = None if allowed is None else allowed[part]
            rank_NQ = self.probabilities(questions[part], (first[part],), within)
            ranks = zip(np.ascontiguousarray(rank_NQ.T), first[part], strict=True)
            found += [_best(rank_N, rows, k) for rank_N, rows in ranks]
        return found

    def probabilities(
        self,
        questions: Sequence[str],
        rankings: Sequence[Sequence[Sequence[int]]],
        allowed: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Where the walks of all questions end, ``rank_NQ`` float32, as `page_rank`.

        They begin at the first rows of each of the ``rankings``; -1 is no row.
        """
        seed_NQ = self._seeds(questions, rankings)
        may_NQ = None
        if allowed is not None:
            may_NQ = np.zeros(seed_NQ.shape, bool)
            for query, rows in enumerate(allowed):
                may_NQ[rows, query] = True
        return page_rank(self._step_NN, seed_NQ, self._options.restart, may_NQ)

    def _seeds(
        self, questions: Sequence[str], rankings: Sequence[Sequence[Sequence[int]]]
    ) -> np.ndarray:
        seed_NQ = np.zeros((self._num_rows, len(questions)), np.float32)
        for query, question in enumerate(questions):
            for ranking in rankings:
                for place, row in enumerate(ranking[query][: self._options.seeds], 1):
                    if row >= 0:
                        seed_NQ[row, query] += 1 / place
            for rows in self._titles.mentions(question):
                seed_NQ[rows, query] += self._options.title_weight / len(rows)
        return seed_NQ


def transitions(mentions: Sequence[Sequence[Sequence[int]]], backward: float) -> sparse.csr_array:
    """Probabilities of a walk's steps, ``step_NN`` float32: from rows to columns.

    A link to a passage counts less the more passages link to it, 1 / their number: that many name
    a country says little. It may be walked ``backward`` times as well against its direction.
    Passages that share a title share the link. A row sums to 1, or to 0 where a passage neither
    links nor is linked to.

    Args:
      mentions: of each passage's text, see `TitleIndex.mentions`; its own title is no link.
      backward: 0: links have one direction.
    """
    titles = [rows for found in mentions for rows in found]
    titles_N = np.fromiter(map(len, mentions), np.int64, len(mentions))
    rows_T = np.fromiter(map(len, titles), np.int64, len(titles))
    source_L = np.repeat(np.repeat(np.arange(len(mentions)), titles_N), rows_T)
    target_L = np.fromiter(itertools.chain.from_iterable(titles), np.int64, len(source_L))
    other_L = source_L != target_L
    ends, share_L = (source_L[other_L], target_L[other_L]), np.repeat(1 / rows_T, rows_T)[other_L]
    popularity_N = np.bincount(ends[1], minlength=len(mentions))
    weight_L = share_L / popularity_N[ends[1]]
    link_NN = sparse.csr_array((weight_L, ends), shape=(len(mentions), len(mentions)))
    link_NN = link_NN + backward * link_NN.T
    total_N = link_NN.sum(axis=1)
    scale_N = np.divide(1, total_N, out=np.zeros_like(total_N), where=total_N > 0)
    return sparse.csr_array(sparse.diags_array(scale_N) @ link_NN, dtype=np.float32)


def page_rank(
    step_NN: sparse.csr_array,
    seed_NQ: np.ndarray,
    restart: float,
    may_NQ: np.ndarray | None = None,
) -> np.ndarray:
    """Personalised PageRank of many walks at once, ``rank_NQ`` float32.

    Whoever has no link to follow, or would leave what it may find, begins anew.

    Args:
      step_NN: of `transitions`.
      seed_NQ: float32, not negative: where each walk begins, in any measure. A column of zeros,
        where nothing is to begin at, has the rank 0 everywhere.
      restart: probability of beginning anew at any step, between 0 and 1.
      may_NQ: bool, the rows that each walk may find; None: all.
    """
    if may_NQ is not None:
        seed_NQ = seed_NQ * may_NQ
    total_Q = seed_NQ.sum(axis=0)
    seed_NQ = seed_NQ / np.where(total_Q > 0, total_Q, 1)
    arrive_NN, rank_NQ = step_NN.T.tocsr(), seed_NQ
    # What two walks still differ in shrinks by 1 - restart with each step.
    for _ in range(math.ceil(math.log(_PRECISION) / math.log(1 - restart))):
        rank_NQ = arrive_NN @ rank_NQ
        rank_NQ *= 1 - restart
        if may_NQ is not None:
            rank_NQ *= may_NQ
        rank_NQ += (1 - rank_NQ.sum(axis=0)) * seed_NQ
    return rank_NQ


def _best(rank_N: np.ndarray, first: Sequence[int], k: int) -> list[int]:
    """The k rows of highest rank, equal ones in the order of ``first``; then what is left of it."""
    reached = np.flatnonzero(rank_N)
    if 0 < k < len(reached):
        reached = reached[rank_N[reached] >= np.partition(rank_N[reached], -k)[-k]]
    place = {row: index for index, row in enumerate(first)}
    place_R = np.array([place.get(row, len(place)) for row in reached.tolist()])
    rows = reached[np.lexsort((reached, place_R, -rank_N[reached]))].tolist()
    return list(dict.fromkeys([*rows, *first]))[:k]
