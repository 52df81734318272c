"""Links between passages: a text links to every passage whose title it contains.

An encyclopedia calls things by their titles, so a passage often contains the title of the next
hop's passage. `LinkWalk` ranks passages using only these links: it is HippoRAG's personalized
PageRank over titles instead of extracted phrases.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
from scipy import sparse

from cirag_jax.errors import UserError
from cirag_jax.retrieval import words as words_lib
from cirag_jax.types import Config, Count, NonNegativeFloat, Passage
from cirag_jax.validation import check_fields

# Minimum for a title of one word: "Selena" is a name, "Run" and "It" are not. Two characters are
# enough in Chinese, Japanese and Korean.
_MIN_LETTERS = 4
_PARENTHESES = re.compile(r"\s*[(（][^()（）]*[)）]\s*$")

_PRECISION = 1e-7  # A walk ends when further steps can change its probabilities by at most this.
_BLOCK = 1 << 25  # Maximum number of probabilities in memory: 128 MiB.


class TitleIndex:
    """Finds the passages whose titles occur in a text (the text names them).

    A title matches with or without a final part in parentheses ("Tuos (film)"). Case is ignored,
    but in the text, at least one word must begin with a capital, or with a letter of a script
    without capitals. A title of one word needs at least 4 letters. Of overlapping titles, the
    longest one matches. In scripts without spaces, a title may begin and end anywhere.

    Args:
      passages: the corpus; several passages may share a title.
    """

    def __init__(self, passages: Sequence[Passage]):
        self._rows: dict[tuple[str, ...], list[int]] = {}
        # First two words -> length of the longest title that begins with them. Two words match far
        # fewer places in a text than the first word only, which may be "the".
        self._longest: dict[tuple[str, ...], int] = {}
        for row, passage in enumerate(passages):
            plain = _PARENTHESES.sub("", passage.title)
            for title in dict.fromkeys((_folded(passage.title), _folded(plain))):
                if title:
                    self._rows.setdefault(title, []).append(row)
                    self._longest[title[:2]] = max(len(title), self._longest.get(title[:2], 1))

    def named(self, text: str) -> tuple[int, ...]:
        """Returns the distinct rows of the passages that ``text`` names, in text order."""
        return tuple(dict.fromkeys(row for rows in self.mentions(text) for row in rows))

    def mentions(self, text: str) -> list[list[int]]:
        """Returns the rows of each distinct title in ``text``."""
        words = words_lib.words(text)
        folded = tuple(map(str.casefold, words))
        matches, place = dict[tuple[str, ...], list[int]](), 0
        # A name contains a capital, so matches that end before the next capital are skipped.
        for capital in [at for at, word in enumerate(words) if _is_capital(word[0])]:
            while place <= capital:
                step = 1
                longest = self._longest.get(folded[place : place + 2], 1)
                longest = min(longest, len(words) - place)
                for size in range(longest, capital - place, -1):
                    title = folded[place : place + size]
                    if title in self._rows and _is_name(words[place : place + size]):
                        matches[title] = self._rows[title]
                        step = size
                        break
                place += step
        return list(matches.values())


def _folded(text: str) -> tuple[str, ...]:
    return tuple(map(str.casefold, words_lib.words(text)))


def _is_name(words: Sequence[str]) -> bool:
    """Returns whether a title is long enough to be a name."""
    is_phrase = len(words) > 1 and not all(map(words_lib.is_southeast_asian, words))
    return is_phrase or sum(map(len, words)) >= _MIN_LETTERS


def _is_capital(letter: str) -> bool:
    return letter.isalpha() and not letter.islower()


@dataclasses.dataclass(frozen=True, slots=True)
class WalkOptions:
    """Options of a walk over links (documented in configs/retrieval.py)."""

    restart: float = 0.5
    seeds: Count = 5
    title_weight: NonNegativeFloat = 2.0
    backward: NonNegativeFloat = 0.3

    @classmethod
    def of(cls, config: Config) -> "WalkOptions":
        """Reads and validates the options in ``config.links``."""
        options = cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})
        check_fields(options, prefix="config.links.")
        if not 0 < options.restart < 1:
            raise UserError(f"config.links.restart={options.restart} must lie between 0 and 1.")
        return options


class LinkWalk:
    """Ranks passages by the probability that a random walk over links ends at them.

    The walk starts and restarts at seeds: the passages that the question names and the first
    passages of another ranking. Each title in the question has the weight ``title_weight``, divided
    equally among its passages. Place i of the ranking has the weight 1 / i.

    Args:
      passages: the corpus.
      options: options of the walk.
      titles: title index of the same corpus; None builds one.
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
        """Returns the k best rows for every question, best first.

        Args:
          questions: texts of the questions.
          first: another ranking of rows for each question, best first. Rows that the walk does not
            reach are appended in this order.
          k: number of rows; fewer are returned if the walk and the ranking have fewer in total.
          allowed: for each question, the rows that the walk may visit; None allows all.
        """
        block, results = max(_BLOCK // max(self._num_rows, 1), 1), []
        for start in range(0, len(questions), block):
            part = slice(start, start + block)
            block_allowed = None if allowed is None else allowed[part]
            rank_NQ = self.probabilities(questions[part], (first[part],), block_allowed)
            ranks = zip(np.ascontiguousarray(rank_NQ.T), first[part], strict=True)
            results += [_best(rank_N, rows, k) for rank_N, rows in ranks]
        return results

    def probabilities(
        self,
        questions: Sequence[str],
        rankings: Sequence[Sequence[Sequence[int]]],
        allowed: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Returns the `page_rank` of every passage for every question, ``rank_NQ`` float32.

        Each of the ``rankings`` also gives seeds; its -1s are skipped.
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
    """Returns the walk's transition probabilities from rows to columns, ``step_NN`` float32.

    A link's weight is 1 / (links to the same passage), because links to common targets, such as a
    country, are less informative. If passages share a title, the weight is divided among them. A
    row sums to 1, or to 0 if the passage has no link in either direction.

    Args:
      mentions: the `TitleIndex.mentions` of each passage's text; links to itself are ignored.
      backward: weight of following a link backward, relative to forward.
    """
    titles = [rows for passage_mentions in mentions for rows in passage_mentions]
    titles_N = np.fromiter(map(len, mentions), np.int64, len(mentions))
    rows_T = np.fromiter(map(len, titles), np.int64, len(titles))
    source_L = np.repeat(np.repeat(np.arange(len(mentions)), titles_N), rows_T)
    target_L = np.fromiter(itertools.chain.from_iterable(titles), np.int64, len(source_L))
    other_L = source_L != target_L
    ends, share_L = (source_L[other_L], target_L[other_L]), np.repeat(1 / rows_T, rows_T)[other_L]
    popularity_N = np.bincount(ends[1], minlength=len(mentions))
    weight_L = share_L / popularity_N[ends[1]]
    link_NN = sparse.csr_array((weight_L, ends), shape=(len(mentions), len(mentions)))
    return normalized(link_NN + backward * link_NN.T)


def normalized(weight_NN: sparse.csr_array) -> sparse.csr_array:
    """Divides each row by its sum, float32; empty rows stay empty."""
    total_N = weight_NN.sum(axis=1)
    scale_N = np.divide(1, total_N, out=np.zeros_like(total_N), where=total_N > 0)
    return sparse.csr_array(sparse.diags_array(scale_N) @ weight_NN, dtype=np.float32)


def page_rank(
    step_NN: sparse.csr_array,
    seed_NQ: np.ndarray,
    restart: float,
    may_NQ: np.ndarray | None = None,
) -> np.ndarray:
    """Computes the personalized PageRank of many walks at once, ``rank_NQ`` float32.

    A walk also restarts if it has no link to follow or would visit a row that is not allowed.

    Args:
      step_NN: transition probabilities, see `transitions`.
      seed_NQ: weights of the rows where each walk starts, float32, at least 0. A column of zeros
        gives ranks of 0.
      restart: probability of a restart at any step, between 0 and 1.
      may_NQ: bool, the rows that each walk may visit; None allows all.
    """
    if may_NQ is not None:
        seed_NQ = seed_NQ * may_NQ
    total_Q = seed_NQ.sum(axis=0)
    seed_NQ = seed_NQ / np.where(total_Q > 0, total_Q, 1)
    arrive_NN, rank_NQ = step_NN.T.tocsr(), seed_NQ
    # The difference between two walks shrinks by the factor 1 - restart with each step.
    for _ in range(math.ceil(math.log(_PRECISION) / math.log(1 - restart))):
        rank_NQ = arrive_NN @ rank_NQ
        rank_NQ *= 1 - restart
        if may_NQ is not None:
            rank_NQ *= may_NQ
        rank_NQ += (1 - rank_NQ.sum(axis=0)) * seed_NQ
    return rank_NQ


def _best(rank_N: np.ndarray, first: Sequence[int], k: int) -> list[int]:
    """Returns the k best rows; ties keep the order of ``first``, whose remaining rows come last."""
    reached = np.flatnonzero(rank_N)
    if 0 < k < len(reached):
        reached = reached[rank_N[reached] >= np.partition(rank_N[reached], -k)[-k]]
    place = {row: index for index, row in enumerate(first)}
    place_R = np.array([place.get(row, len(place)) for row in reached.tolist()])
    rows = reached[np.lexsort((reached, place_R, -rank_N[reached]))].tolist()
    return list(dict.fromkeys([*rows, *first]))[:k]
