"""Features that predict which of the first passages of a linked search are needed.

Some questions need two passages, others four, and a ranking does not show how many. `stop_features`
describes how confident each step of the search was about each passage. `models.link_head.StopRule`
turns these features into probabilities.
"""

from collections.abc import Mapping, Sequence

import numpy as np

PLACES = 8  # Only the first passages of a ranking have features.
_ONE_HOT_PLACES = 5  # Number of places that have an indicator feature.
_MIN_PROBABILITY = 1e-4  # Probabilities are clipped to this and to 1 minus this.


def num_features(steps: int) -> int:
    """Returns the number of `stop_features` per passage."""
    return _ONE_HOT_PLACES + 4 + 2 * steps


def stop_features(
    rows: Sequence[int], probabilities: Sequence[Mapping[int, float]], steps: int
) -> np.ndarray:
    """Returns ``x_KF`` float32 for the first `PLACES` of ``rows``, or for all if there are fewer.

    The features of a passage are, with probabilities as log odds:

    - the probability that any step chose this passage, the next passage in the ranking, or the
      likeliest of the later passages (three features);
    - the expected number of chosen passages before this one;
    - an indicator of its place in the ranking;
    - for each step, the probability of the likeliest candidate;
    - for each step, the probability of this passage.

    Args:
      rows: ranked passages, best first.
      probabilities: for each step, each candidate's probability of being chosen.
      steps: number of steps of a complete search; a search that ended early has fewer.
    """
    first = list(rows[:PLACES])
    chosen_SK = np.zeros((steps, len(first)))
    best_S = np.zeros(steps)
    for step, candidates in enumerate(probabilities):
        chosen_SK[step] = [candidates.get(row, 0.0) for row in first]
        best_S[step] = max(candidates.values(), default=0.0)
    any_K = 1 - np.prod(1 - chosen_SK, axis=0)
    next_K = np.append(any_K, 0.0)[1:]
    after_K = np.maximum.accumulate(next_K[::-1])[::-1]
    before_K = np.cumsum(any_K) - any_K
    parts = [
        np.stack([_log_odds(any_K), _log_odds(next_K), _log_odds(after_K), before_K], axis=1),
        np.eye(len(first), _ONE_HOT_PLACES),
        np.tile(_log_odds(best_S), (len(first), 1)),
        _log_odds(chosen_SK).T,
    ]
    return np.concatenate(parts, axis=1).astype(np.float32)


def needed_rows(rows: Sequence[int], probability_K: np.ndarray, threshold: float) -> list[int]:
    """Returns the first row, and all others with at least the probability ``threshold``.

    Rows beyond ``probability_K`` are dropped.
    """
    pairs = zip(rows, probability_K.tolist(), strict=False)
    return [row for place, (row, p) in enumerate(pairs) if not place or p >= threshold]


def _log_odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, _MIN_PROBABILITY, 1 - _MIN_PROBABILITY)
    return np.log(p / (1 - p))
