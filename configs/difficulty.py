r"""GRADE's difficulty matrix of answering runs: error by hops and by retrieval difficulty.

python launch/evaluate.py --config=configs/difficulty.py --workdir=W \
    --config.runs="('native_rag=A', 'kirag=B')"

A run is a workdir of launch/answer.py, or the folder of one method in that of launch/compare.py;
docs/methods/grade.md describes the figures.

Record (the command below; 24 questions of the built-in dataset, answered by native_rag.py:small
and direct.py:small with --config.data.limit=24 --config.data.random=true, direct with
--config.reader.max_tokens=24; 2026-11-25, two shared CPU cores, commit a8407fd): 14 s. Error
(1 - Acc) native_rag 79.2 [62.5, 95.8], direct 87.5 [75.0, 100.0], their difference
-8.3 [-25.0, +8.3]. Of native_rag's 19 errors 18 lacked a gold passage among its ten, all 19 among
the five that are read (--config.retrieved_at=5). D_r and error over questions: r -0.31 (p 0.14) and
-0.06 (p 0.80). Three questions of two hops: no quartiles.

python launch/evaluate.py --config=configs/difficulty.py --workdir=W \
    --config.runs="('native_rag=A', 'direct=B')"
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax import config_words
from cirag_jax.datasets.chunks import ChunkSettings
from configs import retrievers


def get_config() -> Any:
    """Which runs, and how difficulty and errors are measured."""
    config: Any = ConfigDict()
    config.component = "difficulty"  # What the command runs: leave it.
    config.runs = placeholder(object)  # A run's folder, or a tuple of them, "('NAME=W1', 'W2')".
    config.data = ConfigDict()
    config.data.dir = placeholder(str)  # The runs' dataset; null: what their config.json names.
    # acc | em | f1: a question's error is 1 - its score. acc is the closest to the paper's judge.
    config.score = "acc"
    # The workdir of configs/judge.py about these runs: an answer is right where its judge says so.
    config.judgements = placeholder(str)
    config.profile = "musique"  # Scorer of answers: evaluation/answers.py lists them.
    # min | mean | power_mean of the similarities to what must be found; the matrix's columns.
    config.aggregate = "min"
    config.power = -2.0  # Of the power mean; the released code has -3.
    # passage (as the corpus has them) | chunk (of their articles) | article
    config.unit = "passage"
    # least, most and overlap in words, as in configs/grade.py (cirag_jax/datasets/chunks.py).
    config.chunks = config_words.block_of(ChunkSettings())
    # A gold passage counts as retrieved among the first K of a run's; 0: wherever it stands.
    config.retrieved_at = 0
    config.least_in_cell = 1  # Cells of fewer questions are n/a, and no points of correlations.
    config.encoder = retrievers.encoder()
    config.bootstrap_samples = 10_000  # Resamples of the intervals.
    config.seed = 0  # Of what is drawn, and of the resamples.
    return config
