r"""A language model judges the answers of runs, and a second one says how far to trust it.

python launch/evaluate.py --config=configs/judge.py --workdir=J \
    --config.runs="('native_rag=A', 'cirag=B')" --config.judge.model=FILE.gguf
python launch/evaluate.py --config=configs/judge.py --workdir=J ... --config.second.run=true \
    --config.second.model=FILE.gguf --config.second.rubric=grade

A run is a workdir of launch/answer.py that has ended, or the folder of one method in that of
launch/compare.py; docs/evaluation.md describes the figures. Two judges are two models, two rubrics,
or both. DualRAG's judge is Qwen2.5-72B-Instruct; the default model is far too small to be one.

Not yet run with a model that can judge.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> Any:
    """Which runs are judged, and by whom."""
    config: Any = ConfigDict()
    config.component = "judge"  # What the command runs: leave it.
    config.runs = placeholder(object)  # A run's folder, or a tuple of them, "('NAME=W1', 'W2')".
    # answer: the short one | response: all of the text that it was read from (DualRAG).
    config.text = "answer"
    config.judge = _judge()
    config.second = _judge()
    config.second.run = False  # Whether it judges, too; how far the two agree is told.
    config.max_tokens = 32  # Most new tokens of a verdict.
    config.retries = 1  # Further requests for a verdict that was not given.
    config.profile = "musique"  # Of EM and Acc beside it: evaluation/answers.py lists them.
    config.bootstrap_samples = 10_000  # Resamples of the intervals.
    config.seed = 0  # Of what is drawn, and of the resamples.
    config.in_flight = 256  # Answers under way together.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    return config


def _judge() -> Any:
    config = common.language_model()
    # dualrag: does the prediction imply the answer? | grade: is the response correct?
    config.rubric = "dualrag"
    config.constrained = True  # Force the verdict into its JSON schema (backends that can).
    return config
