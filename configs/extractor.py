"""Trains a small model to extract entities and triples (docs/students.md).

    python launch/train.py --config=configs/extractor.py[:preset] --config.data.dir=DATA --workdir=W

Needs a dataset folder with an openie.jsonl, whose entities and triples are the references. Trains
on the passages of the questions in ``config.data.fold``, except those that also occur in another
fold. Writes checkpoints and metrics to W; run the same command to resume.

Presets: ``quick`` (the default) trains SmolLM2-135M on 2 CPU cores, on at most 300,000 tokens.
``paper`` trains Qwen2.5-7B-Instruct on 4 GPUs with the integrator's hyper-parameters (CIRAG has no
trained extractor); not yet run.

Record of ``quick`` (--config.data.dir=musique; 2026-11-23, 2 cores of an Intel Xeon, jax 0.10.2,
commit 6e1523a): 917 of 2,200 examples (0.42 epochs of 1,100 passages), 148 steps, 299,024 tokens,
rows 99 % full; dev loss 0.72 -> 0.36 (fold tune); 54 min 27 s, of which about 6 min were paused. On
one core of another machine (2026-11-22): the same losses in 80 min.

Record of cirag_jax/shipped/extractor (--config.lora.rank=7 --config.lora.alpha=14; 2026-11-25, 2
CPU cores of an AMD EPYC, commit 82d86f7): 1,085 passages, without those shared with another fold,
299,351 tokens; dev loss 0.77 -> 0.37; 53 min, half of it alongside another training run.
"""

from typing import Any

from ml_collections.config_dict import placeholder

from configs import common, integrator


def get_config(preset: str = "quick") -> Any:
    return common.from_preset(preset, quick, paper)


def base() -> Any:
    """Returns the values that both presets share."""
    config = integrator.trainer("extractor")
    config.data = common.data(split="")
    config.data.fold = "train"
    config.num_passages = 0  # Passages to train on, drawn at random; 0 is all.
    # Fold with the passages that choose the checkpoint, at most num_dev; null holds out
    # dev_fraction of the training passages instead.
    config.dev = placeholder(str)
    config.dev = "tune"
    return config


def quick() -> Any:
    """SmolLM2-135M on 2 CPU cores."""
    config = base()
    config.max_tokens = 300_000
    return config


def paper() -> Any:
    """Qwen2.5-7B-Instruct on 4 GPUs; not yet run."""
    config = base()
    integrator.copy_paper(config, "num_dev", "eval_every")
    config.length = 2048
    config.buckets = (384, 512, 640, 768, 896, 1024, 1280, 1536)
    return config
