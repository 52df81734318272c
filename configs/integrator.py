r"""Trains a LoRA student on a teacher's integration decisions (CIRAG, sections 3.5 and B.4).

    python launch/train.py --config=configs/integrator.py[:preset] --config.trajectories=T \
        --workdir=W

T is a workdir of launch/distill.py, a .jsonl file of trajectories, or several: "('T1', 'T2')".

Presets: ``quick`` (SmolLM2-135M, at most 270,000 tokens, 2 CPU cores; the default), ``paper``
(Qwen2.5-7B-Instruct on 4 GPUs: B.4's rank, epochs, batch and learning rate, what it leaves open as
our specification recommends; not yet run), ``llama3_8b`` (the same with Llama-3-8B-Instruct; not
yet run).

Record (``quick``; 2026-11-22, two CPU cores, jax 0.10.2, commit 9604270): T = 60 trajectories of
MuSiQue's training fold and 110 of two rounds and more of 2WikiMultihopQA's training questions
(configs/trajectories.py), 162 trained on: 130 steps, 258,618 tokens, two epochs, rows 97 % full;
dev loss 1.18 -> 0.15 (rationale 1.87 -> 0.25, facts 0.34 -> 0.02, question 1.16 -> 0.18); on 22
dev steps core F1 71.2, next query F1 41.7, stops 77.3, parsed 90.9 per cent; 44 min 33 s, tests
beside it in what it left idle. An earlier run on another machine of this kind, one core, had the
same figures after 74 min. configs/integrator_eval.py has what the students are worth.
  Other T, before the adapter's dropout was made faster (200,000 tokens at most, one core):
  MuSiQue's 60 alone (commit a09a180): 80 steps, 135,848 tokens, two epochs, rows 83 % full; dev
loss 1.42 -> 0.34; 48 min 26 s. It learned to keep nothing.
  those 60 and 120 built-in (commit 7148867): 105 steps, 198,250 tokens, 1.28 epochs, rows 92 %
full; dev loss 1.30 -> 0.24; 66 min 36 s. It stops too early.
  those 60 and 150 of 2Wiki, half of them of one round (commit a09a180): 99 steps, 199,217 tokens,
1.56 epochs, rows 98 % full; dev loss 1.27 -> 0.23; 67 min 48 s. It stops too early, too.
  Students of sentences (T made with cirag.units=sentence, see configs/trajectories.py; 2026-11-25,
two cores of an AMD EPYC beside other work, commits 7ffffe9 and 4d7cf88), with --config.lora.rank=8
--config.lora.alpha=16 --config.length=2560 --config.max_tokens=0 --config.shuffled=0.5
--config.optimizer.learning_rate=4e-4:
  --config.lora.start=shipped:reader --config.num_steps=200, T = 494 trajectories: stopped at step
119; the checkpoint of step 100 has dev loss 0.241, core F1 80.6, query F1 75.0, stops 91.7 on 12
dev steps; 20 min. Then from that one, --config.num_steps=70 and T = the 291 of two rounds and more:
dev loss 0.244 -> 0.132; 14 min: cirag_jax/shipped/integrator. Its dev questions were held out anew:
what it started from may have been trained on most of them, and 0.132 says little of others. What
they are worth: experiments/RESULTS.md.
  Over triples, --config.trajectories=T --config.prompt_format=compact --config.num_steps=45, from
the first of these, T = MuSiQue's 60: dev loss 1.67 -> 1.21 (as before: that one may have been
trained on the dev questions), the best at step 20; 7 min.
From the second, 24 steps: labels, weights, format and teacher, each by itself; no student is ahead
of the three best candidates (experiments/RESULTS.md).
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "quick") -> Any:
    """The config of a preset."""
    presets = {"quick": quick, "paper": paper, "llama3_8b": llama3_8b}
    if preset not in presets:
        raise common.no_preset(preset, presets)
    return presets[preset]()


def trainer(component: str) -> Any:
    """What every adapter's trainer has, with the values of ``quick``."""
    config: Any = ConfigDict()
    config.component = component  # What the command runs: leave it.
    config.seed = 0  # Of the order of the examples, of what is drawn, of dropout.
    # The last share of the questions (or passages) by a seeded permutation is not trained on and
    # chooses the checkpoint.
    config.dev_fraction = 0.05
    config.num_dev = 24  # At most so many of them; 0: no limit.

    config.model = ConfigDict()
    config.model.spec = placeholder(str)  # The base: as config.<role>.model; null: SmolLM2.
    config.model.dtype = placeholder(str)  # float32 | bfloat16; null: bfloat16 but on a CPU.
    config.model.remat = "projections"  # off | projections | full: what is computed again.
    config.lora = ConfigDict()
    config.lora.rank = 16  # Of the pairs of matrices.
    config.lora.alpha = 32.0  # What is learned counts alpha / rank.
    config.lora.dropout = 0.05  # Of what goes into the adapter.
    config.lora.targets = ("all-linear",)  # Or names of linear layers: q_proj, down_proj, ...
    config.lora.rank_stabilised = False  # alpha / sqrt(rank) instead.
    # A workdir or PEFT's folder to go on from, whatever it was trained for; null: afresh.
    config.lora.start = placeholder(str)

    config.length = 2048  # Most tokens of a packed row, and of an example.
    config.packing = True  # Several examples in a row; else one.
    config.buckets = (512, 768, 1024, 1280, 1536, 1792)  # Lengths of rows; `length` is the last.
    config.batch_size = 1  # Rows of a step, over all devices.
    config.rows_per_device = 1  # Rows at once; the rest of the batch is accumulated.
    config.chunk = 512  # Tokens whose logits each device has in memory together.

    config.num_epochs = 2.0  # Over all examples.
    config.num_steps = 0  # Above 0: instead of num_epochs.
    config.max_tokens = 0  # Above 0: at most so many tokens are seen, prompts included.
    config.optimizer = common.optimizer(1e-3, "cosine", warmup_ratio=0.03)

    config.mesh = common.mesh()
    config.eval_every = 40  # Steps.
    config.save_every = 0  # Beside the checkpoint of every evaluation.
    config.keep_checkpoints = 2  # The newest, and the best beside them.
    config.best_metric = "dev/loss"  # Or the loss of one part, dev/loss_facts for instance.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on. 0: never.
    config.profile_steps = placeholder(str)  # "10:20" traces these steps into W/profile.
    return config


