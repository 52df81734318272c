"""The steps of ``make quickstart``: train, evaluate, export, answer.

python launch/quickstart.py [--full]

Needs no download: data and models are built in. Takes about five minutes on 2 CPU cores, or eight
with ``--full``.

Record (2026-11-28, 2 CPU cores, Python 3.11, jax 0.10.2): 4 min 15 s, including the installation of
the environment. Recall@5 on 150 test questions: trained 91.0, frozen 46.8, BM25 44.1 per cent. F1
on 30 questions: CIRAG 50.7, one-shot retrieval 44.1.

Record of ``--full`` (2026-11-25, 2 CPU cores of an AMD EPYC, Python 3.11, jax 0.10.2, commit
516984c): 7 min 55 s, without the installation. Recall@5 on 520 test questions: trained 96.2, frozen
48.1, BM25 47.3 per cent; trained minus frozen is +48.1 [+45.4, +50.7] points. On 100 questions
about unseen facts CIRAG has EM 59.0 and F1 59.8, one-shot retrieval with the same reader 36.0 and
37.0; the difference in F1 is +22.8 [+11.5, +34.3]. An earlier reader (commit eaba238) had EM 58.0
and F1 60.4 with CIRAG.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import aligner, common, comparison, retrieval
from configs.methods import cirag, native_rag


def get_config(preset: str = "") -> Any:
    """Returns one block per step, each with the fields of that step's config file."""
    if preset not in ("", "full"):
        raise common.unknown_preset(preset, ("full",))
    config: Any = ConfigDict()
    config.train = aligner.quick()
    config.train.dev.split = "dev"
    config.evaluate = retrieval.get_config()
    config.cirag = cirag.get_config("small")
    config.cirag.cirag.units = "triple"  # The aligner is trained on the dataset's triples.
    config.cirag.cirag.granularities = ("triple", "sentence", "passage")
    config.one_shot = native_rag.get_config("small")
    for method in (config.cirag, config.one_shot):
        method.retriever.units = "triple"
        method.data.split, method.data.fold = "test", "unseen"
        method.data.random = True
    config.compare = comparison.get_config()
    config.compare.allow_different = True  # The methods' token limits differ.
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
