"""A pool of encoders, indexes, rankers and language models that several runs share.

The key of a resource consists of its block of the config and, for an index, the passages. Methods
with equal keys share the resource.
"""

import collections
import contextlib
import ctypes
import json
from collections.abc import Callable
from typing import Any, TypeVar

from cirag_jax.commands import backends
from cirag_jax.llm.types import Backend, Usage
from cirag_jax.retrieval.encoders import MemoizingEncoder, open_encoder_for
from cirag_jax.types import Config

T = TypeVar("T")

# Options in which engines with shared weights may differ (`Engine.with_options`).
_OPTIONS = (
    *("batch_size", "context", "overflow", "prefix_tokens"),
    *("lookup_tokens", "no_repeat_ngram_size"),
)


class Pool:
    """Open resources, by kind and key; the end of a ``with`` block closes them.

    Attributes:
      opened: the number of resources opened, by kind.
    """

    def __init__(self):
        self.opened: collections.Counter[str] = collections.Counter()
        self._stack = contextlib.ExitStack()
        self._open: dict[tuple[str, str], Any] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, kind: str, key: Any, open_resource: Callable[[], T]) -> T:
        """Returns a resource, which is opened on first use and closed with the pool.

        Args:
          kind: for example "indexes".
          key: a JSON value that identifies the resource within its kind.
          open_resource: opens the resource.
        """
        entry = kind, json.dumps(key, sort_keys=True, default=str)
        if entry not in self._open:
            resource: Any = open_resource()
            if hasattr(resource, "close"):
                self._stack.enter_context(contextlib.closing(resource))
            self._open[entry] = resource
            self.opened[kind] += 1
        return self._open[entry]

    def encoder(self, config: Config) -> MemoizingEncoder:
        """Returns the encoder of a ``configs.retrievers.encoder()`` block."""
        return self.get(
            "encoders", config.to_dict(), lambda: MemoizingEncoder(open_encoder_for(config))
        )

    def language_model(self, config: Config, spent: Usage) -> Backend:
        """Returns the backend of a ``configs.common.language_model()`` block.

        Engines share weights if they differ only in batch size, context, overflow or similar
        options. Backends with a budget are not shared, because each run has a separate budget;
        ``spent`` counts against it.
        """

        def open_backend() -> Backend:
            return backends.open_backend(config, spent=spent)

        block = {**config.to_dict(), "model": backends.model_name(config)}
        block.pop("max_tokens", None)
        if config.backend == "jax":
            weights = {name: value for name, value in block.items() if name not in _OPTIONS}
            engine: Any = self.get("language models", weights, open_backend)
            options = backends.engine_options(config)
            return self.get("engines", block, lambda: engine.with_options(options))
        if config.budget_tokens is not None:
            return self._stack.enter_context(contextlib.closing(open_backend()))
        return self.get("language models", block, open_backend)

    def encoders(self) -> list[MemoizingEncoder]:
        """Returns the open encoders."""
        return [encoder for (kind, _), encoder in self._open.items() if kind == "encoders"]

    def forget(self) -> None:
        """Clears the caches of encoders and engines."""
        for (kind, _), resource in self._open.items():
            if kind in ("encoders", "engines"):
                resource.forget()

    def release(self) -> None:
        """Frees the engines' prompt caches, which take gigabytes and do not help other methods."""
        for (kind, _), resource in self._open.items():
            if kind == "engines":
                resource.release()
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Returns freed memory to the system; glibc may keep gigabytes after a large array."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has this function
        ctypes.CDLL("libc.so.6").malloc_trim(0)
