r"""Compares several runs of launch/answer.py on the same questions.

python launch/evaluate.py --config=configs/comparison.py --workdir=C \
    --config.runs="('student=A1', 'frozen base=A2', 'top-k=A3')" --config.allow_different=true

Each is a workdir, with a name in front of it or called by its folder's. Every pair's difference is
reported with its interval and a test. configs/compare.py also runs the methods.

Record (2026-11-22, two CPU cores, jax 0.10.2, commit 9604270): MuSiQue's test fold, 30 questions,
answered by configs/methods/cirag.py:llm with --config.cirag.max_steps=4
--config.data.split=train --config.data.fold=test --config.data.only_with_triples=true; the student
(the first of configs/integrator.py) with --config.cirag.prefilled_headers=false
--config.cirag.few_shot=false.
Per cent, 95 % intervals:
                  F1                    EM    R@3    R@5                   tokens   s a question
  student          3.5 [0.0, 9.7]       0.0   50.3   59.7 [47.5, 72.2]     254      13.6
  frozen base      5.6 [0.4, 13.4]      3.3   45.8   59.7 [47.2, 71.9]     452      26.8
  top-k           12.1 [3.3, 23.3]      3.3   51.4   61.9 [50.6, 73.1]      56       2.3
  student-base    -2.1 [-11.4, +6.4]   -3.3   +4.4   +0.0 [-9.4, +8.9]
  student-top-k   -8.6 [-18.9, -0.7]   -3.3   -1.1   -2.2 [-11.7, +7.2]
All answers came from triples but one of the base's. An earlier student, of MuSiQue's trajectories
alone, which keeps nothing and so answers from passages: F1 5.6, R@3 53.1, R@5 64.7 (commit
a09a180).
  The same on 2WikiMultihopQA's first 30 dev questions, over the triples of configs/extractor.py's
model (configs/extract.py), with --config.data.split=dev --config.data.limit=30 instead of fold and
only_with_triples (2026-11-23, two cores, tests beside it, commit 6e1523a; student and top-k as the
day before on another machine, everything trained anew):
  student         13.2 [4.0, 24.2]      6.7   59.2   65.8 [54.2, 76.7]     279      16.7
  frozen base     13.5 [4.6, 24.5]      6.7   43.3   55.0 [44.2, 65.8]     388      25.0
  top-k           16.2 [6.0, 28.0]     10.0   51.7   59.2 [49.2, 68.3]      60       2.2
  student-base    -0.4 [-11.6, +10.8]   0.0  +15.8  +10.8 [+2.5, +19.2]
  student-top-k   -3.0 [-12.6, +5.8]   -3.3   +7.5   +6.7 [-0.8, +14.2]
R@3 leads the base by [+8.3, +23.4], top-k by [+0.8, +14.2].
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax.evaluation.scoring import NAMES


def get_config() -> Any:
    """Which runs, and how answers are scored."""
    config: Any = ConfigDict()
    config.component = "answers"  # What the command runs: leave it.
    config.runs = placeholder(object)  # A workdir of launch/answer.py, or a tuple of them.
    # Compare runs of other models, K, limits and so on, too; the table says what differs.
    config.allow_different = False
    config.profile = "musique"  # Scorer of answers: evaluation/answers.py lists them.
    config.metrics = NAMES  # Families of cirag_jax/evaluation/metrics.py.
    config.recall_at = (3, 5)  # The K of recall@K and hit@K.
    config.bootstrap_samples = 10_000  # Resamples, and permutations of the tests.
    config.seed = 0  # Of what is drawn, and of the resamples.
    return config
