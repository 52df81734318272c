"""Evaluates an extractor against reference triples, beside the untrained model.

    python launch/evaluate.py --config=configs/extractor_eval.py --config.checkpoint=W \
        --config.data.dir=FOLDER --workdir=E

W is a workdir of launch/train.py (its best checkpoint) or a PEFT folder, FOLDER a dataset folder
with an openie.jsonl. Both models get the same prompt with its worked example and the same tolerant
parser. Passages that also stand in the context of a question of another fold are left out.

Record (2026-11-22, two CPU cores beside other work, jax 0.10.2, commit f1c0bc8): W as in
configs/extractor.py, 20 passages of MuSiQue's test fold (--config.limit=20), per cent, 95 %
intervals: soft F1 33.3 [25.4, 41.8] (precision 52.0, recall 30.2), exact F1 4.0, entity F1 70.8, no
passage failed; untrained base 1.6 [0.0, 4.0], 0.0, 26.3, 17 of 20 failed.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> Any:
    """SmolLM2-135M-Instruct on the passages of the ``test`` fold."""
    config: Any = ConfigDict()
    config.component = "extractor"
    config.seed = 0
    config.checkpoint = placeholder(str)
    config.data = common.data(split="")
    config.data.fold = "test"
    config.limit = 0  # So many passages, drawn by the seed; 0: all.

    config.extractor = common.extractor()
    config.entity_tokens = 192  # Most new tokens of a passage's list of entities.
    config.triple_tokens = 512  # And of its list of triples.
    config.constrained = False  # Forces the JSON asked for, where the backend can.
    # Drops triples whose head or tail has a word that the passage lacks: small models invent names.
    config.grounded = True
    config.base = ConfigDict()
    config.base.run = True  # Also score the model without the checkpoint.

    config.form = "ascii"  # Normalisation before surfaces are compared: ascii | unicode.
    config.bootstrap_samples = 10_000
    config.in_flight = 256  # Passages under way together.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    return config
