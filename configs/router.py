r"""Trains CIRAG's granularity router from journals (docs/router.md).

python launch/compare.py --config.methods="triple=cirag,sentence=cirag,passage=cirag" \
    --config.set="('triple:cirag.granularities=(\"triple\",)',...)" --workdir=T    # docs/router.md
python launch/train.py --config=configs/router.py \
    --config.runs="('T/triple','T/sentence','T/passage')" \
    --config.eval_runs="('E/triple','E/sentence','E/passage')" --workdir=W
python launch/answer.py --config=configs/methods/cirag.py --config.cirag.router=W --workdir=A

Needs finished runs of CIRAG with one granularity each, on training questions or the fold dev_tune,
with the same encoder. Not yet run on a complete dataset.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import retrievers


def get_config() -> Any:
    config: Any = ConfigDict()
    config.component = "router"  # Selects the trainer; do not change.
    # Workdirs of launch/answer.py, one per granularity, whose questions the router learns from.
    config.runs = placeholder(object)
    # The same for other questions, on which calls saved and F1 lost are measured; null measures
    # nothing.
    config.eval_runs = placeholder(object)
    config.encoder = retrievers.encoder()  # The encoder of the runs, which embeds questions.
    config.precision = 10.0  # Precision of the normal prior of the weights.
    # Probabilities below which granularities are skipped in the evaluation.
    config.thresholds = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    config.profile = "musique"  # Answer scorer, from evaluation/answers.py.
    config.bootstrap_samples = 10_000  # Number of bootstrap resamples.
    config.seed = 0  # Seed for resampling.
    return config
