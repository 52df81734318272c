"""Trains a small model to extract entities and triples as the references of a dataset list them.

    python launch/train.py --config=configs/extractor.py[:preset] --config.data.dir=FOLDER \
        --workdir=W

FOLDER is a dataset folder with an openie.jsonl. Trained on are the passages in the contexts of the
questions of ``config.data.fold``, without those that also stand in a context of another fold.

Presets: ``quick`` (SmolLM2-135M, at most 300,000 tokens, 2 CPU cores; the default) and ``paper``
(Qwen2.5-7B-Instruct on 4 GPUs with the integrator's hyper-parameters; the paper distils no
extractor; not yet run).

Record (``quick``, --config.data.dir=musique; 2026-11-23, both cores of an Intel Xeon virtual
machine, jax 0.10.2, commit 6e1523a): 917 of 2,200 examples (0.42 epochs of 1,100 passages) in 148
steps, 299,024 tokens, rows 99 % full; dev loss (tune) 0.72 -> 0.36; 54 min 27 s, of which it stood
still for about 6 while something else was measured. On one core of another machine, tests beside
it, 80 min (2026-11-22) and the same figures. With --config.lora.rank=7 --config.lora.alpha=14
(2026-11-25, two cores of an AMD EPYC, half of the time beside another training, commit 82d86f7):
1,085 passages without those in contexts of another fold, 299,351 tokens, dev loss
0.77 -> 0.37; 53 min: cirag_jax/shipped/extractor.
"""

from typing import Any

from ml_collections.config_dict import placeholder

from configs import common, integrator


def get_config(preset: str = "quick") -> Any:
    """The config of a preset."""
    presets = {"quick": quick, "paper": paper}
    if preset not in presets:
        raise common.no_preset(preset, presets)
    return presets[preset]()


def base() -> Any:
    """What both presets share."""
    config = integrator.trainer("extractor")
    config.data = common.data(split="")
    config.data.fold = "train"
    config.num_passages = 0  # So many passages, drawn by the seed; 0: all.
    # Passages of this fold choose the checkpoint, at most num_dev; null: dev_fraction of those of
    # config.data.fold, which are then not trained on.
    config.dev = placeholder(str)
    config.dev = "tune"
    return config


def quick() -> Any:
    """SmolLM2-135M on two CPU cores."""
    config = base()
    config.max_tokens = 300_000
    return config


def paper() -> Any:
    """Qwen2.5-7B-Instruct on four GPUs: not yet run."""
    config = base()
    like = integrator.paper()
    for name in (
        *("model", "lora", "optimizer", "packing", "batch_size", "rows_per_device"),
        *("num_dev", "eval_every"),
    ):
        config[name] = like[name]
    config.length = 2048
    config.buckets = (384, 512, 640, 768, 896, 1024, 1280, 1536)
    return config
