"""Bootstrap and permutation tests of 100,000 predictions with 10,000 resamples.

Every score of several systems gets the interval and the test of every pair. F1 is made up of the
lengths of answers and of how many words they share, so that it has the values that it has of real
answers: few where they have at most four words, many where they have twenty. ``ROUGE`` stands for a
score that has another value of almost every answer. Theirs is numpy drawing question by question,
pair by pair, with 1/100 of the resamples, and its time is given for all of them.

Results
  Two idle cores of a shared AMD EPYC machine, 2026-11-26, commit ba0f106; ours by the clock, which
  equals its processor time (one thread but for BLAS), theirs in processor time:

                           kinds of questions   ours     theirs
    EM                     4                    0.24 s   10.5 s
    F1, short answers      139                  0.44 s   10.4 s
    F1, long answers       8797                 6.44 s   10.4 s
    F1, five systems       18135                1.55 s   23.2 s
    ROUGE                  100000               6.24 s   10.3 s
    ROUGE, five systems    20000                1.52 s   22.6 s
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.evaluation.overlap import Ratio, mean_of
from cirag_jax.evaluation.significance import pairwise

_LIMIT_SECONDS = 10.0  # of each score


def f1(systems: int, count: int, most: int) -> np.ndarray:
    """F1 [S, Q] of answers to the same questions of at most so many words; a third are right."""
    rng = np.random.default_rng(0)
    wanted_Q = rng.integers(1, most + 1, count)
    said_SQ = rng.integers(1, most + 1, (systems, count))
    shared_SQ = rng.binomial(np.minimum(said_SQ, wanted_Q), 0.3)
    right_SQ = rng.random((systems, count)) < 0.34
    return np.where(right_SQ, 1.0, 2 * shared_SQ / (said_SQ + wanted_Q))


def cases(predictions: int) -> dict[str, list[Ratio]]:
    """The score of each system, by the name of the case; five systems share the predictions out."""
    rng, each = np.random.default_rng(0), predictions // 5
    found = {
        "EM": f1(2, predictions, 4) == 1,
        "F1, short answers": f1(2, predictions, 4),
        "F1, long answers": f1(2, predictions, 20),
        "F1, five systems": f1(5, each, 20),
        "ROUGE": rng.beta(2, 3, (2, predictions)),
        "ROUGE, five systems": rng.beta(2, 3, (5, each)),
    }
    return {name: [mean_of(own_Q) for own_Q in score_SQ] for name, score_SQ in found.items()}


def by_question(scores: Sequence[Ratio], samples: int) -> None:
    """Interval and test of every pair, drawn question by question."""
    for place, one in enumerate(scores):
        for other in scores[:place]:
            rng, d_Q = np.random.default_rng(0), one.top_Q - other.top_Q
            drawn = [d_Q[rng.integers(0, len(d_Q), len(d_Q))].mean() for _ in range(samples)]
            np.percentile(drawn, [2.5, 97.5])
            signs = [np.where(rng.random(len(d_Q)) < 0.5, d_Q, -d_Q).mean() for _ in range(samples)]
            np.mean(np.abs(signs) >= abs(d_Q.mean()))


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    """Prints a line of JSON a score; exit code 1 where one takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predictions", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()
    part = max(options.samples // 100, 1)
    slowest = 0.0
    for name, scores in cases(options.predictions).items():
        systems = {str(place): score for place, score in enumerate(scores)}
        wall, processor = seconds(lambda systems=systems: pairwise(systems, options.samples))
        _, theirs = seconds(lambda scores=scores: by_question(scores, part))
        slowest = max(slowest, wall)
        told = {
            "score": name,
            "kinds": len(np.unique([score.top_Q for score in scores], axis=1).T),
            "ours_seconds": round(wall, 2),
            "ours_processor_seconds": round(processor, 2),
            "theirs_processor_seconds": round(theirs * options.samples / part, 1),
        }
        print(json.dumps(told), flush=True)
    sys.exit(slowest > _LIMIT_SECONDS)


if __name__ == "__main__":
    main()
