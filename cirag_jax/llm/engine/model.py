"""A decoder with its weights and pages, and the calls of its compiled programs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from cirag_jax.llm.engine import loading, steps
from cirag_jax.llm.engine.pages import PAGE_SIZE, Allocation
from cirag_jax.llm.engine.rows import Row, to_arrays
from cirag_jax.llm.engine.sampling import Details
from cirag_jax.llm.engine.shapes import (
    GUESSING_SLOTS,
    EngineConfig,
    chunks,
    context_of,
    padded_slice,
    prefix_keys,
)
from cirag_jax.llm.engine.store import CacheStore
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import LoraOptions


@dataclasses.dataclass(frozen=True, order=True)
class Variant:
    """A variant of the decoding program; ``width`` is the width of its page tables."""

    width: int
    details: Details
    greedy: bool
    constrained: bool

    @property
    def allows_guesses(self) -> bool:
        """Whether tokens may be guessed; see ``lookup_tokens`` of `EngineConfig`."""
        return self.greedy and not self.constrained and not self.details.attention


@dataclasses.dataclass
class PagedDecoder:
    """A decoder that reads and writes the pages of an engine."""

    config: DecoderConfig
    weights: steps.Weights
    lora: LoraOptions
    options: EngineConfig
    store: CacheStore
    mesh: jax.sharding.Mesh | None = None

    @property
    def context(self) -> int:
        """The maximum number of tokens of a prompt and its answer."""
        return context_of(self.options, self.config.max_positions)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which programs run on the model's devices."""
        return loading.on_mesh(self.mesh)

    @contextlib.contextmanager
    def freeing(self, allocations: list[Allocation]) -> Iterator[None]:
        """A context that frees ``allocations`` on exit, and clears the store after an error."""
        try:
            yield
        except BaseException:
            self.store.repair()
            raise
        finally:
            for allocation in allocations:
                self.store.allocator.free(allocation)

    def prefill(
        self, tokens: np.ndarray, length: int, total: int, allocations: list[Allocation]
    ) -> Allocation | None:
        """Computes the keys and values of ``tokens`` in a new allocation for ``length`` tokens.

        ``total`` is the length of the text that determines rotary frequencies. The allocation is
        added to ``allocations``. Returns None if there is no room.
        """
        store = self.store
        # The calls depend only on the prompt, so reuse of a prefix does not change their results.
        grid = list(chunks(0, len(tokens), self.options.prefill_chunks))
        is_long = total > (self.config.rope_switch or total)
        keys = prefix_keys(tokens, grid, is_long)
        borders = [*(start for start, _ in grid), len(tokens)]
        allocation = store.allocator.allocate(keys, length, borders)
        if allocation is None:
            return None
        allocations.append(allocation)
        has_start_program = self.config.attention == "cudnn"
        with self.on_mesh():
            for start, size in grid:
                if start < allocation.reused:
                    continue
                store.cache = steps.prefill(
                    self.config,
                    self.weights,
                    store.cache,
                    store.table(allocation, start + size),
                    padded_slice(tokens, start, size),
                    np.int32(start),
                    np.int32(total),
                    lora=self.lora,
                    is_start=has_start_program and start == 0,
                )
        store.allocator.tree.insert(keys, allocation.pages)
        return allocation

    def max_rows(self, variant: Variant) -> int:
        """Returns the number of rows that may decode together.

        Contiguous copies of all rows' pages then have at most ``cache_tokens`` tokens.
        """
        max_rows = self.options.batch_size
        if not steps.uses_contiguous_cache(self.config):
            return max_rows
        return max(1, min(max_rows, self.options.cache_tokens // (variant.width * PAGE_SIZE)))

    def _num_slots(self, variant: Variant) -> int:
        """Returns the number of tokens that a step computes.

        On a CPU there are slots for guesses even without guesses, because the number of slots may
        change the last bits of numbers, and then the rounding to int8.
        """
        is_cpu = self.config.attention == "transposed"
        least = GUESSING_SLOTS if is_cpu and variant.allows_guesses else 1
        return max(self.max_rows(variant), least)

    def decode_chunk(self, variant: Variant, rows: list[Row], others_wait: bool) -> int:
        """Decodes a chunk of every row, and returns the number of new tokens.

        If ``others_wait``, the chunk ends when a quarter of the rows have ended.
        """
        store = self.store
        least = len(rows) + 1 - max(1, len(rows) // 4) if others_wait else 1
        lookup = self.options.lookup_tokens if variant.allows_guesses else 0
        size = self._num_slots(variant)
        # `paged_cache.attend_pages` is faster if neighboring rows have similar lengths.
        rows = sorted(rows, key=lambda row: len(row.prompt) + len(row.tokens))
        slots = [None] * (size - len(rows)) + rows
        masks = None
        if variant.constrained:
            words = -(-self.config.vocab_size // 32)
            masks = np.full((size, words), 0xFFFFFFFF, np.uint32)
            for slot, row in enumerate(slots):
                if row is not None and row.grammar is not None:
                    masks[slot] = row.grammar.mask()
        uses_text = lookup or self.options.no_repeat_ngram_size
        text = variant.width * PAGE_SIZE if uses_text else 0
        count = 1 if variant.constrained else self.options.decode_chunk
        with self.on_mesh():
            store.cache, out = steps.decode(
                self.config,
                self.weights,
                store.cache,
                to_arrays(slots, variant.width, store.count, text),
                masks,
                lora=self.lora,
                details=variant.details,
                greedy=variant.greedy,
                eos_ids=tuple(sorted(rows[0].tokenizer.eos_ids)),
                steps=count,
                ngram=self.options.no_repeat_ngram_size,
                lookup=lookup,
                least=np.int32(least),
            )
        chunk = jax.device_get(out)
        return sum(row.append(chunk, slot) for slot, row in enumerate(slots) if row is not None)
