r"""Evaluates a reader from whole and from cut gold evidence, beside the untrained model.

    python launch/evaluate.py --config=configs/reader_eval.py --config.checkpoint=W \
        --config.folders="('2wikimultihopqa','hotpotqa')" --workdir=E

W is a workdir of launch/train.py (its best checkpoint) or a PEFT folder. Every question is read
twice, among distractors: with all its gold evidence, which is to be answered, and without that of
one gold passage, which is to be refused.

Record (--config.checkpoint=shipped:reader --config.folders=2wikimultihopqa --config.data.limit=60
--config.data.random=true --config.evidence.distractors=8 --config.base.run=false; 2026-11-25, 2 CPU
cores of an AMD EPYC beside a training, commit b2134ea): 273 s. EM 45.0 [33.3, 58.3], F1 54.4,
refuses 83.3 % of cut and 25.0 % of whole evidence; triples EM 57.7, sentences 35.5. The sixth
reader (commit 91d6a63): EM 55.0, F1 63.2, 83.3 and 13.3 %; SmolLM2 untrained: EM 0.0, F1 11.8, 15.0
% of both.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, reader


def get_config() -> Any:
    """SmolLM2-135M-Instruct on the dev questions that are reported on."""
    config: Any = ConfigDict()
    config.component = "reader"  # What the command runs: leave it.
    config.seed = 0  # Of what is drawn, and of the resamples.
    # A training workdir, a folder in PEFT's format, shipped:NAME.
    config.checkpoint = placeholder(str)
    config.folders = placeholder(object)  # A dataset folder, or a tuple of them; null: built-in.
    config.data = common.data(split="dev")
    config.data.fold = "dev_report"
    config.evidence = reader.evidence()
    config.profile = "musique"  # Scorer of answers: evaluation/answers.py lists them.

    config.reader = common.language_model()
    config.max_tokens = 160  # Most new tokens of an answer.
    # Ask for the probability of the answers, too; calibration.png shows what it is worth. A server
    # must give log-probabilities.
    config.calibration = True
    config.base = ConfigDict()
    config.base.run = True  # Also score the model without the checkpoint.

    config.bootstrap_samples = 10_000  # Resamples of the intervals.
    config.in_flight = 256  # Readings under way together.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    return config
