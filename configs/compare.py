r"""Runs several methods on the same questions and compares them (docs/comparing.md).

python launch/compare.py --config.methods=direct,native_rag,ircot,cirag --config.preset=small \
    --config.data.dir=DATA --workdir=W

Needs a dataset folder, or none for the built-in dataset. Writes W/METHOD like launch/answer.py,
W/table.md, W/table.html and figures. Run the same command to resume.

Record of ``small``: twenty methods on the 30 questions of MuSiQue's fold ``test``, with
--config.data.fold=test (2026-11-29, two cores of an Intel Xeon, under load, commit 28514883): 73
minutes, 12.1 GiB, no failures; experiments/RESULTS.md has the table.

Record (built-in dataset, 2026-11-24, 2 busy CPU cores, commit 75d3ca4; with
--config.methods=direct,native_rag,ircot,cirag --config.data.limit=5 --config.latency_questions=2
--config.set="('reader.max_tokens=32','ircot:ircot.max_thoughts=2')"): F1 13.3, 0.0, 3.8 and 20.0
without significant differences, no failures. The methods shared two language models, two encoders
and two indexes; 257 of 718 texts were embedded. Seconds per question, one question at a time: 3.3,
5.6, 13.1 and 14.5. Not yet run on a complete dataset.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> Any:
    config: Any = ConfigDict()
    # METHOD, METHOD:PRESET or NAME=METHOD:PRESET, separated by commas: "cirag,llm=cirag:llm". For a
    # method outside the package, METHOD is the path of its config file.
    config.methods = placeholder(object)
    config.preset = "small"  # Preset of methods without one; "" is the papers' settings.
    # Overrides "('KEY=VALUE', 'NAME:KEY=VALUE')" for every method with that key, or for one method.
    config.set = placeholder(object)
    config.model = placeholder(str)  # Language model of every role without one.

    config.data = common.data(split="")
    config.data.split = placeholder(str)  # null is all splits, or test for the built-in dataset.
    config.data.corpus = "selected_questions"
    common.scoring(config)
    # Run that every other run is compared with; null compares each pair. With many runs, the
    # correction for all pairs leaves few differences significant.
    config.baseline = placeholder(str)
    config.bootstrap_samples = 10_000  # Number of bootstrap resamples, and of permutations.
    config.seed = 0  # Seed for sampling and resampling.

    # Number of runs of each method that samples, with consecutive seeds; greedy methods run once.
    config.repeats = 1
    # Questions that are also answered one at a time, to measure latency; 0 measures none.
    config.latency_questions = 0
    config.in_flight = placeholder(int)  # Questions answered concurrently; null is the preset's.
    common.resumable(config)
    return config
