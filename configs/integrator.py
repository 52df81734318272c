r"""Trains a LoRA student on a teacher's integration decisions (CIRAG, sections 3.5 and B.4).

    python launch/train.py --config=configs/integrator.py[:preset] --config.trajectories=T \
        --workdir=W

Needs trajectories: T is a workdir of launch/distill.py, a .jsonl file, or a tuple of them. Writes
checkpoints and metrics to W; run the same command to resume.

Presets: ``quick`` (the default) trains SmolLM2-135M on 2 CPU cores, on at most 270,000 tokens.
``paper`` trains Qwen2.5-7B-Instruct on 4 GPUs with B.4's rank, epochs, batch and learning rate;
``llama3_8b`` does so with Llama-3-8B-Instruct; ``qlora`` stores the base in 4 bits, for one GPU
with 24 GB (16.4 GiB according to launch/plan.py). None has been run.

configs/integrator_eval.py evaluates the students below.

Record of ``quick`` (2026-11-22, CPU, jax 0.10.2; T by configs/trajectories.py). T has MuSiQue's 60
training trajectories and those in the table; 162 of the first row's 170 are used for training:
  added to T                   commit   steps  tokens   epochs  rows full  dev loss      time
  110 of 2Wiki, rounds >= 2    9604270  130    258,618  2.00    97 %       1.18 -> 0.15  44 min 33 s
  none                         a09a180   80    135,848  2.00    83 %       1.42 -> 0.34  48 min 26 s
  120 built-in                 7148867  105    198,250  1.28    92 %       1.30 -> 0.24  66 min 36 s
  150 of 2Wiki, half 1 round   a09a180   99    199,217  1.56    98 %       1.27 -> 0.23  67 min 48 s
The first run used 2 cores (74 min on one core), the others one core and at most 200,000 tokens. The
first student's loss is 1.87 -> 0.25 for rationales, 0.34 -> 0.02 for facts and 1.16 -> 0.18 for
questions. On 22 dev steps it has core F1 71.2 and next query F1 41.7; 77.3 % of its stop decisions
are right, and 90.9 % of its responses are well-formed. The second student keeps nothing; the last
two stop too early.

Record of students over sentences (T made with cirag.units=sentence, see configs/trajectories.py;
2026-11-25, 2 CPU cores of an AMD EPYC, commits 7ffffe9 and 4d7cf88), with --config.lora.rank=8
--config.lora.alpha=16 --config.length=2560 --config.max_tokens=0 --config.shuffled=0.5
--config.optimizer.learning_rate=4e-4; experiments/RESULTS.md has their evaluation:
  1. --config.lora.start=shipped:reader --config.num_steps=200, T = 494 trajectories: stopped at
     step 119. The checkpoint of step 100 has dev loss 0.241, core F1 80.6, query F1 75.0 and stops
     91.7 on 12 dev steps; 20 min.
  2. cirag_jax/shipped/integrator: from 1 with --config.num_steps=70, T = the 291 with at least two
     rounds: dev loss 0.244 -> 0.132; 14 min. Run 1 may have trained on most dev questions of
     this run, so 0.132 is not a held-out loss.
  3. Over triples, from 1 with --config.prompt_format=compact --config.num_steps=45, T = MuSiQue's
     60: dev loss 1.67 -> 1.21 (not held out either), the lowest at step 20; 7 min.
  4. From 2, 24 steps with another label, weight, format or teacher in each run: no student beats
     keeping the three best candidates.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "quick") -> Any:
    return common.from_preset(preset, quick, paper, llama3_8b, qlora)


def trainer(component: str) -> Any:
    """Returns the fields of every adapter's trainer, with the values of ``quick``."""
    config: Any = ConfigDict()
    config.component = component  # Selects the trainer; do not change.
    config.seed = 0  # Seed for the order of examples, sampling and dropout.
    # Share of the questions (or passages) held out to choose the checkpoint: the last of a seeded
    # permutation.
    config.dev_fraction = 0.05
    config.num_dev = 24  # Maximum held-out questions or passages; 0 is no limit.

    config.model = ConfigDict()
    config.model.spec = placeholder(str)  # Base model, like config.<role>.model; null is SmolLM2.
    config.model.dtype = placeholder(
        str
    )  # float32 | bfloat16; null is float32 on a CPU, else bfloat16.
    # nf4: store the base in 4 bits (QLoRA), which takes a quarter of the memory of bfloat16.
    config.model.quantization = placeholder(str)
    config.model.remat = "projections"  # Recomputed activations: off | projections | full
    # Train all parameters, embeddings and output layer included, instead of an adapter.
    config.full_parameters = False
    config.lora = ConfigDict()
    config.lora.rank = 16  # Rank of the LoRA matrices.
    config.lora.alpha = 32.0  # The adapter's output is scaled by alpha / rank.
    config.lora.dropout = 0.05  # Dropout rate of the adapter's input.
    config.lora.targets = ("all-linear",)  # all-linear, or names of linear layers such as q_proj.
    config.lora.rank_stabilised = False  # Scale by alpha / sqrt(rank), not alpha / rank.
    # Adapter to start from, of any role: a workdir or PEFT folder; null is a new adapter.
    config.lora.start = placeholder(str)

    config.length = 2048  # Maximum tokens of a row, and thus of an example.
    config.packing = True  # Pack several examples into a row.
    config.buckets = (512, 768, 1024, 1280, 1536, 1792)  # Padded row lengths below `length`.
    config.batch_size = 1  # Rows per step, over all devices.
    config.rows_per_device = 1  # Rows per forward pass; gradients are accumulated.
    config.chunk = 512  # Tokens whose logits a device stores at once.

    config.num_epochs = 2.0  # Epochs over all examples.
    config.max_tokens = 0  # Maximum tokens to train on, prompts included; 0 is no limit.
    config.optimizer = common.optimizer(1e-3, "cosine", warmup_ratio=0.03)
    common.training_loop(config, eval_every=40)
    # Chooses the best checkpoint: dev/loss, or a part such as dev/loss_facts; in configs/grpo.py,
    # dev/reward, dev/em, dev/f1, or a reward such as dev/recall.
    config.best_metric = "dev/loss"
    return config


