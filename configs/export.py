"""Exports a trained model: an aligner or a cross-encoder for sentence-transformers, or the adapter
of an integrator, extractor or reader for PEFT.

python launch/export.py --config.checkpoint=W --workdir=W3

Needs a training workdir W, whose best checkpoint is exported. Writes W3/model.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> Any:
    config: Any = ConfigDict()
    config.checkpoint = placeholder(str)  # A training workdir; its best checkpoint is exported.
    config.merge = False  # Add the adapter to its base, for plain transformers.
    # Type of the exported tensors: float32 | bfloat16. null is float32 for an adapter, and the
    # base model's type for a merged model.
    config.dtype = placeholder(str)
    # The adapter from which the checkpoint's training started (config.lora.start). The export is
    # the weighted mean of both; `share` is the checkpoint's weight.
    config.average_with = placeholder(str)
    config.share = placeholder(float)  # Weight of the checkpoint in the mean; null is 0.5.
    config.rank = 0  # Export an aligner as an adapter of this rank; 0 is the full model.
    # Repository on the Hugging Face hub (NAME or OWNER/NAME) to which to upload the export, with
    # the token of the environment variable HF_TOKEN; null uploads nothing.
    config.push_to = placeholder(str)
    config.private = True  # Create the repository as a private one.
    config.dry_run = False  # Only show what push_to would upload: files, sizes and card.
    return config
