"""Exports what was trained: an aligner or a cross-encoder for sentence-transformers, the adapter of
an integrator, extractor or reader for PEFT.

python launch/export.py --config.checkpoint=W --workdir=W3    # leaves W3/model
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> Any:
    """``config.checkpoint``: a training workdir; its best checkpoint is exported."""
    config: Any = ConfigDict()
    config.checkpoint = placeholder(str)  # A training workdir, of which the best is exported.
    config.merge = False  # Add the adapter to its base: a model for plain transformers.
    # Of the tensors of an adapter or a merged model: float32 | bfloat16. null: an adapter's are
    # float32, a merged model's as its base's.
    config.dtype = placeholder(str)
    # An adapter that the checkpoint's training went on from (config.lora.start): what is written is
    # the mean of the two, of which the checkpoint has `share`.
    config.average_with = placeholder(str)
    config.share = placeholder(float)  # null: 0.5.
    config.rank = 0  # An aligner as an adapter of its base, of this rank; 0: the whole model.
    return config
