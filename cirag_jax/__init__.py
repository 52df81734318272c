"""Multi-hop question answering with knowledge triples, trained in JAX."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cirag_jax.commands.retriever import Result, Retriever
    from cirag_jax.commands.session import Answer, Cirag

__all__ = ["Answer", "Cirag", "Result", "Retriever"]


def _is_relevant(record: logging.LogRecord) -> bool:
    """Returns False for transformers' warning that PyTorch is missing; JAX does not need it."""
    return not record.getMessage().startswith("PyTorch was not found")


logging.getLogger("transformers").addFilter(_is_relevant)


def __getattr__(name: str) -> Any:
    """Imports the classes of the Python API, and with them JAX, on first access."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cirag_jax.commands import retriever, session

    return getattr(session if hasattr(session, name) else retriever, name)
