"""The job of ``make quickstart``: train, evaluate, export, answer; no download.

python launch/quickstart.py

Record (2026-11-21, 2 CPU cores of a shared machine, Python 3.11, jax 0.10.2, commit 2d2982d):
10 min 27 s from a fresh clone, installation included; on 520 test questions trained Recall@5 95.9,
frozen 45.4, BM25 49.1 per cent; the difference to frozen is +50.5 [+47.8, +53.3] points.
With CIRAG on 20 questions (2026-11-22, beside another run, commit 2304453, environment installed):
11 min 24 s, 168 s of it CIRAG; EM 0, passage Recall@5 65.0, sentences 57.5, triples 52.5.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import aligner, retrieval
from configs.methods import cirag


def get_config() -> Any:
    """``config.train`` as in configs/aligner.py:quick, ``config.evaluate`` as in
    configs/retrieval.py, ``config.answer`` as in configs/methods/cirag.py:small.
    """
    config: Any = ConfigDict()
    config.train = aligner.quick()
    config.train.dev.split = "dev"
    config.train.dev.questions = 100
    config.train.num_steps = 80
    config.train.eval_every = 40
    config.evaluate = retrieval.get_config()
    config.answer = cirag.get_config("small")
    config.answer.data.split = "test"
    config.answer.data.limit = 20
    return config
