"""Hashes of prompts, to check that a trained model is used with the prompts of its training."""

from collections.abc import Mapping
from typing import Any

from cirag_jax.methods.cirag import prompts as cirag
from cirag_jax.methods.common import extraction_prompts, reading_prompts


def prompt_digest(fields: Mapping[str, Any]) -> str:
    """Returns the hash of a component's prompts.

    Args:
      fields: the settings that change the prompts of the integrator or the reader; empty for the
        extractor.
    """
    if "reader_format" in fields:
        return reading_prompts.prompt_digest(**fields)
    return cirag.prompt_digest(**fields) if fields else extraction_prompts.prompt_hash()
