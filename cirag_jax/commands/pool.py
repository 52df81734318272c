"""What runs share: data, encoders, indexes, rankers and language models that are opened once.

A thing is known by what decides it: its block of the config, and of an index the passages, too. So
methods that ask for the same get the same, and one that asks for another gets its own.
"""

import collections
import contextlib
import ctypes
import json
from collections.abc import Callable
from typing import Any, TypeVar

from cirag_jax.commands import backends
from cirag_jax.llm.types import Backend, Usage
from cirag_jax.retrieval.encoders import RememberingEncoder, open_encoder_for
from cirag_jax.types import Config

T = TypeVar("T")

# What an engine may have its own of over shared weights (`Engine.with_options`).
_SIZES = ("batch_size", "context", "overflow", "prefix_tokens", "no_repeat_ngram_size")


class Pool:
    """Opened things by kind and by what decides them; a context that closes them.

    Attributes:
      opened: how many of each kind were opened.
    """

    def __init__(self):
        self.opened: collections.Counter[str] = collections.Counter()
        self._stack = contextlib.ExitStack()
        self._open: dict[tuple[str, str], Any] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, kind: str, decided_by: Any, open_it: Callable[[], T]) -> T:
        """What ``open_it`` gives the first time that this is asked for.

        Args:
          kind: of the thing, counted in `opened`.
          decided_by: JSON; equal for equal things of this kind.
          open_it: opens it; what it returns is closed with the pool, if it can be closed.
        """
        key = kind, json.dumps(decided_by, sort_keys=True, default=str)
        if key not in self._open:
            found: Any = open_it()
            if hasattr(found, "close"):
                self._stack.enter_context(contextlib.closing(found))
            self._open[key] = found
            self.opened[kind] += 1
        return self._open[key]

    def encoder(self, config: Config) -> RememberingEncoder:
        """The encoder of a ``configs.retrievers.encoder()`` block."""
        return self.get(
            "encoders", config.to_dict(), lambda: RememberingEncoder(open_encoder_for(config))
        )

    def language_model(self, config: Config, spent: Usage) -> Backend:
        """The backend of a ``configs.common.language_model()`` block.

        Engines share weights where they differ in batch, context or overflow alone. Backends with a
        budget are not shared: it is a run's own.

        Args:
          config: the block.
          spent: what counts against its budget already.
        """

        def open_it() -> Backend:
            return backends.open_backend(config, spent=spent)

        block = {**config.to_dict(), "model": backends.model_name(config)}
        block.pop("max_tokens", None)
        if config.backend == "jax":
            weights = {name: value for name, value in block.items() if name not in _SIZES}
            engine: Any = self.get("language models", weights, open_it)
            options = backends.engine_options(config)
            return self.get("engines", block, lambda: engine.with_options(options))
        if config.budget_tokens is not None:
            return self._stack.enter_context(contextlib.closing(open_it()))
        return self.get("language models", block, open_it)

    def encoders(self) -> list[RememberingEncoder]:
        """Those that are open."""
        return [found for (kind, _), found in self._open.items() if kind == "encoders"]

    def forget(self) -> None:
        """Drops what encoders and engines remember of earlier texts; all stays open."""
        for (kind, _), found in self._open.items():
            if kind in ("encoders", "engines"):
                found.forget()

    def release(self) -> None:
        """Frees what engines keep of earlier prompts: gigabytes, which serve one method alone."""
        for (kind, _), found in self._open.items():
            if kind == "engines":
                found.release()
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Gives the system what was freed; glibc keeps it, gigabytes after the first large array."""
    with contextlib.suppress(OSError, AttributeError):  # Another C library has no such call.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
