"""The likeliest chains of a question, side by side, and what their steps found likely."""

from collections.abc import Sequence

import numpy as np
from scipy.special import log_softmax, softmax

from cirag_jax.retrieval.candidates import Candidates, Search

_FIRST = 3  # Passages of the chain that come before all others; chosen on dev_tune halves.


class Beam:
    """A beam over chains: a step makes each of them longer and keeps the likeliest.

    The probability of a chain is the product of those of its choices. Of chains with the same
    passages in another order the likeliest is kept.

    Args:
      search: before its first step.
      width: chains that are kept.

    Attributes:
      likely: for every step so far, the probability of each candidate that it is chosen, over all
        chains.
    """

    def __init__(self, search: Search, width: int = 1):
        self._chains, self._width = [(search, 0.0)], width
        self.likely: list[dict[int, float]] = []

    @property
    def going(self) -> list[Search]:
        """The chains that can still grow."""
        return [search for search, _ in self._chains if not search.ended]

    def extend(self, found: Sequence[tuple[Candidates, np.ndarray]]) -> None:
        """Takes a step, given what each of the `going` chains chooses from and its scores."""
        options = [(search, log_p) for search, log_p in self._chains if search.ended]
        going = [(search, log_p) for search, log_p in self._chains if not search.ended]
        likely: dict[int, float] = {}
        for share, (search, log_p), (candidates, score_R) in zip(
            _shares(going), going, found, strict=True
        ):
            if not len(score_R):
                search.ended = True
                options.append((search, log_p))
                continue
            score_R = score_R.astype(np.float64)
            likely_R, log_p_R = share * softmax(score_R), log_p + log_softmax(score_R)
            for row, p in zip(candidates.row_R.tolist(), likely_R.tolist(), strict=True):
                likely[row] = likely.get(row, 0.0) + p
            # Twice as many as are kept, for other chains may come to the same passages.
            for place in np.argsort(-log_p_R, kind="stable")[: 2 * self._width].tolist():
                row, unit = int(candidates.row_R[place]), int(candidates.unit_R[place])
                options.append((search.longer(row, unit), float(log_p_R[place])))
        if likely:
            self.likely.append(likely)
        kept: dict[frozenset[int], tuple[Search, float]] = {}
        for search, log_p in sorted(options, key=lambda option: -option[1]):
            kept.setdefault(frozenset(search.rows), (search, log_p))
        self._chains = list(kept.values())[: self._width]

    def ranked(self) -> list[int]:
        """The first passages of the likeliest chain, then all candidates by how likely any step
        chose them.

        Later steps may follow a wrong passage; what several found likely is the safer guess.
        """
        missed: dict[int, float] = {}
        for found in self.likely:
            for row, likely in found.items():
                missed[row] = missed.get(row, 1.0) * (1 - likely)
        likeliest = sorted(missed, key=missed.__getitem__)
        return list(dict.fromkeys([*self._chains[0][0].rows[:_FIRST], *likeliest]))


def _shares(chains: Sequence[tuple[Search, float]]) -> list[float]:
    """The probability of each chain among these."""
    return softmax(np.array([log_p for _, log_p in chains])).tolist() if chains else []
