"""Multi-hop question answering with knowledge triples, trained in JAX."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cirag_jax.commands.retriever import Result, Retriever
    from cirag_jax.commands.session import Answer, Cirag
    from cirag_jax.evaluation.runs import evaluate_retrieval

__all__ = ["Answer", "Cirag", "Result", "Retriever", "evaluate_retrieval"]


def _is_relevant(record: logging.LogRecord) -> bool:
    """Returns False for transformers' warning that PyTorch is missing; JAX does not need it."""
    return not record.getMessage().startswith("PyTorch was not found")


logging.getLogger("transformers").addFilter(_is_relevant)


def __getattr__(name: str) -> Any:
    """Imports the API on first access, because its classes import JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "evaluate_retrieval":
        from cirag_jax.evaluation.runs import evaluate_retrieval

        return evaluate_retrieval
    from cirag_jax.commands import retriever, session

    return getattr(session if hasattr(session, name) else retriever, name)