def base() -> Any:
    """Returns the values that all presets share."""
    config = trainer("integrator")
    config.trajectories = placeholder(object)  # A workdir or .jsonl file, or a tuple of them.
    # Relative number of examples drawn from each entry of trajectories, such as (2,1); null draws
    # every example equally often. The length of an epoch stays the same.
    config.weights = placeholder(object)
    # Loss weights of tokens that name kept candidates, and of tokens that state that nothing is
    # missing; a token of a next query has weight 1.
    config.kept_weight = config.stop_weight = 1.0
    # Share of trajectories with shuffled candidates, so that their numbers carry no information.
    config.shuffled = 0.0
    config.keep = "parsed"  # Trajectories to use: all | parsed (well-formed) | correct_only
    config.num_trajectories = 0  # Trajectories to draw at random; 0 is all (paper's Table 8).
    config.dev = placeholder(object)  # Dev trajectories, instead of dev_fraction.
    # Prompt settings as in configs/methods/cirag.py; the student must be used with the same ones.
    # null is the setting of the trajectories. The units are always those of the trajectories.
    config.normalization = placeholder(str)  # Normalization of texts: ascii | unicode
    config.prompt_format = placeholder(str)  # Prompt format: multi_turn | paper | compact
    config.few_shot = placeholder(bool)  # Start the prompt with the worked example.
    # A .toml file whose prompt [integrator] replaces this package's (docs/prompts.md); the student
    # must be used with the same one.
    config.prompt_file = placeholder(str)
    return config


def quick() -> Any:
    """SmolLM2-135M on 2 CPU cores."""
    config = base()
    config.max_tokens = 270_000
    return config


def paper() -> Any:
    """Qwen2.5-7B-Instruct on 4 GPUs with 80 GB, two trajectories each (B.4); not yet run."""
    config = base()
    config.model.spec = "Qwen/Qwen2.5-7B-Instruct"
    config.model.dtype = "bfloat16"
    config.lora.rank = 64
    config.lora.alpha = 128.0
    config.length = 8192
    # One trajectory per row, as in B.4's batch of 2. Fused attention on GPUs supports no segments.
    config.packing = False
    config.buckets = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168)
    config.batch_size = 8
    # Two full rows with the stored outputs of their projections would not fit. `remat=full` stores
    # less and computes more.
    config.rows_per_device = 1
    config.optimizer.learning_rate = 2e-4
    config.num_dev = 100
    config.eval_every = 100
    return config


def llama3_8b() -> Any:
    """Llama-3-8B-Instruct, otherwise like ``paper``; not yet run."""
    config = paper()
    config.model.spec = "meta-llama/Meta-Llama-3-8B-Instruct"
    return config


def qlora() -> Any:
    """``paper`` on one GPU with 24 GB, with the base in 4 bits; not yet run."""
    config = paper()
    config.model.quantization = "nf4"
    config.model.remat = "full"
    return config


def copy_paper(config: Any, *more: str) -> None:
    """Copies the model, LoRA, optimizer and batch of ``paper``, and more fields, to ``config``."""
    values = paper()
    for name in ("model", "lora", "optimizer", "packing", "batch_size", "rows_per_device", *more):
        config[name] = values[name]
