"""Hashes of how the prompts read: what a model was trained on, it must be asked."""

from collections.abc import Mapping
from typing import Any

from cirag_jax.methods.cirag import prompts as cirag
from cirag_jax.methods.common import extraction_prompts, reading_prompts


def prompt_digest(described: Mapping[str, Any]) -> str:
    """The hash of a component's prompts.

    Args:
      described: how they are rendered: the fields of the integrator's prompt, or of the reader's;
        the extractor's has none.
    """
    if "reader_format" in described:
        return reading_prompts.prompt_digest(**described)
    return cirag.prompt_digest(**described) if described else extraction_prompts.prompt_hash()
