"""The pages that show a run question by question, or several runs side by side.

python launch/report.py --config.run=W --workdir=W2
python launch/report.py --config.runs="('A=W1', 'B=W2')" --workdir=W3
"""

from typing import Any

from ml_collections.config_dict import placeholder

from configs import comparison


def get_config() -> Any:
    """Which runs, with what configs/comparison.py says of several; MuSiQue's scorer."""
    # `runs`, `allow_different`, `metrics` and so on; `profile` says what is right in traces, too.
    config = comparison.get_config()
    del config.component
    # Workdir of launch/answer.py or launch/distill.py, or its journal.sqlite; or a workdir of
    # launch/compare.py, whose settings may differ.
    config.run = placeholder(str)
    config.title = placeholder(str)  # Of the page; null: method and workdir, or the runs' names.
    config.difficulty = placeholder(str)  # A workdir of configs/difficulty.py, shown with them.
    return config
