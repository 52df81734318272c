"""Hashes of how the prompts read: what a model was trained on, it must be asked."""

from collections.abc import Mapping
from typing import Any

from cirag_jax.prompts import cirag, extraction, reading


def prompt_digest(described: Mapping[str, Any]) -> str:
    """The hash of a component's prompts.

    Args:
      described: how they are rendered: the fields of the integrator's prompt, or of the reader's;
        the extractor's has none.
    """
    if "reader_format" in described:
        return reading.prompt_digest(**described)
    return cirag.prompt_digest(**described) if described else extraction.prompt_hash()
