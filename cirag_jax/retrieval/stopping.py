"""When a search along links has found enough: how likely each of its first passages is needed.

One question needs two passages, another four, and a ranking does not say which. `describe` tells of
the first passages of a ranking how sure every step of the search was of them;
`models.link_head.StopRule` makes probabilities of that.
"""

from collections.abc import Mapping, Sequence

import numpy as np

PLACES = 8  # Passages of a ranking that are described.
_OWN = 5  # Places with a feature of their own.
_RARE = 1e-4  # The least probability that counts.


def num_features(steps: int) -> int:
    """How many numbers `describe` has for a passage."""
    return _OWN + 4 + 2 * steps


def describe(rows: Sequence[int], likely: Sequence[Mapping[int, float]], steps: int) -> np.ndarray:
    """``x_KF`` float32 of the first `PLACES` of ``rows``, or of as many as there are.

    Of each: that any step would have chosen it, for the next one and for the likeliest one behind
    it as well, and how many were to be expected before it; its place; what the likeliest candidate
    of each step had, and it itself. Probabilities come as log odds.

    Args:
      rows: ranked, best first.
      likely: for every step, the probability of each candidate that the step chooses it.
      steps: of a whole search; one that ended early had no candidate in the others.
    """
    first = list(rows[:PLACES])
    chosen_SK = np.zeros((steps, len(first)))
    best_S = np.zeros(steps)
    for step, found in enumerate(likely):
        chosen_SK[step] = [found.get(row, 0.0) for row in first]
        best_S[step] = max(found.values(), default=0.0)
    any_K = 1 - np.prod(1 - chosen_SK, axis=0)
    next_K = np.append(any_K, 0.0)[1:]
    behind_K = np.maximum.accumulate(next_K[::-1])[::-1]
    before_K = np.cumsum(any_K) - any_K
    parts = [
        np.stack([_log_odds(any_K), _log_odds(next_K), _log_odds(behind_K), before_K], axis=1),
        np.eye(len(first), _OWN),
        np.tile(_log_odds(best_S), (len(first), 1)),
        _log_odds(chosen_SK).T,
    ]
    return np.concatenate(parts, axis=1).astype(np.float32)


def needed(rows: Sequence[int], likely_K: np.ndarray, least: float) -> list[int]:
    """The first of the ranked rows, and which of the others are ``least`` likely to be needed.

    ``likely_K`` are probabilities of the first rows; what lies behind them is not needed.
    """
    pairs = zip(rows, likely_K.tolist(), strict=False)
    return [row for place, (row, p) in enumerate(pairs) if not place or p >= least]


def _log_odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, _RARE, 1 - _RARE)
    return np.log(p / (1 - p))
