r"""Judges the answers of runs with a language model (docs/evaluation.md).

python launch/evaluate.py --config=configs/judge.py --workdir=J \
    --config.runs="('native_rag=A', 'cirag=B')" --config.judge.model=FILE.gguf
python launch/evaluate.py --config=configs/judge.py --workdir=J ... --config.second.run=true \
    --config.second.model=FILE.gguf --config.second.rubric=grade

Needs finished workdirs of launch/answer.py, or method folders of launch/compare.py. Writes verdicts
and scores and, with a second judge (another model or rubric), the agreement of both. DualRAG judges
with Qwen2.5-72B-Instruct; the default model is far too small. Not yet run with a capable model.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, retrievers


def get_config() -> Any:
    config: Any = ConfigDict()
    config.component = "judge"  # Selects the evaluation; do not change.
    config.runs = placeholder(object)  # A run's folder, or a tuple of them, "('NAME=W1', 'W2')".
    # Judged text: answer (short answer) | response (the text that contains the answer; DualRAG)
    config.text = "answer"
    common.prompts(config)
    config.judge = _judge()
    config.second = _judge()
    config.second.run = False  # Also run the second judge and report the agreement.
    config.max_tokens = 32  # Maximum new tokens of a verdict of dualrag or grade.
    config.retries = 1  # Further requests if the response has no verdict.
    config.encoder = retrievers.encoder()  # Embeds questions for the rubric relevancy.
    config.profile = "musique"  # Scorer of EM and Acc, from evaluation/answers.py.
    config.bootstrap_samples = 10_000  # Bootstrap resamples for confidence intervals.
    config.seed = 0  # Seed for sampling and resampling.
    config.in_flight = 256  # Answers judged concurrently.
    common.resumable(config)
    return config


def _judge() -> Any:
    config = common.language_model()
    # Rubric: dualrag (does the prediction imply the answer?) | grade (is the response correct?) |
    # faithfulness (share of its statements that the evidence supports) | relevancy (similarity of
    # the question and of questions made from the answer, by config.encoder)
    config.rubric = "dualrag"
    config.constrained = True  # Enforce the verdict's JSON schema, if the backend supports it.
    return config
