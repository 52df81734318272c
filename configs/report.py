"""The page that shows a run question by question.

python launch/report.py --config.run=W --workdir=W2
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> Any:
    """A run's own title, MuSiQue's scorer."""
    config: Any = ConfigDict()
    # Workdir of launch/answer.py or launch/distill.py, or its journal.sqlite; required.
    config.run = placeholder(str)
    config.title = placeholder(str)  # Of the page; null: the method and the workdir's name.
    config.profile = "musique"  # Whose exact match says right or wrong: evaluation/answers.py.
    return config
