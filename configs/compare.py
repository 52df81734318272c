r"""Runs several methods on the same questions and compares them (docs/comparing.md).

python launch/compare.py --config.methods=direct,native_rag,ircot,cirag --config.preset=small \
    --config.data.dir=DATA --workdir=W

Leaves W/NAME as launch/answer.py leaves a workdir, and W/table.md, W/table.html and figures. Killed
or stopped in any way, the same command goes on.

Record: not yet run on a whole data set.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, comparison


def get_config() -> Any:
    """Which methods, with which settings, on which questions."""
    config: Any = ConfigDict()
    # METHOD, METHOD:PRESET or NAME=METHOD:PRESET, with commas between: "cirag,llm=cirag:llm".
    config.methods = placeholder(object)
    config.preset = "small"  # Of every method that names none; "": the papers' settings.
    # Settings, "('KEY=VALUE', 'NAME:KEY=VALUE')": of every method that has the key, or of one.
    config.set = placeholder(object)
    config.model = placeholder(str)  # The language model of every role that names none.

    config.data = common.data(split="")
    config.data.split = placeholder(str)  # null: all; of the built-in dataset: test.
    config.data.corpus = "selected_questions"
    scored = comparison.get_config()
    for field in ("profile", "metrics", "recall_at", "bootstrap_samples", "seed"):
        config[field] = scored[field]

    # Runs of every method that samples, each with the next seed; greedy ones run once.
    config.repeats = 1
    config.latency_questions = 5  # So many are also asked one by one, for their time; 0: none.
    config.in_flight = placeholder(int)  # Questions that advance together; null: the preset's.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    return config
