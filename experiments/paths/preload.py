"""Imports what commands import; `processes` forks commands from a process with this module."""

import importlib
import pathlib

import openai  # noqa: F401
from transformers import PreTrainedTokenizerFast  # noqa: F401

import cirag_jax

_PACKAGE = pathlib.Path(cirag_jax.__file__).parent
# Programs, and what imports torch.
_LEFT_OUT = ("__main__", "transformers_backend")

for _path in sorted(_PACKAGE.rglob("*.py")):
    if _path.stem not in _LEFT_OUT:
        _parts = _path.relative_to(_PACKAGE.parent).with_suffix("").parts
        importlib.import_module(".".join(_parts))
