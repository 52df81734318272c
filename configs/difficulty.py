r"""Breaks down errors of answering runs by hops and retrieval difficulty (GRADE's matrix).

python launch/evaluate.py --config=configs/difficulty.py --workdir=W \
    --config.runs="('native_rag=A', 'direct=B')"

Needs workdirs of launch/answer.py, or method folders of launch/compare.py. Writes tables and heat
maps to W. docs/methods/grade.md describes them.

Record (the command above; 24 questions of the built-in dataset, answered by native_rag.py:small and
direct.py:small with --config.data.limit=24 --config.data.random=true, direct with
--config.reader.max_tokens=24; 2026-11-25, 2 CPU cores, commit a8407fd): error (1 - Acc) native_rag
79.2 [62.5, 95.8], direct 87.5 [75.0, 100.0], difference -8.3 [-25.0, +8.3]; 14 s. In 18 of
native_rag's 19 errors a gold passage is missing from its ten passages, and in all 19 from the five
that are read (--config.retrieved_at=5). Correlation of D_r and error over questions: r -0.31 (p
0.14) and -0.06 (p 0.80). The three questions of two hops are too few for quartiles.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax import config_words
from cirag_jax.datasets.chunks import ChunkSettings
from configs import retrievers


def get_config() -> Any:
    config: Any = ConfigDict()
    config.component = "difficulty"  # Selects the evaluation; do not change.
    config.runs = placeholder(object)  # A run's folder, or a tuple of them, "('NAME=W1', 'W2')".
    config.data = ConfigDict()
    config.data.dir = placeholder(str)  # Dataset of the runs; null reads it from their config.json.
    # acc | em | f1: a question's error is 1 - score. acc is closest to the paper's judge.
    config.score = "acc"
    # A workdir of configs/judge.py with verdicts on these runs, to use instead of scores.
    config.judgements = placeholder(str)
    config.profile = "musique"  # Answer scorer, from evaluation/answers.py.
    # How to aggregate a question's similarities to its gold passages, for the matrix's columns: min
    # | mean | power_mean
    config.aggregate = "min"
    config.power = -2.0  # Exponent of the power mean; the released code has -3.
    # Compared texts: passage (of the corpus) | chunk (of its article) | article
    config.unit = "passage"
    # Chunks as in configs/grade.py.
    config.chunks = config_words.block_of(ChunkSettings())
    # A gold passage counts as retrieved if it is among a run's first K passages; 0 is any rank.
    config.retrieved_at = 0
    # Minimum questions of a cell; smaller cells are n/a and ignored by correlations.
    config.least_in_cell = 1
    config.encoder = retrievers.encoder()
    config.bootstrap_samples = 10_000  # Bootstrap resamples for confidence intervals.
    config.seed = 0  # Seed for sampling and resampling.
    return config
