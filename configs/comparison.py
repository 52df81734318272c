r"""Compares finished runs of launch/answer.py on the same questions.

python launch/evaluate.py --config=configs/comparison.py --workdir=C \
    --config.runs="('student=A1', 'frozen base=A2', 'top-k=A3')" --config.allow_different=true

Needs workdirs of launch/answer.py, optionally named with NAME=. Writes tables with confidence
intervals, and a paired test for each pair of runs. configs/compare.py also runs the methods.

Record: per cent with 95 % intervals, seconds per question, configs/methods/cirag.py:llm with
--config.cirag.max_steps=4 --config.data.only_with_triples=true. The student is the first in
configs/integrator.py, with --config.cirag.prefilled_headers=false --config.cirag.few_shot=false.
  MuSiQue, 30 questions (--config.data.split=train --config.data.fold=test; 2026-11-22, 2 CPU cores,
  commit 9604270):
                    F1                    EM    R@3    R@5                   tokens   seconds
    student          3.5 [0.0, 9.7]       0.0   50.3   59.7 [47.5, 72.2]     254      13.6
    frozen base      5.6 [0.4, 13.4]      3.3   45.8   59.7 [47.2, 71.9]     452      26.8
    top-k           12.1 [3.3, 23.3]      3.3   51.4   61.9 [50.6, 73.1]      56       2.3
    student-base    -2.1 [-11.4, +6.4]   -3.3   +4.4   +0.0 [-9.4, +8.9]
    student-top-k   -8.6 [-18.9, -0.7]   -3.3   -1.1   -2.2 [-11.7, +7.2]
  Except for one answer of the base, all answers came from triples. An earlier student, trained only
  on MuSiQue (commit a09a180), kept no triples and so answered from passages: F1 5.6, R@3 53.1, R@5
  64.7.
  2WikiMultihopQA, the first 30 dev questions, with triples from configs/extract.py
  (--config.data.split=dev --config.data.limit=30, without only_with_triples; 2026-11-23, 2 CPU
  cores, commit 6e1523a):
    student         13.2 [4.0, 24.2]      6.7   59.2   65.8 [54.2, 76.7]     279      16.7
    frozen base     13.5 [4.6, 24.5]      6.7   43.3   55.0 [44.2, 65.8]     388      25.0
    top-k           16.2 [6.0, 28.0]     10.0   51.7   59.2 [49.2, 68.3]      60       2.2
    student-base    -0.4 [-11.6, +10.8]   0.0  +15.8  +10.8 [+2.5, +19.2]
    student-top-k   -3.0 [-12.6, +5.8]   -3.3   +7.5   +6.7 [-0.8, +14.2]
  Intervals of the student's lead in R@3: base [+8.3, +23.4], top-k [+0.8, +14.2].
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> Any:
    config: Any = ConfigDict()
    config.component = "answers"  # Selects the evaluation; do not change.
    config.runs = placeholder(object)  # A workdir of launch/answer.py, or a tuple of workdirs.
    # Allow runs with different models, K, limits and so on; the table lists the differences.
    config.allow_different = False
    common.scoring(config)
    # Encoder of the metric family bertscore: a model folder, package:NAME or a hub id.
    config.bertscore = placeholder(str)
    # Run that every other run is compared with; null compares each pair. With many runs, the
    # correction for all pairs leaves few differences significant.
    config.baseline = placeholder(str)
    config.bootstrap_samples = 10_000  # Number of bootstrap resamples, and of permutations.
    config.seed = 0  # Seed for sampling and resampling.
    return config
