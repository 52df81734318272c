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

from configs import aligner, comparison, retrieval
from configs.methods import cirag, native_rag


def get_config() -> Any:
    """``config.train`` as in configs/aligner.py:quick, ``config.evaluate`` as in
    configs/retrieval.py, ``config.cirag`` and ``config.one_shot`` as in
    configs/methods/{cirag,native_rag}.py:small, ``config.compare`` as in configs/comparison.py.
    """
    config: Any = ConfigDict()
    config.train = aligner.quick()
    config.train.dev.split = "dev"
    config.train.dev.questions = 100
    config.train.num_steps = 80
    config.train.eval_every = 40
    config.evaluate = retrieval.get_config()
    config.cirag = cirag.get_config("small")
    config.cirag.cirag.units = "triple"  # The dataset has triples, and the aligner learnt them.
    config.one_shot = native_rag.get_config("small")
    for method in (config.cirag, config.one_shot):
        method.retriever.units = "triple"
        method.data.split, method.data.fold = "test", "unseen"
        method.data.limit, method.data.random = 100, True
    config.compare = comparison.get_config()
    config.compare.allow_different = True  # How much each may write is a method's own.
    return config
