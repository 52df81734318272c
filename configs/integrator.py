r"""Trains a LoRA student on a teacher's integration decisions (CIRAG, sections 3.5 and B.4).

    python launch/train.py --config=configs/integrator.py[:preset] --config.trajectories=T \
        --workdir=W

T is a workdir of launch/distill.py, a .jsonl file of trajectories, or several: "('T1', 'T2')".

Presets: ``quick`` (SmolLM2-135M, at most 200,000 tokens, 2 CPU cores; the default), ``paper``
(Qwen2.5-7B-Instruct on 4 GPUs: B.4's rank, epochs, batch and learning rate, what it leaves open as
our specification recommends; not yet run), ``llama3_8b`` (the same with Llama-3-8B-Instruct; not
yet run).

Record (``quick``; 2026-11-22, one core of a two-core CPU machine beside other work, jax 0.10.2,
commit 7148867): T = 60 trajectories of MuSiQue's training fold and 120 embedded ones
(configs/trajectories.py, --config.data.limit=250 --config.limit=120), 171 trained on: 105 steps,
198,250 tokens, 1.28 epochs, rows 92 % full; dev loss 1.30 -> 0.24 (rationale 2.07 -> 0.38, facts
0.41 -> 0.05, question 1.23 -> 0.26); 66 min 36 s. On both cores, idle, its first steps take 19 s
each (105 tokens/s), which makes 35 minutes of the whole: not run so. configs/integrator_eval.py has
what the students are worth.
  T = the 60 of MuSiQue alone (commit a09a180, one core beside other work): 80 steps, 135,848
tokens, two epochs, rows 83 % full; dev loss 1.42 -> 0.34; 48 min 26 s. It learned to keep nothing.
  T = those 60 and 150 of 2Wiki (configs/trajectories.py; the same place): 99 steps, 199,217 tokens,
1.56 epochs, rows 98 % full; dev loss 1.27 -> 0.23, dev core F1 63.1 per cent; 67 min 48 s.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "quick") -> Any:
    """The config of a preset."""
    presets = {"quick": quick, "paper": paper, "llama3_8b": llama3_8b}
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}; presets: {', '.join(presets)}")
    return presets[preset]()


def trainer(component: str) -> Any:
    """What every adapter's trainer has, with the values of ``quick``."""
    config: Any = ConfigDict()
    config.component = component
    config.seed = 0
    # The last share of the questions (or passages) by a seeded permutation is not trained on and
    # chooses the checkpoint.
    config.dev_fraction = 0.05
    config.num_dev = 24  # At most so many of them; 0: no limit.

    config.model = ConfigDict()
    config.model.spec = placeholder(str)  # The base: as config.<role>.model; null: SmolLM2.
    config.model.dtype = placeholder(str)  # float32 | bfloat16; null: bfloat16 but on a CPU.
    config.model.remat = "projections"  # off | projections | full: what is computed again.
    config.lora = ConfigDict()
    config.lora.rank = 16
    config.lora.alpha = 32.0
    config.lora.dropout = 0.05
    config.lora.targets = ("all-linear",)
    config.lora.rank_stabilised = False

    config.length = 2048  # Tokens of a packed row, and most tokens of an example.
    config.packing = True  # Several examples in a row; else one, padded to a bucket.
    config.buckets = (512, 768, 1024, 1280, 1536, 1792)  # Without packing; `length` is the last.
    config.batch_size = 1  # Rows of a step, over all devices.
    config.rows_per_device = 1  # Of them at once; the rest is accumulated.
    config.chunk = 512  # Tokens whose logits are in memory together.

    config.num_epochs = 2.0
    config.num_steps = 0  # Above 0: instead of num_epochs.
    config.max_tokens = 0  # Above 0: at most so many tokens are seen, prompts included.
    config.optimizer = common.optimizer(1e-3, "cosine", warmup_ratio=0.03)

    # Dev trajectories whose decisions are decoded at every evaluation (core F1, stops, ...), by an
    # engine with its own copy of the base; 0: none. An extractor has none.
    config.decode = ConfigDict()
    config.decode.num_trajectories = 0
    config.decode.max_tokens = 384

    config.mesh = common.mesh()
    config.eval_every = 40
    config.save_every = 0  # Beside the checkpoint of every evaluation.
    config.keep_checkpoints = 2
    config.best_metric = "dev/loss"  # The lower the better.
    config.stop_after_minutes = 0.0
    return config


def base() -> Any:
    """What all presets share."""
    config = trainer("integrator")
    config.trajectories = placeholder(object)  # A path, or a tuple of them.
    config.keep = "parsed"  # all | parsed (every step was well-formed) | correct_only
    config.num_trajectories = 0  # So many of them, drawn by the seed; 0: all (the paper's Table 8).
    config.dev = placeholder(object)  # Trajectories of other questions instead of dev_fraction.
    # How conversations are rendered, as in configs/methods/cirag.py; null: as they were made.
    config.form = placeholder(str)  # ascii | unicode
    config.rendering = placeholder(str)  # multi_turn | paper
    config.example = placeholder(bool)  # Whether the worked example stands in front.
    return config


def quick() -> Any:
    """SmolLM2-135M on two CPU cores."""
    config = base()
    config.max_tokens = 200_000
    config.decode.num_trajectories = 8
    return config


def paper() -> Any:
    """Qwen2.5-7B-Instruct on four GPUs, two trajectories each (B.4): not yet run."""
    config = base()
    config.model.spec = "Qwen/Qwen2.5-7B-Instruct"
    config.model.dtype = "bfloat16"
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
    config.decode.num_trajectories = 50
    config.eval_every = 100
    return config


def llama3_8b() -> Any:
    """Llama-3-8B-Instruct, otherwise as ``paper``: not yet run."""
    config = paper()
    config.model.spec = "meta-llama/Meta-Llama-3-8B-Instruct"
    return config
