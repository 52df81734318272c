r"""Evaluates a reader and its untrained base on complete and incomplete gold evidence.

    python launch/evaluate.py --config=configs/reader_eval.py --config.checkpoint=W \
        --config.folders="('2wikimultihopqa','hotpotqa')" --workdir=E

Needs a training workdir or PEFT folder W, and dataset folders. The reader reads each question
twice, with distractors: with all gold evidence, when it should answer, and without one gold triple
or the evidence of one gold passage, when it should refuse. Writes scores to E; run the same command
to resume.

Record (--config.checkpoint=shipped:reader --config.folders=2wikimultihopqa --config.data.limit=60
--config.data.random=true --config.evidence.distractors=8 --config.base.run=false; 2026-11-25, 2 CPU
cores of an AMD EPYC, commit b2134ea): EM 45.0 [33.3, 58.3] (triples 57.7, sentences 35.5), F1 54.4,
refusals 83.3 % of incomplete and 25.0 % of complete evidence; 273 s. The sixth reader (commit
91d6a63): EM 55.0, F1 63.2, refusals 83.3 % and 13.3 %. Untrained SmolLM2: EM 0.0, F1 11.8, refusals
15.0 % of both.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, reader


def get_config() -> Any:
    config: Any = ConfigDict()
    config.component = "reader"  # Selects the evaluation; do not change.
    config.seed = 0  # Seed for sampling and resampling.
    # A training workdir, a PEFT folder or shipped:NAME.
    config.checkpoint = placeholder(str)
    config.folders = placeholder(object)  # A dataset folder, or a tuple of them; null is built-in.
    config.data = common.data(split="dev")
    config.data.fold = "dev_report"
    config.evidence = reader.evidence()
    config.profile = "musique"  # Answer scorer, from evaluation/answers.py.

    config.reader = common.language_model()
    config.max_tokens = 160  # Maximum new tokens of an answer.
    # Also request the probability of answers, for calibration.png; servers must support
    # log-probabilities.
    config.calibration = True
    config.base = ConfigDict()
    config.base.run = True  # Also evaluate the model without the checkpoint.

    config.bootstrap_samples = 10_000  # Bootstrap resamples for confidence intervals.
    config.in_flight = 256  # Questions processed concurrently.
    common.resumable(config)
    return config
