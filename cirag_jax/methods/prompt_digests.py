"""Hashes of prompts, to check that a trained model is used with the prompts of its training."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.methods.cirag import prompts as cirag
from cirag_jax.methods.common import extraction_prompts, own_prompts, reading_prompts
from cirag_jax.methods.registry import find_method


def prompt_digest(fields: Mapping[str, Any]) -> str:
    """Returns the hash of a component's prompts.

    Args:
      fields: the settings that change the prompts of the integrator or the reader; empty for the
        extractor; for roles trained on examples, ``method``, ``roles`` and ``settings``.
    """
    if "method" in fields:
        return _of_roles(fields["method"], fields["roles"], fields["settings"])
    if "reader_format" in fields:
        return reading_prompts.prompt_digest(**fields)
    return cirag.prompt_digest(**fields) if fields else extraction_prompts.prompt_hash()


def _of_roles(method: str, roles: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Returns the hash of the prompts of roles; empty if the method lacks one of the settings."""
    found = find_method(method)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    try:
        config = found.config(**values)
    except (TypeError, UserError):
        return ""
    prompts = {
        name: [entry.system, [turn.text for turn in entry.examples], entry.prompt.fields]
        for name, entry in own_prompts.rendered(lambda: found.render(config)).items()
        if name.partition(".")[0] in roles
    }
    return hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest()
