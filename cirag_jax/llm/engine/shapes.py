"""The settings of the engine, and the fixed shapes of its computations."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cirag_jax.llm.chat import Overflow

MAX_CONTEXT = 32768  # maximum tokens of prompt and answer if the settings give no context
GUESSING_SLOTS = 8  # minimum tokens in a decoding step on a CPU: about as fast as one token


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and settings of the engine; `for_platform` has other defaults for accelerators.

    Attributes:
      batch_size: maximum number of rows (requests) that decode together.
      cache_tokens: maximum number of cached tokens of the rows that decode together, in addition to
        one page per row and ``prefix_tokens``. If rows are long, fewer rows decode together. One
        row with a full context always fits.
      prefill_chunks: possible sizes of a prefill call in tokens, descending; see `chunks`.
        With larger calls, prefill is hardly faster, and less of a cached prefix is reused,
        because reuse ends at a border between calls.
      decode_chunk: maximum number of tokens that are decoded between checks by the host.
      prefix_tokens: maximum number of prompt tokens, in full pages, whose keys and values are
        cached for reuse by later prompts. Rows may reclaim these pages. 0 disables reuse.
      overflow: action if a prompt is longer than the context: error, or truncate (shorten
        observations).
      context: maximum number of tokens of prompt and answer; 0 means the model's limit, at most
        `MAX_CONTEXT`.
      no_repeat_ngram_size: size of n-grams that an answer may contain only once; 0 disables it.
      lookup_tokens: maximum number of tokens of a greedy row that are guessed from its prompt and
        answer, and checked in the same step as the next token; 0 disables it. Guesses use idle
        rows. On a CPU, a step has at least `GUESSING_SLOTS` rows, also without guesses.
    """

    batch_size: int = 16
    cache_tokens: int = 32768
    prefill_chunks: tuple[int, ...] = (128, 32)
    decode_chunk: int = 32
    prefix_tokens: int = 32768
    overflow: Overflow = "error"
    context: int = 0
    no_repeat_ngram_size: int = 0
    lookup_tokens: int = 7

    @staticmethod
    def for_platform(platform: str | None = None, **overrides: Any) -> "EngineConfig":
        """Returns the defaults of a platform (by default JAX's), with ``overrides``."""
        sizes: dict[str, Any] = {}
        if (platform or jax.default_backend()) != "cpu":
            sizes = {
                "batch_size": 64,
                "cache_tokens": 131072,
                "prefill_chunks": (512, 128),
                "prefix_tokens": 131072,
                "lookup_tokens": 0,
            }
        return EngineConfig(**{**sizes, **overrides})


def context_of(options: EngineConfig, max_positions: int) -> int:
    """Returns the maximum number of tokens of prompt and answer, within the model's limit."""
    return min(options.context or MAX_CONTEXT, max_positions)


def chunks(start: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (start, size) of the calls that compute the positions from ``start`` to ``end``.

    Each call has the largest size that it fills to three quarters or more, or the smallest size.
    """
    while start < end:
        size = next((size for size in sizes if end - start >= 0.75 * size), sizes[-1])
        yield start, size
        start += size


def prefix_keys(
    tokens: np.ndarray, grid: Sequence[tuple[int, int]], is_long: bool = False
) -> list[int]:
    """Returns a key per token, from the token and the size of the call that computes it.

    ``is_long`` is whether the text is longer than `DecoderConfig.rope_switch`.

    ``grid`` is the result of `chunks` from position 0. Texts whose keys are equal up to a position
    have equal keys and values there, bit for bit, because the same calls compute them.
    """
    sizes = np.asarray([size for _, size in grid], np.int64)
    calls = np.repeat(2 * sizes + is_long, sizes)[: len(tokens)]
    return (tokens.astype(np.int64) << 32 | calls).tolist()


def next_power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def padded_slice(tokens: np.ndarray, start: int, size: int) -> np.ndarray:
    """Returns ``tokens[start : start + size]``, padded with zeros."""
    part = tokens[start : start + size]
    return np.pad(part, (0, size - len(part))).astype(np.int32)