def base() -> Any:
    """What all presets share."""
    config = trainer("integrator")
    config.trajectories = placeholder(object)  # A path, or a tuple of them.
    # Dataset folders ("demo": the built-in one) whose decomposed training questions teach to write
    # queries from known facts, without triples; config.data says how they are read. null: none.
    config.query_folders = placeholder(object)
    config.data = common.data(split="train")
    # How much a token counts that names what is kept, and one that says that nothing is missing; a
    # token of a next query counts 1, but there are more of them.
    config.kept_weight = config.stop_weight = 1.0
    # Share of the trajectories whose candidates are in random order: numbers then say nothing.
    config.shuffled = 0.0
    config.keep = "parsed"  # all | parsed (every step was well-formed) | correct_only
    config.num_trajectories = 0  # So many of them, drawn by the seed; 0: all (the paper's Table 8).
    config.dev = placeholder(object)  # Trajectories of other questions instead of dev_fraction.
    # How conversations are rendered, as in configs/methods/cirag.py, where the student must then be
    # asked alike; null: as they were made. Their units are those of the trajectories.
    config.normalization = placeholder(str)  # ascii | unicode
    config.prompt_format = placeholder(str)  # multi_turn | paper | compact
    config.few_shot = placeholder(bool)  # Whether the worked example stands in front.
    return config


def quick() -> Any:
    """SmolLM2-135M on two CPU cores."""
    config = base()
    config.max_tokens = 270_000
    return config


def paper() -> Any:
    """Qwen2.5-7B-Instruct on four GPUs, two trajectories each (B.4): not yet run."""
    config = base()
    config.model.spec = "Qwen/Qwen2.5-7B-Instruct"
    config.model.dtype = "bfloat16"
    # By count, not measured: what the projections give is 2.8 MB a token, 45 GB for two full rows;
    # recomputed, they leave 3 GB beside the base (15 GB).
    config.model.remat = "full"
    config.lora.rank = 64
    config.lora.alpha = 128.0
    config.length = 8192
    # One trajectory a row, as in B.4's batch of 2; the fused attention of GPUs knows no segments.
    config.packing = False
    config.buckets = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168)
    config.batch_size = 8
    config.rows_per_device = 2
    config.optimizer.learning_rate = 2e-4
    config.num_dev = 100
    config.eval_every = 100
    return config


def llama3_8b() -> Any:
    """Llama-3-8B-Instruct, otherwise as ``paper``: not yet run."""
    config = paper()
    config.model.spec = "meta-llama/Meta-Llama-3-8B-Instruct"
    return config
