"""Evaluates an integrator's decisions at every step of a teacher's trajectories.

    python launch/evaluate.py --config=configs/integrator_eval.py --config.checkpoint=W \
        --config.trajectories=T --workdir=E

W is a workdir of launch/train.py (its best checkpoint) or a PEFT folder, T a workdir of
launch/distill.py or a .jsonl file. The frozen base and the rule (keep the three best candidates,
ask the question again) stand beside it, and keeping nothing. Without a checkpoint only these are
scored.

Record (2026-11-22, one core of a two-core CPU machine beside other work, jax 0.10.2, commit
f1c0bc8): W as in configs/integrator.py, T = 30 trajectories (80 steps) of MuSiQue's test fold; the
teacher kept nothing at 52 % of the steps. Core triples, per cent with 95 % intervals:
             F1 (mean of steps)   F1 where any kept   micro F1   next query F1   stop   parsed
  student    34.0 [23.5, 45.5]    21.5                19.6       14.2            60.0   97.5
  base       12.3 [ 6.3, 19.1]    10.1                 7.0       28.3            62.5   20.0
  rule       15.1 [10.0, 20.7]    31.8                18.2       33.8            65.0
  nothing    52.5 [40.0, 64.1]     0.0                 0.0        0.0            35.0
  MuSiQue    50.0 [37.3, 61.8]     0.0                 0.0       30.1            67.5   95.0
  + 2Wiki    37.1 [25.6, 49.1]    22.8                20.0       13.2            50.0   93.8
  student less base +21.7 [+11.1, +33.3], less rule +18.9 [+6.2, +32.2] (mean of steps).
The last two rows are other students (commit a09a180): of MuSiQue's 60 trajectories alone, which
keeps nothing at any step; and of those and 150 of 2WikiMultihopQA's training questions, which stops
too early, like the first.
The first learned the format and when to keep nothing; it picks fewer right triples than the rule
finds among its three, and it stops too early: two thirds of its training questions were embedded
ones, which are solved in two rounds.
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
