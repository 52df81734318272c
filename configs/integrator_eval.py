"""Evaluates an integrator's decisions at every step of a teacher's trajectories.

    python launch/evaluate.py --config=configs/integrator_eval.py --config.checkpoint=W \
        --config.trajectories=T --workdir=E

W is a workdir of launch/train.py (its best checkpoint) or a PEFT folder, T a workdir of
launch/distill.py or a .jsonl file. The frozen base and the rule (keep the three best candidates,
ask the question again) stand beside it, and keeping nothing. Without a checkpoint only these are
scored.

Record: no trained student has been evaluated yet.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, retrievers
from configs.methods import blocks


def get_config() -> Any:
    """The student as it was trained, the base led through its sections with an example."""
    config: Any = ConfigDict()
    config.component = "integrator"
    config.seed = 0
    config.checkpoint = placeholder(str)
    config.trajectories = placeholder(str)
    config.keep = "all"  # all | parsed | correct_only: which of them, as in configs/integrator.py.
    config.limit = 0  # So many trajectories, drawn by the seed; 0: all.
    # Where the annotations of the questions are: config.data.dir. They are the gold at the steps of
    # a language model; the annotation teacher's own decisions are gold already.
    config.data = common.data(split="")

    config.integrator = blocks.role(max_tokens=384)
    # How conversations are rendered, as in configs/methods/cirag.py; null: as the checkpoint was
    # trained, else as the trajectories were made.
    config.form = placeholder(str)  # ascii | unicode
    config.rendering = placeholder(str)  # multi_turn | paper
    config.example = placeholder(bool)  # Whether the worked example stands in front.
    config.guided = False  # Lead the student through the sections, too.
    config.match_cutoff = 0.8
    config.base = ConfigDict()
    config.base.run = True  # Also score the model without the checkpoint.
    config.base.guided = True
    config.base.example = placeholder(bool)
    config.base.example = True  # null: as the student.

    config.query_cosine = True  # Compare next queries by the encoder, too.
    config.encoder = retrievers.encoder()
    config.bootstrap_samples = 10_000
    config.in_flight = 256  # Steps that decode together.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    return config
