r"""Trains a student for any role of a method, on a teacher's conversations (docs/distillation.md).

    python launch/train.py --config=configs/role.py[:preset] --config.conversations=E \
        --config.role=reasoner --workdir=W

Needs conversations: E is a workdir of launch/distill.py with a method's config, an examples.jsonl,
or a tuple of them. Writes checkpoints and metrics to W; run the same command to resume.

Presets: ``quick`` (the default) trains SmolLM2-135M on 2 CPU cores, on at most 300,000 tokens.
``dualrag_ft`` trains all parameters of Qwen2.5-7B-Instruct with DualRAG's learning rate, schedule
and mixture of three roles (section 3.2, Appendix B), on 16 GPUs. Neither has been run.
"""

from typing import Any

from ml_collections.config_dict import placeholder

from configs import common, integrator


def get_config(preset: str = "quick") -> Any:
    return common.from_preset(preset, quick, dualrag_ft)


def base() -> Any:
    """Returns the values that all presets share."""
    config = integrator.trainer("role")
    config.conversations = placeholder(object)  # A workdir or .jsonl file, or a tuple of them.
    # Relative number of examples drawn from each entry of conversations, such as (2,1); null draws
    # every example equally often. The length of an epoch stays the same.
    config.weights = placeholder(object)
    # Role to train, or a tuple of roles that one student learns: "('reasoner','summarizer')".
    config.role = placeholder(object)
    config.num_examples = 0  # Training examples, drawn at random; 0 is all.
    config.dev = placeholder(object)  # Dev examples, instead of dev_fraction.
    return config


def quick() -> Any:
    """SmolLM2-135M on 2 CPU cores."""
    config = base()
    config.max_tokens = 300_000
    return config


def dualrag_ft() -> Any:
    """DualRAG-FT on 16 GPUs: all parameters of Qwen2.5-7B-Instruct; not yet run."""
    config = base()
    config.role = ("reasoner", "entity_identifier", "summarizer")
    config.full_parameters = True
    config.model.spec = "Qwen/Qwen2.5-7B-Instruct"
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.optimizer.learning_rate = 3e-6
    config.mesh.fsdp = 16
    # The paper states neither epochs nor batch size; these are usual values for such a mixture.
    config.num_epochs, config.batch_size = 3.0, 64
    config.length = 4096
    # Fused attention on GPUs supports no packed rows.
    config.packing = False
    config.buckets = (512, 768, 1024, 1536, 2048, 3072)
    config.num_dev, config.eval_every = 100, 200
    return config
