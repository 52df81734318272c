"""Keys and values of earlier prompts, kept in blocks and found again by comparing tokens.

Blocks of 16 tokens form a tree: a block's parent holds the tokens before it, so that what a
thousand prompts share is held once. A prompt's longest common prefix with everything held is found
to the token: whole blocks by their tokens, then as much of one more block as agrees. The oldest
leaves go when room is needed.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cirag_jax.models.decoder import CACHE_LENGTH_AXIS, Cache, DecoderConfig, empty_cache

BLOCK = 16
_ROOT = -1


@dataclasses.dataclass
class _Node:
    """One held block: its tokens (fewer than `BLOCK` in a last, unfinished one) and its place."""

    tokens: tuple[int, ...]
    parent: int
    children: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class PrefixIndex:
    """Which tokens are held in which block: the tree alone, without any array."""

    def __init__(self, num_blocks: int):
        """An empty tree over blocks ``0 .. num_blocks - 1``."""
        self._nodes: dict[int, _Node] = {_ROOT: _Node((), _ROOT)}
        self._free = list(range(num_blocks - 1, -1, -1))
        # Least recently used first. A block is always touched before its parent, so that the
        # first one never has children.
        self._order: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        """Blocks in use."""
        return len(self._order)

    def match(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Length of the longest held prefix of ``tokens``, and the blocks that hold it."""
        tokens = tuple(int(token) for token in tokens)
        at, count, path = _ROOT, 0, []
        while True:
            rest = tokens[count : count + BLOCK]
            children = self._nodes[at].children
            found = children.get(rest) if len(rest) == BLOCK else None
            if found is not None:
                path.append(found)
                at, count = found, count + BLOCK
                continue
            best = max(children, key=lambda key: _common(key, rest), default=())
            if common := _common(best, rest):
                path.append(children[best])
                count += common
            self._touch(path)
            return count, path

    def insert(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Takes blocks for ``tokens``.

        Returns:
          The blocks of ``tokens`` in order (fewer where there is no room for all), and the index
          of the first one whose content has yet to be written.
        """
        tokens = tuple(int(token) for token in tokens)
        pieces = [tokens[i : i + BLOCK] for i in range(0, len(tokens), BLOCK)]
        at, path = _ROOT, []
        for piece in pieces:
            found = self._nodes[at].children.get(piece)
            if found is None:
                break
            path.append(found)
            at = found
        self._touch(path)
        known = len(path)
        for piece in pieces[known:]:
            if any(key[: len(piece)] == piece for key in self._nodes[at].children):
                break  # held already, at the beginning of a longer block
            block = self._grow(at, piece, path)
            if block is None:
                break
            path.append(block)
            at = block
        self._touch(path)
        return path, known

    def _grow(self, parent: int, piece: tuple[int, ...], path: list[int]) -> int | None:
        """A block for ``piece``: an unfinished one that it continues, else a free one."""
        children = self._nodes[parent].children
        for key, block in children.items():
            if len(key) < len(piece) and key == piece[: len(key)]:
                del children[key]
                self._nodes[block].tokens = piece
                children[piece] = block
                return block
        if not self._free and not self._evict(path):
            return None
        block = self._free.pop()
        self._nodes[block] = _Node(piece, parent)
        children[piece] = block
        self._order[block] = None
        return block

    def _evict(self, path: list[int]) -> bool:
        """Frees the least recently used block unless it is on ``path``."""
        oldest = next(iter(self._order), None)
        if oldest is None or oldest in path:
            return False
        node = self._nodes.pop(oldest)
        del self._nodes[node.parent].children[node.tokens]
        del self._order[oldest]
        self._free.append(oldest)
        return True

    def _touch(self, path: list[int]) -> None:
        for block in reversed(path):
            self._order.move_to_end(block)


class PrefixCache:
    """The tree with the keys and values of its blocks on the device."""

    def __init__(self, config: DecoderConfig, num_tokens: int):
        """Room for ``num_tokens`` tokens, taken when the first ones are kept."""
        self._config = config
        self._num_blocks = max(num_tokens // BLOCK, 1)
        self._blocks: Cache | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets everything (the weights changed, or a computation was interrupted)."""
        self._index = PrefixIndex(self._num_blocks)
        if any(array.is_deleted() for array in jax.tree.leaves(self._blocks)):
            self._blocks = None  # donated to a computation that never returned them

    def release(self) -> None:
        """Forgets everything, and frees its memory until something is kept again."""
        self._index, self._blocks = PrefixIndex(self._num_blocks), None

    def load(self, cache: Cache, row: int, tokens: np.ndarray) -> tuple[Cache, int]:
        """Copies the longest held prefix of ``tokens`` into a row of ``cache`` (donated).

        Returns:
          The cache and the length of that prefix.
        """
        if self._blocks is None:
            return cache, 0
        count, path = self._index.match(tokens.tolist())
        if not path:
            return cache, 0
        ids = _padded(path, cache)
        return _copy_in(cache, self._blocks, ids, np.int32(len(path)), np.int32(row)), count

    def save(self, cache: Cache, row: int, tokens: np.ndarray) -> None:
        """Keeps the keys and values of ``tokens``, which stand in a row of ``cache``."""
        if self._blocks is None:
            self._blocks = empty_cache(self._config, self._num_blocks, BLOCK, batch_axis=None)
        path, known = self._index.insert(tokens.tolist())
        if known < len(path):
            bounds = np.asarray([known, len(path)], np.int32)
            self._blocks = _copy_out(
                self._blocks, cache, _padded(path, cache), bounds, np.int32(row)
            )


def _padded(path: list[int], cache: Cache) -> np.ndarray:
    """Block ids padded to the number of blocks in a row of the cache."""
    ids = np.zeros(cache["v"][0].shape[2] // BLOCK, np.int32)
    ids[: len(path)] = path
    return ids


def _copy(target: jax.Array, at: Any, source: jax.Array, start: Any, axis: int) -> jax.Array:
    """One block, at (row, position) ``start`` of ``source``, to (row, position) ``at``."""

    def indices(row, position):
        found = [jnp.int32(0)] * 4
        found[0], found[axis] = row, position
        return found

    size = [1, *source.shape[1:]]
    size[axis] = BLOCK
    block = jax.lax.dynamic_slice(source, indices(*start), size)
    return jax.lax.dynamic_update_slice(target, block, indices(*at))


def _copy_all(target: Cache, at: Any, source: Cache, start: Any) -> Cache:
    return {
        name: tuple(
            _copy(t, at, s, start, CACHE_LENGTH_AXIS[name])
            for t, s in zip(target[name], source[name], strict=True)
        )
        for name in target
    }


# Only as many blocks as there are to copy are copied: the loops' lengths are data.


@functools.partial(jax.jit, donate_argnums=0)
def _copy_in(cache: Cache, blocks: Cache, ids: jax.Array, count: jax.Array, row: jax.Array):
    def one(i, cache):
        return _copy_all(cache, (row, i * BLOCK), blocks, (ids[i], jnp.int32(0)))

    return jax.lax.fori_loop(jnp.int32(0), count, one, cache)


@functools.partial(jax.jit, donate_argnums=0)
def _copy_out(blocks: Cache, cache: Cache, ids: jax.Array, bounds: jax.Array, row: jax.Array):
    def one(i, blocks):
        return _copy_all(blocks, (ids[i], jnp.int32(0)), cache, (row, i * BLOCK))

    return jax.lax.fori_loop(bounds[0], bounds[1], one, blocks)
