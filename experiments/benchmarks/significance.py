"""Bootstrap and permutation tests of 100,000 predictions with 10,000 resamples.

Exact match and F1 of two systems over made-up answers of one to four words: F1 takes the values
that it takes of real answers. Each score gets its paired interval and its test; theirs is numpy
drawing question by question, with 1/100 of the resamples, and its time is given for all of them.

Results
  Two cores of a shared AMD EPYC machine at load 2, 2026-11-24:

                 kinds of questions   ours     processor   theirs
    EM           4                    0.32 s   0.32 s      14.1 s
    F1           134                  0.67 s   0.66 s      19.8 s
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cirag_jax.evaluation import answers
from cirag_jax.evaluation.overlap import mean_of
from cirag_jax.evaluation.significance import pairwise

_LIMIT_SECONDS = 10.0
_WORDS = [f"w{index}" for index in range(12)]


def answer(rng: np.random.Generator) -> str:
    """A few words of few."""
    return " ".join(rng.choice(_WORDS, rng.integers(1, 5)))


def systems(count: int) -> dict[str, dict[str, np.ndarray]]:
    """Exact match and F1 of two systems, float64 [Q]; a third of each one's answers are right."""
    rng = np.random.default_rng(0)
    golds = [answer(rng) for _ in range(count)]
    found = {}
    for name, share in (("first", 0.34), ("second", 0.33)):
        said = [gold if rng.random() < share else answer(rng) for gold in golds]
        found[name] = answers.score_answers(said, [[gold] for gold in golds])["per_question"]
    return found


def by_question(a: np.ndarray, b: np.ndarray, samples: int) -> None:
    """Interval and test, drawn question by question."""
    rng, d_Q = np.random.default_rng(0), a - b
    drawn = [d_Q[rng.integers(0, len(d_Q), len(d_Q))].mean() for _ in range(samples)]
    np.percentile(drawn, [2.5, 97.5])
    signs = (np.where(rng.random(len(d_Q)) < 0.5, d_Q, -d_Q).mean() for _ in range(samples))
    np.mean([abs(sign) >= abs(d_Q.mean()) for sign in signs])


def seconds(call: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Prints the figures as JSON; exit code 1 where all scores together take too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predictions", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()
    scored = systems(options.predictions)
    result: dict[str, Any] = {"predictions": options.predictions, "samples": options.samples}
    total = 0.0
    for name in ("em", "f1"):
        values = {system: scores[name] for system, scores in scored.items()}
        ratios = {system: mean_of(value) for system, value in values.items()}
        processor = time.process_time()
        ours = seconds(lambda ratios=ratios: pairwise(ratios, options.samples))
        processor = time.process_time() - processor
        part = max(options.samples // 100, 1)
        one, other = values.values()
        theirs = seconds(lambda one=one, other=other, part=part: by_question(one, other, part))
        theirs *= options.samples / part
        total += ours
        result[name] = {
            "kinds": len(np.unique(np.stack([one, other]), axis=1).T),
            "ours_seconds": round(ours, 2),
            "ours_processor_seconds": round(processor, 2),
            "theirs_seconds": round(theirs, 1),
        }
    result["seconds"] = round(total, 2)
    print(json.dumps(result))
    sys.exit(total > _LIMIT_SECONDS)


if __name__ == "__main__":
    main()
