"""Keys and values on the device, and the tables by which programs find them."""

import jax
import numpy as np

from cirag_jax.llm.engine.pages import PAGE, Pages, Place
from cirag_jax.llm.engine.rows import table
from cirag_jax.llm.engine.shapes import EngineConfig, power_of_two
from cirag_jax.models import decoder
from cirag_jax.models.decoder import DecoderConfig
from cirag_jax.models.paged_cache import Cache


class Store:
    """The pages of an engine, and their keys and values.

    ``value`` is replaced by each call that donates it. Engines that share pages have one store.
    """

    def __init__(self, config: DecoderConfig, context: int, options: EngineConfig):
        """Takes no memory before it is used; ``context`` is the longest row's length."""
        self._width = -(-config.max_positions // PAGE)  # whatever the context of who shares it
        self._kept = -(-options.prefix_tokens // PAGE)
        self.pages = Pages(self._needed(context, options), self._kept)
        self._config = config
        self._value: Cache | None = None

    def _needed(self, context: int, options: EngineConfig) -> int:
        """Pages for rows, of which each may leave most of one, and for what is kept of others."""
        rows = max(context, min(options.cache_tokens, options.batch_size * context))
        return -(-rows // PAGE) + options.batch_size + self._kept

    def has_room(self, context: int, options: EngineConfig) -> bool:
        """Whether there are as many pages as such an engine needs; unused ones are made more."""
        needed = self._needed(context, options)
        if self._value is None and needed > self.count:
            self.pages = Pages(needed, self._kept)
        return needed <= self.count

    @property
    def count(self) -> int:
        """Pages; as a page of a table, one that does not exist."""
        return self.pages.pool.count

    @property
    def value(self) -> Cache:
        """Keys and values of all pages, made when they are first asked for."""
        if self._value is None:
            self._value = decoder.empty_cache(self._config, self.count, PAGE)
        return self._value

    @value.setter
    def value(self, cache: Cache) -> None:
        self._value = cache

    def table(self, place: Place | None, end: int) -> np.ndarray:
        """A row's table for a computation that reads up to ``end`` tokens."""
        return table(place, self.width_for(end), self.count)

    def width_for(self, end: int, whole: bool = False) -> int:
        """Pages of a table that reaches ``end`` tokens.

        Attention on a CPU reads what is written, whatever the width; elsewhere, and where
        ``whole`` tables are read, the program is that of the next power of two.
        """
        if self._config.attention == "transposed" and not whole:
            return self._width
        return min(power_of_two(-(-end // PAGE)), self._width)

    def repair(self) -> None:
        """Forgets all where an interruption has left donated buffers behind."""
        self.pages.tree.clear()
        if any(array.is_deleted() for array in jax.tree.leaves(self._value)):
            self._value = None

    def release(self) -> None:
        """Forgets all, and frees its memory until it is used again."""
        self.pages.tree.clear()
        self._value = None
