r"""Trains a role of a method by reinforcement, with GRPO (docs/reinforcement.md).

    python launch/train.py --config=configs/grpo.py[:preset] --config.data.dir=DATA --workdir=W

Needs questions with answers: a dataset folder, or none for the built-in dataset. Writes
checkpoints, metrics and the journals of all rollouts to W; run the same command to resume.

Presets for 2 CPU cores: ``quick`` (the default) is a short trial of ``reader``, which trains the
shipped reader of CIRAG; ``integrator`` trains CIRAG's shipped integrator, and ``agent``
SmolLM2-135M as a search agent with free thought (Search-R1's loop). ``paper`` has Search-R1's
settings of GRPO, for GPUs. None has been run to its end.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common
from configs.integrator import trainer


def get_config(preset: str = "quick") -> Any:
    return common.from_preset(preset, quick, reader, integrator, agent, paper)


def base() -> Any:
    """Returns the values that all presets share."""
    config = trainer("grpo")
    del config.batch_size  # A step has as many rows as its rollouts need.
    config.method = "cirag:small"  # METHOD or METHOD:PRESET, of configs/methods.
    config.role = "reader"  # The role whose model is trained; all others stay as they are.
    config.set = placeholder(object)  # Overrides of the method: "('KEY=VALUE', ...)".

    config.data = common.data("train")
    config.data.corpus = "per_question"
    config.profile = "musique"  # Answer scorer, from evaluation/answers.py.
    config.num_dev, config.dev_fraction = 100, 0.2

    # Weights of the rewards, which are summed.
    config.rewards = ConfigDict()
    config.rewards.em = 0.0  # Whether the answer is exactly a gold answer.
    config.rewards.f1 = 1.0  # F1 of the answer's words.
    config.rewards.recall = 0.0  # Share of the gold passages that were retrieved.
    config.rewards.format = 0.0  # Whether all outputs of the run were well-formed.
    config.rewards.length = 0.0  # Minus the number of tokens that the role generated, in hundreds.
    config.rewards.searches = 0.0  # Minus the number of searches.

    config.questions_per_step = 8  # Questions whose rollouts have different rewards.
    config.group_size = 8  # Rollouts per question.
    config.max_draws = 2  # Draws of questions per step, to replace those with equal rewards.
    config.in_flight = 64  # Rollouts that run concurrently.
    config.keep_rollouts = 0  # Steps whose rollouts stay on the disk; 0 is all.

    # Divide advantages by the standard deviation of their group (GRPO), or not (Dr. GRPO).
    config.scale_advantages = True
    # The tokens' weights in the loss: token (DAPO) | sequence (GRPO) | constant (Dr. GRPO).
    config.normalize = "token"
    # Limits of the change of a token's probability per step, relative to the sampled one: below and
    # above 1 (DAPO's values).
    config.clip_low, config.clip_high = 0.2, 0.28
    config.num_updates = 1  # Optimizer steps on the rollouts of a step.
    config.kl = 0.0  # Weight of the divergence from the reference model.
    config.kl_on = "all"  # Rollouts with this divergence: all | wrong (DGPO)
    # Reference model, with the same vocabulary (DGPO); null is the model that training starts from.
    config.teacher = placeholder(str)
    # Stop after so many consecutive steps in which the rewards of every question were equal.
    config.max_saturated_steps = 10

    config.lora.dropout = 0.0  # Dropout would change probabilities after sampling.
    config.num_steps, config.num_epochs, config.max_tokens = 100, 0.0, 0
    config.optimizer = common.optimizer(1e-4, "constant", warmup_ratio=0.0)
    config.eval_every = 10
    config.best_metric = "dev/reward"
    return config


def quick() -> Any:
    """A short trial of ``reader``."""
    config = reader()
    config.num_steps, config.eval_every, config.num_dev = 20, 10, 40
    config.questions_per_step, config.group_size = 4, 6
    return config


def reader() -> Any:
    """The shipped reader of CIRAG, from the sentences that the shipped aligner finds."""
    config = base()
    config.length = 1024
    config.buckets = (512, 768)
    return config


def integrator() -> Any:
    """The shipped integrator, which keeps sentences and writes the next query."""
    config = reader()
    config.role = "integrator"
    config.set = ("cirag.integrator=model", "integrator.adapter=shipped:integrator")
    config.length = 2560
    config.buckets = (1024, 1536, 2048)
    return config


def agent() -> Any:
    """SmolLM2-135M as a search agent; the reward for format teaches the tags first."""
    config = reader()
    config.method, config.role = "search_r1:small", "agent"
    config.rewards.format = 0.2
    config.length = 2048
    config.buckets = (1024, 1536)
    return config


def paper() -> Any:
    """Search-R1's GRPO: Qwen2.5-3B, 512 questions with 5 rollouts each; on 8 GPUs, not yet run."""
    config = base()
    config.method, config.role = "search_r1:paper", "agent"
    config.model.spec, config.model.dtype = "Qwen/Qwen2.5-3B", "bfloat16"
    config.model.remat = "full"
    config.data.corpus = "ircot_full"
    config.rewards.em, config.rewards.f1 = 1.0, 0.0
    config.questions_per_step, config.group_size, config.in_flight = 512, 5, 1024
    config.kl, config.num_steps = 0.001, 500
    config.clip_high, config.normalize = 0.2, "sequence"
    config.lora.rank, config.lora.alpha = 64, 128.0
    config.length, config.packing = 4096, False
    config.buckets = (1024, 2048, 3072)
    config.optimizer.learning_rate = 1e-5
    config.keep_rollouts = 50
    return config
