"""Evaluates an integrator's decisions at every step of a teacher's trajectories.

    python launch/evaluate.py --config=configs/integrator_eval.py --config.checkpoint=W \
        --config.trajectories=T --workdir=E

W is a workdir of launch/train.py (its best checkpoint) or a PEFT folder, T a workdir of
launch/distill.py or a .jsonl file. The frozen base and the top-k baselines (keep the three best
candidates, ask the question again) stand beside it, the ranker of T as an aligner that integrates
(keep the best candidate), and keeping nothing. Without a checkpoint only these are scored, with
``--config.base.run=false`` without any language model.

Record (2026-11-22, one core of a two-core CPU machine beside other work, jax 0.10.2): T = 30
trajectories (80 steps) of MuSiQue's test fold; the teacher kept nothing at 52 % of the steps. Core
triples, per cent with 95 % intervals; "student" is the first of configs/integrator.py (commit
9604270), the base was asked at commit f1c0bc8:
               F1 (mean of steps)   F1 where any kept   micro F1   next query F1   stop   parsed
  student      38.4 [28.3, 48.0]    17.7                16.0       23.2            70.0   98.8
  base         12.3 [ 6.3, 19.1]    10.1                 7.0       28.3            62.5   20.0
  top-k        15.1 [10.0, 20.7]    31.8                18.2       33.8            65.0
  nothing      52.5 [40.0, 64.1]     0.0                 0.0        0.0            35.0
  MuSiQue      50.0 [37.3, 61.8]     0.0                 0.0       30.1            67.5   95.0
  + built-in   34.0 [23.5, 45.5]    21.5                19.6       14.2            60.0   97.5
  + all 2Wiki  37.1 [25.6, 49.1]    22.8                20.0       13.2            50.0   93.8
  student less top-k: +23.3 [+9.8, +36.1] (mean of steps), -2.2 [-12.5, +9.2] (micro F1).
The last three rows are the other students of configs/integrator.py: of MuSiQue's 60 trajectories
alone, which keeps nothing at any step; and with built-in or short 2Wiki ones beside, which stop too
early. Without those of one round it stops better than top-k; it picks fewer right triples than
top-k finds among its three.
  The same for T = 30 trajectories (92 steps) of 2WikiMultihopQA's first 30 dev questions, over the
triples of configs/extractor.py's model; the teacher kept nothing at 66 % of the steps (the base
2026-11-23, two cores, tests beside it, commit 6e1523a: 16 min 13 s):
  student      46.2 [35.8, 56.1]    17.7                14.1       27.6            60.9   93.5
  base         22.8 [13.9, 32.6]    12.9                 5.6       22.1            65.2   23.9
  top-k        11.8 [ 7.4, 16.5]    35.1                15.0       23.2            72.8
  nothing      66.3 [55.7, 76.6]     0.0                 0.0        0.0            27.2
  student less top-k: +34.4 [+21.4, +46.8] (mean of steps), -0.9 [-10.0, +8.6] (micro F1), stop
  -12.0 [-27.1, +3.5].
  Trajectories of sentences (cirag.units=sentence; 40 drawn of 2WikiMultihopQA's dev_tune, 72 steps,
--config.data.dir=2wikimultihopqa --config.encoder.model=shipped:aligner
--config.retriever.units=sentence --config.base.run=false; 2026-11-25, commit 14c1657; 5 min 33 s
beside other work): core F1 of top-k 53.9, of the aligner 69.0; recall of the next query 88.5
(question with the three best), 61.5 (aligner), 82.7 (teacher). The student of them, 97 questions of
dev_report, 196 steps (the same day, commit 7ffffe9; 16 min, two thirds of them the base's): core F1
72.2 (shipped:integrator: 72.3, commit 993d767), base 34.9, top-k 52.1, aligner 71.9; more in
experiments/RESULTS.md.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, retrievers
from configs.methods import blocks


def get_config() -> Any:
    """The student as it was trained, the base led through its sections with an example."""
    config: Any = ConfigDict()
    config.component = "integrator"  # What the command runs: leave it.
    config.seed = 0  # Of what is drawn, and of the resamples.
    # A training workdir, a folder in PEFT's format, shipped:NAME.
    config.checkpoint = placeholder(str)
    config.trajectories = placeholder(str)  # A workdir of launch/distill.py.
    config.keep = "all"  # all | parsed | correct_only: which of them, as in configs/integrator.py.
    config.limit = 0  # So many trajectories, drawn by the seed; 0: all.
    # Where the annotations of the questions are: config.data.dir. They are the gold at the steps of
    # a language model; the annotation teacher's own decisions are gold already.
    config.data = common.data(split="")

    config.integrator = blocks.role(max_tokens=384)
    # How conversations are rendered, as in configs/methods/cirag.py; null: as the checkpoint was
    # trained, else as the trajectories were made.
    config.normalization = placeholder(str)  # ascii | unicode
    config.prompt_format = placeholder(str)  # multi_turn | paper | compact
    config.few_shot = placeholder(bool)  # Whether the worked example stands in front.
    config.prefilled_headers = False  # Lead the student through the sections, too.
    config.keep_above = 0.0  # As in configs/methods/cirag.py; chosen on questions of dev_tune.
    config.match_cutoff = 0.8  # As in configs/methods/cirag.py.
    # Of the aligner, as in configs/methods/cirag.py, chosen on questions of dev_tune. It is the
    # ranker of the trajectories: make them with --config.encoder.model=ALIGNER.
    config.stop_below = -1.0
    config.base = ConfigDict()
    config.base.keep_above = 0.0  # The same of the model without the checkpoint.
    config.base.run = True  # Also score the model without the checkpoint.
    config.base.prefilled_headers = True  # Lead it through the sections.
    config.base.few_shot = placeholder(bool)
    config.base.few_shot = True  # null: as the student.

    config.query_cosine = True  # Compare next queries by the encoder, too.
    # Passages that a next query retrieves, of which recall is told where config.data.dir is the
    # dataset; 0: it is not.
    config.query_recall = 5
    config.retriever = retrievers.retriever()
    config.encoder = retrievers.encoder()
    config.bootstrap_samples = 10_000  # Resamples of the intervals.
    config.in_flight = 256  # Steps that decode together.
    config.cache = placeholder(str)  # A file of responses that several runs share; null: none.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on from there. 0: never.
    return config
