"""Builds an HTML page of one run, of several runs side by side, or of a training step's rollouts.

python launch/report.py --config.run=W --workdir=W2
python launch/report.py --config.runs="('A=W1', 'B=W2')" --workdir=W3
python launch/report.py --config.rollouts=W/rollouts/step_000010.sqlite --workdir=W4

docs/viewer.md describes the pages.
"""

from typing import Any

from ml_collections.config_dict import placeholder

from configs import comparison


def get_config() -> Any:
    # Includes `runs`, `allow_different` and `metrics`; `profile` also decides which answers of a
    # single run are marked as right.
    config = comparison.get_config()
    del config.component
    # A workdir of launch/answer.py or launch/distill.py, its journal.sqlite, or a workdir of
    # launch/compare.py.
    config.run = placeholder(str)
    # The journal of a step of configs/grpo.py: its rollouts next to each other.
    config.rollouts = placeholder(str)
    config.title = placeholder(str)  # Title of the page; null names the method and folder, or runs.
    config.difficulty = placeholder(str)  # Workdir of configs/difficulty.py to show on the page.
    return config
