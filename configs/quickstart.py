"""The embedded job of ``make quickstart``: train, evaluate and export the aligner, no download.

python launch/quickstart.py
"""

from typing import Any

from ml_collections import ConfigDict

from configs import aligner, retrieval


def get_config() -> Any:
    """``config.train`` as in configs/aligner.py:quick, ``config.evaluate`` as in
    configs/retrieval.py.
    """
    config: Any = ConfigDict()
    config.train = aligner.quick()
    config.train.dev.split = "dev"
    config.train.dev.questions = 100
    config.train.num_steps = 80
    config.train.eval_every = 40
    config.evaluate = retrieval.get_config()
    return config
