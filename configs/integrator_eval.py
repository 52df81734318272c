"""Evaluates an integrator's decisions at every step of a teacher's trajectories.

    python launch/evaluate.py --config=configs/integrator_eval.py --config.checkpoint=W \
        --config.trajectories=T --workdir=E

Needs a training workdir or PEFT folder W and trajectories T (a workdir of launch/distill.py or a
.jsonl file). Also evaluates the untrained base model and three baselines: top-k (keep the three
best candidates and repeat the question), aligner (the ranker of T keeps its best candidate) and
nothing (keep no candidate). Without a checkpoint, no student is evaluated; --config.base.run=false
leaves out the base model. Writes scores with confidence intervals to E; run the same command to
resume.

Record (per cent with 95 % intervals; "student" is the first student in configs/integrator.py):
  T = 30 trajectories (80 steps) of MuSiQue's test fold, whose teacher keeps nothing at 52 % of the
  steps (2026-11-22, one CPU core, jax 0.10.2; student at commit 9604270, base at f1c0bc8):
               F1 (mean of steps)   F1 where any kept   micro F1   next query F1   stop   parsed
  student      38.4 [28.3, 48.0]    17.7                16.0       23.2            70.0   98.8
  base         12.3 [ 6.3, 19.1]    10.1                 7.0       28.3            62.5   20.0
  top-k        15.1 [10.0, 20.7]    31.8                18.2       33.8            65.0
  nothing      52.5 [40.0, 64.1]     0.0                 0.0        0.0            35.0
  MuSiQue      50.0 [37.3, 61.8]     0.0                 0.0       30.1            67.5   95.0
  + built-in   34.0 [23.5, 45.5]    21.5                19.6       14.2            60.0   97.5
  + all 2Wiki  37.1 [25.6, 49.1]    22.8                20.0       13.2            50.0   93.8
  student minus top-k: +23.3 [+9.8, +36.1] (mean of steps), -2.2 [-12.5, +9.2] (micro F1).
The last three rows are students trained on other trajectories. With only MuSiQue's 60, the student
keeps nothing at any step; with added built-in or one-round 2Wiki trajectories, it stops too early.
"student" stops better than top-k, but fewer of its kept triples are right than of top-k's three.
  T = 30 trajectories (92 steps) of 2WikiMultihopQA's first 30 dev questions with triples of
  configs/extractor.py's model; the teacher keeps nothing at 66 % of the steps (base: 2026-11-23, 2
  CPU cores, commit 6e1523a, 16 min 13 s):
  student      46.2 [35.8, 56.1]    17.7                14.1       27.6            60.9   93.5
  base         22.8 [13.9, 32.6]    12.9                 5.6       22.1            65.2   23.9
  top-k        11.8 [ 7.4, 16.5]    35.1                15.0       23.2            72.8
  nothing      66.3 [55.7, 76.6]     0.0                 0.0        0.0            27.2
  student minus top-k: +34.4 [+21.4, +46.8] (mean of steps), -0.9 [-10.0, +8.6] (micro F1), stop
  -12.0 [-27.1, +3.5].
  T over sentences (cirag.units=sentence), 40 random trajectories of 2WikiMultihopQA's dev_tune, 72
  steps (--config.data.dir=2wikimultihopqa --config.encoder.model=shipped:aligner
  --config.retriever.units=sentence --config.base.run=false; 2026-11-25, commit 14c1657; 5 min 33
  s): core F1 of top-k 53.9, of the aligner 69.0; recall of the next query 88.5 (question with the
  three best), 61.5 (aligner), 82.7 (teacher).
  The same over 97 questions of dev_report, 196 steps (2026-11-25, commit 7ffffe9; 16 min, two
  thirds of it for the base): core F1 of the student over sentences 72.2 (shipped:integrator, commit
  993d767: 72.3), base 34.9, top-k 52.1, aligner 71.9. More in experiments/RESULTS.md.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, retrievers
from configs.methods import blocks


def get_config() -> Any:
    config: Any = ConfigDict()
    config.component = "integrator"  # Selects the evaluation; do not change.
    config.seed = 0  # Seed for sampling and resampling.
    # A training workdir, a PEFT folder or shipped:NAME.
    config.checkpoint = placeholder(str)
    config.trajectories = placeholder(str)  # A workdir of launch/distill.py.
    # Trajectories to use, as in configs/integrator.py: all | parsed | correct_only
    config.keep = "all"
    config.limit = 0  # Trajectories to evaluate, drawn at random; 0 is all.
    # Dataset whose annotations give the gold decisions for trajectories of a language model. The
    # decisions of the annotation teacher are themselves gold.
    config.data = common.data(split="")

    config.integrator = blocks.role(max_tokens=384)
    # Prompt settings as in configs/methods/cirag.py; null is the setting of the checkpoint, or else
    # of the trajectories.
    config.normalization = placeholder(str)  # Normalization of texts: ascii | unicode
    config.prompt_format = placeholder(str)  # Prompt format: multi_turn | paper | compact
    config.few_shot = placeholder(bool)  # Start the prompt with the worked example.
    config.prefilled_headers = False  # Prompt the student section by section.
    config.match_cutoff = 0.8  # See configs/methods/cirag.py.
    # The aligner's threshold, as in configs/methods/cirag.py; chosen on dev_tune. The aligner is
    # the ranker of the trajectories, so collect these with --config.encoder.model=ALIGNER.
    config.stop_below = -1.0
    config.base = ConfigDict()
    config.base.run = True  # Also evaluate the model without the checkpoint.
    config.base.prefilled_headers = True  # Prompt the base model section by section.
    config.base.few_shot = placeholder(bool)
    config.base.few_shot = True  # Show the base model the example; null is as for the student.

    config.query_cosine = True  # Also compare next queries by cosine of their embeddings.
    # K for the passage recall of next queries, which needs config.data.dir; 0 disables it.
    config.query_recall = 5
    config.retriever = retrievers.retriever()
    config.encoder = retrievers.encoder()
    config.bootstrap_samples = 10_000  # Bootstrap resamples for confidence intervals.
    config.in_flight = 256  # Steps processed concurrently.
    common.resumable(config)
    return config
