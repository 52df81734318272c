"""Measures bootstrap and permutation tests of 100,000 predictions with 10,000 resamples.

For every score, the interval and the test of every pair of systems are computed. F1 is simulated
from the lengths of answers and the number of shared words, which gives a realistic number of kinds
of questions (with equal scores): few for answers of at most four words, many for up to twenty.
``ROUGE`` represents a score that differs for almost every answer. ``theirs`` is a numpy version
that resamples questions for each pair. It computes 1/100 of the resamples, and its time is
extrapolated.

Results
  Two idle cores of a shared AMD EPYC machine, 2026-11-26, commit ba0f106; our wall time,
  which equals the processor time (one thread except in BLAS), and the processor time of theirs:

                           kinds of questions   ours     theirs
    EM                     4                    0.24 s   10.5 s
    F1, short answers      139                  0.44 s   10.4 s
    F1, long answers       8797                 6.44 s   10.4 s
    F1, five systems       18135                1.55 s   23.2 s
    ROUGE                  100000               6.24 s   10.3 s
    ROUGE, five systems    20000                1.52 s   22.6 s
"""

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.significance import pairwise
from cirag_jax.io import standard_streams
from experiments.benchmarks.measure import time_call

_LIMIT_SECONDS = 10.0  # per score


def f1(systems: int, count: int, max_words: int) -> np.ndarray:
    """Returns F1 [S, Q] of answers of at most ``max_words`` words; a third of them are right."""
    rng = np.random.default_rng(0)
    gold_Q = rng.integers(1, max_words + 1, count)
    answer_SQ = rng.integers(1, max_words + 1, (systems, count))
    shared_SQ = rng.binomial(np.minimum(answer_SQ, gold_Q), 0.3)
    right_SQ = rng.random((systems, count)) < 0.34
    return np.where(right_SQ, 1.0, 2 * shared_SQ / (answer_SQ + gold_Q))


def cases(predictions: int) -> dict[str, list[Ratio]]:
    """Returns each system's scores by case; with five systems, each has a fifth of the data."""
    rng, per_system = np.random.default_rng(0), predictions // 5
    scores = {
        "EM": f1(2, predictions, 4) == 1,
        "F1, short answers": f1(2, predictions, 4),
        "F1, long answers": f1(2, predictions, 20),
        "F1, five systems": f1(5, per_system, 20),
        "ROUGE": rng.beta(2, 3, (2, predictions)),
        "ROUGE, five systems": rng.beta(2, 3, (5, per_system)),
    }
    return {name: [mean_of(score_Q) for score_Q in score_SQ] for name, score_SQ in scores.items()}


def by_question(scores: Sequence[Ratio], samples: int) -> None:
    """Computes the interval and the test of every pair, by resampling questions."""
    for b, a in itertools.combinations(scores, 2):
        rng, d_Q = np.random.default_rng(0), a.top_Q - b.top_Q
        means = [d_Q[rng.integers(0, len(d_Q), len(d_Q))].mean() for _ in range(samples)]
        np.percentile(means, [2.5, 97.5])
        signed = [np.where(rng.random(len(d_Q)) < 0.5, d_Q, -d_Q).mean() for _ in range(samples)]
        np.mean(np.abs(signed) >= abs(d_Q.mean()))


def main() -> None:
    """Prints one JSON object per score; exits with 1 if one takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predictions", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()
    their_samples = max(options.samples // 100, 1)
    slowest, scale = 0.0, options.samples / their_samples
    for name, scores in cases(options.predictions).items():
        systems = {str(number): score for number, score in enumerate(scores)}
        ours = time_call(lambda systems=systems: pairwise(systems, options.samples))
        theirs = time_call(lambda scores=scores: by_question(scores, their_samples))
        slowest = max(slowest, ours.wall)
        row = {
            "score": name,
            "kinds": len(np.unique([score.top_Q for score in scores], axis=1).T),
            "ours_seconds": round(ours.wall, 2),
            "ours_processor_seconds": round(ours.processor, 2),
            "theirs_processor_seconds": round(theirs.processor * scale, 1),
        }
        print(json.dumps(row), flush=True)
    sys.exit(slowest > _LIMIT_SECONDS)


if __name__ == "__main__":
    with standard_streams():
        main()
