r"""Compares several runs of launch/answer.py on the same questions.

python launch/evaluate.py --config=configs/comparison.py --workdir=C \
    --config.runs="('student=A1', 'frozen base=A2', 'rule=A3')"

Each is a workdir, with a name in front of it or called by its folder's. The first run's lead over
each other one is reported with its interval.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> Any:
    """Which runs, and how answers are scored."""
    config: Any = ConfigDict()
    config.component = "answers"
    config.runs = placeholder(object)  # A workdir of launch/answer.py, or a tuple of them.
    config.profile = "musique"  # Scorer of answers: evaluation/answers.py lists them.
    config.bootstrap_samples = 10_000
    config.seed = 0
    return config
