"""The job of ``make quickstart``: train, evaluate, export, answer; no download.

python launch/quickstart.py [--full]

Record (2026-11-28, 2 CPU cores beside some tests, Python 3.11, jax 0.10.2): 4 min 15 s, environment
included. On 150 test questions trained Recall@5 91.0, frozen 46.8, BM25 44.1 per cent; on 30
questions CIRAG has F1 50.7, one-shot retrieval 44.1.

Record of ``--full`` (2026-11-25, 2 CPU cores of an AMD EPYC beside a compiler, Python 3.11, jax
0.10.2, commit 516984c): 7 min 55 s, of which the environment is none (another minute or three). On
520 test questions trained Recall@5 96.2, frozen 48.1, BM25 47.3 per cent; the difference to frozen
is +48.1 [+45.4, +50.7] points. On 100 questions of unseen facts CIRAG has EM 59.0 and F1 59.8,
one-shot retrieval with the same reader 36.0 and 37.0: F1 +22.8 [+11.5, +34.3].
The first reader (commit eaba238) had EM 58.0 and F1 60.4 with CIRAG.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import aligner, common, comparison, retrieval
from configs.methods import cirag, native_rag


def get_config(preset: str = "") -> Any:
    """``config.train`` as in configs/aligner.py:quick, ``config.evaluate`` as in
    configs/retrieval.py, ``config.cirag`` and ``config.one_shot`` as in
    configs/methods/{cirag,native_rag}.py:small, ``config.compare`` as in configs/comparison.py.
    """
    if preset not in ("", "full"):
        raise common.no_preset(preset, ("full",))
    config: Any = ConfigDict()
    config.train = aligner.quick()
    config.train.dev.split = "dev"
    config.evaluate = retrieval.get_config()
    config.cirag = cirag.get_config("small")
    config.cirag.cirag.units = "triple"  # The dataset has triples, and the aligner learnt them.
    config.cirag.cirag.granularities = ("triple", "sentence", "passage")
    config.one_shot = native_rag.get_config("small")
    for method in (config.cirag, config.one_shot):
        method.retriever.units = "triple"
        method.data.split, method.data.fold = "test", "unseen"
        method.data.random = True
    config.compare = comparison.get_config()
    config.compare.allow_different = True  # How much each may write is a method's own.
    return _full(config) if preset == "full" else _short(config)


def _short(config: Any) -> Any:
    config.train.dev.questions = 50
    config.train.num_steps = config.train.eval_every = 40
    config.evaluate.systems = ("trained", "frozen", "bm25")
    config.evaluate.data.limit, config.evaluate.data.random = 150, True
    for method in (config.cirag, config.one_shot):
        method.data.limit = 30
    return config


def _full(config: Any) -> Any:
    config.train.dev.questions = 100
    config.train.num_steps = 80
    config.train.eval_every = 40
    for method in (config.cirag, config.one_shot):
        method.data.limit = 100
    return config
