r"""Runs several methods on the same questions and compares them (docs/comparing.md).

python launch/compare.py --config.methods=direct,native_rag,ircot,cirag --config.preset=small \
    --config.data.dir=DATA --workdir=W

Leaves W/NAME as launch/answer.py leaves a workdir, and W/table.md, W/table.html and figures. Killed
or stopped in any way, the same command goes on.

Record (--config.methods=direct,native_rag,ircot,cirag --config.data.limit=5
--config.latency_questions=2 --config.set="('reader.max_tokens=32','ircot:ircot.max_thoughts=2')",
the built-in data set; 2026-11-24, SmolLM2-135M, two shared CPU cores at load 8 to 17, commit
75d3ca4): 0 failures; two language models (with the shipped reader and without), two encoders and
two indexes opened; 718 texts looked up, 257 embedded. F1 13.3, 0.0, 3.8, 20.0; no difference is
significant with 5 questions. Seconds alone 3.3, 5.6, 13.1, 14.5; those together are the machine's
load, not the methods'. Not yet run on a whole data set.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, comparison


def get_config() -> Any:
    """Which methods, with which settings, on which questions."""
    config: Any = ConfigDict()
    # METHOD, METHOD:PRESET or NAME=METHOD:PRESET, with commas between: "cirag,llm=cirag:llm"; a
    # method outside of the package is the path of its config file.
    config.methods = placeholder(object)
    config.preset = "small"  # Of every method that names none; "": the papers' settings.
    # Settings, "('KEY=VALUE', 'NAME:KEY=VALUE')": of every method that has the key, or of one.
    config.set = placeholder(object)
    config.model = placeholder(str)  # The language model of every role that names none.

    config.data = common.data(split="")
    config.data.split = placeholder(str)  # null: all; of the built-in dataset: test.
    config.data.corpus = "selected_questions"
    scored = comparison.get_config()
    config.profile = scored.profile  # Scorer of answers: evaluation/answers.py lists them.
    config.metrics = scored.metrics  # Families of cirag_jax/evaluation/metrics.py.
    config.recall_at = scored.recall_at  # The K of recall@K and hit@K.
    config.bootstrap_samples = scored.bootstrap_samples  # Resamples, and permutations of the tests.
    config.seed = scored.seed  # Of what is drawn, and of the resamples.

    # Runs of every method that samples, each with the next seed; greedy ones run once.
    config.repeats = 1
    # Questions that are also asked one by one, to measure latency; 0 measures none.
    config.latency_questions = 0
    config.in_flight = placeholder(int)  # Questions that advance together; null: the preset's.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    return config
