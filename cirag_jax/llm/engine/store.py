"""The keys and values of an engine on the device."""

import jax
import numpy as np

from cirag_jax.llm.engine.pages import PAGE_SIZE, Allocation, PageAllocator
from cirag_jax.llm.engine.rows import page_table
from cirag_jax.llm.engine.shapes import EngineConfig, next_power_of_two
from cirag_jax.models import decoder
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.paged_cache import Cache


class CacheStore:
    """The pages of an engine, with their keys and values in the arrays ``cache``.

    Programs that donate ``cache`` replace it. Engines that share pages have the same store.
    """

    def __init__(self, config: DecoderConfig, context: int, options: EngineConfig):
        """``context`` is the length of the longest row. No memory is allocated before first use."""
        # The width does not depend on ``context``, which differs among engines that share a store.
        self._max_width = -(-config.max_positions // PAGE_SIZE)
        self._capacity = -(-options.prefix_tokens // PAGE_SIZE)
        self.allocator = PageAllocator(self._num_pages(context, options), self._capacity)
        self._config = config
        self._cache: Cache | None = None

    def _num_pages(self, context: int, options: EngineConfig) -> int:
        """Returns the number of pages for rows (with a partial page each) and cached prefixes."""
        tokens = max(context, min(options.cache_tokens, options.batch_size * context))
        return -(-tokens // PAGE_SIZE) + options.batch_size + self._capacity

    def has_room(self, context: int, options: EngineConfig) -> bool:
        """Returns whether an engine has enough pages; adds pages if no page was used yet."""
        needed = self._num_pages(context, options)
        if self._cache is None and needed > self.count:
            self.allocator = PageAllocator(needed, self._capacity)
        return needed <= self.count

    @property
    def count(self) -> int:
        """The number of pages, which is also used as the index of a nonexistent page."""
        return self.allocator.pool.count

    @property
    def cache(self) -> Cache:
        """Keys and values of all pages."""
        if self._cache is None:
            self._cache = decoder.empty_cache(self._config, self.count, PAGE_SIZE)
        return self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        self._cache = cache

    def table(self, allocation: Allocation | None, end: int) -> np.ndarray:
        """Returns a row's page table for a computation that reads up to ``end`` tokens."""
        return page_table(allocation, self.width_for(end), self.count)

    def width_for(self, end: int, reads_all: bool = False) -> int:
        """Returns the width of a page table that covers ``end`` tokens.

        Attention on a CPU reads only written pages, so all lengths have the same width. On
        accelerators, or if the program ``reads_all`` pages of a table, the width is the next power
        of two.
        """
        if self._config.attention == "transposed" and not reads_all:
            return self._max_width
        return min(next_power_of_two(-(-end // PAGE_SIZE)), self._max_width)

    def repair(self) -> None:
        """Clears the store after an interruption, which may have left deleted donated buffers."""
        self.allocator.tree.clear()
        if any(array.is_deleted() for array in jax.tree.leaves(self._cache)):
            self._cache = None

    def release(self) -> None:
        """Clears the store and frees its memory."""
        self.allocator.tree.clear()
        self._cache = None
