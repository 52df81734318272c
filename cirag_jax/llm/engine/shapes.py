"""The settings of the engine, and the fixed shapes of its computations."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cirag_jax.llm.chat import Overflow

MAX_CONTEXT = 32768  # tokens of prompt and answer, if the settings give no context


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and settings of the engine; the defaults are those of `for_platform` on a CPU.

    Attributes:
      batch_size: rows that decode together.
      cache_tokens: total tokens of rows that decode together, in addition to one page per row and
        ``prefix_tokens``. Fewer rows decode together if they are long. One context always fits.
      prefill_chunks: sizes of a prefill call in tokens, descending; prompts are split greedily.
      decode_chunk: maximum number of tokens that are decoded between checks by the host.
      prefix_tokens: tokens whose keys and values are cached for reuse, in whole pages. Rows may
        take these pages back. 0 disables reuse.
      overflow: whether a prompt longer than the context is an ``error``, or loses observations
        (``truncate``).
      context: maximum number of tokens of prompt and answer; 0 is the model's, at most
        `MAX_CONTEXT`.
      no_repeat_ngram_size: size of n-grams that an answer may contain only once; 0 disables it.
    """

    batch_size: int = 16
    cache_tokens: int = 32768
    prefill_chunks: tuple[int, ...] = (512, 128, 32)
    decode_chunk: int = 32
    prefix_tokens: int = 32768
    overflow: Overflow = "error"
    context: int = 0
    no_repeat_ngram_size: int = 0

    @staticmethod
    def for_platform(platform: str | None = None, **overrides: Any) -> "EngineConfig":
        """Returns the defaults of a platform (by default JAX's), with ``overrides``."""
        sizes: dict[str, Any] = {}
        if (platform or jax.default_backend()) != "cpu":
            sizes = {
                "batch_size": 64,
                "cache_tokens": 131072,
                "prefill_chunks": (2048, 512, 128),
                "prefix_tokens": 131072,
            }
        return EngineConfig(**{**sizes, **overrides})


def context_of(options: EngineConfig, max_positions: int) -> int:
    """Returns the maximum number of tokens of prompt and answer, within the model's limit."""
    return min(options.context or MAX_CONTEXT, max_positions)


def chunks(start: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (start, size) of calls that compute the positions ``start`` to ``end``.

    Each has the largest size that is at least three quarters full, or the smallest size.
    """
    while start < end:
        size = next((size for size in sizes if end - start >= 0.75 * size), sizes[-1])
        yield start, size
        start += size


def next_power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def padded_slice(tokens: np.ndarray, start: int, size: int) -> np.ndarray:
    """Returns ``tokens[start : start + size]``, padded with zeros."""
    part = tokens[start : start + size]
    return np.pad(part, (0, size - len(part))).astype(np.int32)
