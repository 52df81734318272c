"""The engine's settings, first its fixed shapes, and how a prompt is cut into them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cirag_jax.llm.chat import Overflow

MOST = 32768  # tokens of prompt and answer, where no other context is asked for


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and settings of the engine; the defaults are `for_platform`'s on a CPU.

    Attributes:
      batch_size: rows that decode together.
      cache_tokens: room for tokens of all rows that decode together, beside one page a row and
        ``prefix_tokens``: where they are long, they are fewer. There is always room for a context.
      prefill_chunks: tokens of a prefill call, descending; a prompt is cut greedily.
      decode_chunk: most tokens decoded between two looks of the host.
      prefix_tokens: tokens whose keys and values are kept for reuse, in whole pages, which rows may
        take back; 0 switches reuse off.
      overflow: a prompt longer than the context is an ``error``, or loses observations
        (``truncate``).
      context: most tokens of prompt and answer; 0 is the model's, at most `MOST`.
      no_repeat_ngram_size: so many tokens in a row are generated once only in an answer; 0: any.
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
        """The defaults of a platform (by default the one JAX runs on), with ``overrides``."""
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
    """Most tokens of prompt and answer: never beyond what the model was trained for."""
    return min(options.context or MOST, max_positions)


def chunks(done: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, size) of the calls that compute positions ``done .. end``.

    The largest size that is filled by three quarters, else the smallest.
    """
    while done < end:
        left = end - done
        size = next((size for size in sizes if left >= 0.75 * size), sizes[-1])
        yield done, size
        done += size


def power_of_two(count: int) -> int:
    """The least one that is no smaller."""
    return 1 << max(count - 1, 0).bit_length()


def window(tokens: np.ndarray, start: int, size: int) -> np.ndarray:
    """``tokens[start : start + size]``, padded with zeros; what they write is overwritten."""
    window = np.zeros(size, np.int32)
    part = tokens[start : start + size]
    window[: len(part)] = part
    return window
