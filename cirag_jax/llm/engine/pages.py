"""Allocation of pages, which store the keys and values of tokens.

A page has room for `PAGE_SIZE` tokens of one text. Every row (a request that is being decoded) has
a list of pages. Rows that begin with the same tokens share pages, so a page becomes free when its
last holder releases it.

Cached pages of earlier texts form a tree, in which the parent of a page has the tokens that precede
the page. A new prompt reuses its longest cached prefix, which may end within a page. The row shares
the full pages of the prefix and gets its own copy of a partial page. If pages are needed, the least
recently used leaves of the tree are evicted.

Source: Kwon et al. (2023), PagedAttention; Zheng et al. (2024), RadixAttention.
"""

import collections
import dataclasses
from collections.abc import Sequence

PAGE_SIZE = 128  # tokens; CPU attention reads keys in blocks of this size
_ROOT = -1


class PagePool:
    """The free pages, and the number of holders of each page."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    def __len__(self) -> int:
        """Returns the number of free pages."""
        return len(self._free)

    def allocate(self) -> int:
        """Returns a free page, with one holder."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds a holder to a page that is not free."""
        assert self._holders[page] > 0
        self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        """Returns whether a page has several holders."""
        return self._holders[page] > 1

    def release(self, page: int) -> None:
        """Removes a holder; a page without holders becomes free."""
        assert self._holders[page] > 0
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)


@dataclasses.dataclass
class _Node:
    """A cached page: its tokens (fewer than the page size if it is a partial page)."""

    tokens: tuple[int, ...]
    parent: int
    children: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class PrefixTree:
    """A tree of cached pages by their tokens; at most ``capacity`` pages of ``size`` tokens."""

    def __init__(self, pool: PagePool, capacity: int, size: int = PAGE_SIZE):
        self._pool, self._capacity, self._size = pool, capacity, size
        self._nodes: dict[int, _Node] = {_ROOT: _Node((), _ROOT)}
        # Least recently used first. A page is always moved to the end before its parent is, so the
        # first page never has children.
        self._order: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        """Returns the number of cached pages."""
        return len(self._order)

    def match(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Returns the length of the longest cached prefix of ``tokens``, and its pages."""
        tokens = tuple(int(token) for token in tokens)
        node, count, path = _ROOT, 0, []
        while True:
            rest = tokens[count : count + self._size]
            children = self._nodes[node].children
            if len(rest) == self._size and rest in children:
                node = children[rest]
                path.append(node)
                count += self._size
                continue
            best = max(children, key=lambda key: _common_length(key, rest), default=())
            if common := _common_length(best, rest):
                path.append(children[best])
                count += common
            self._mark_used(path)
            return count, path

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Adds the pages of a text, except those whose tokens are already cached.

        A holder of the pages may later write further tokens after ``tokens``.
        """
        tokens = tuple(int(token) for token in tokens)
        node, path = _ROOT, []
        starts = range(0, len(tokens), self._size)
        for start, page in zip(starts, pages, strict=False):
            part = tokens[start : start + self._size]
            children = self._nodes[node].children
            if part not in children:
                if any(key[: len(part)] == part for key in children):
                    break  # a longer cached page begins with these tokens
                for key in [key for key in children if key == part[: len(key)]]:
                    self._remove(children[key])  # a partial page that the new page extends
                self._pool.share(page)
                self._nodes[page] = _Node(part, node)
                children[part] = page
                self._order[page] = None
            node = children[part]
            path.append(node)
        self._mark_used(path)
        while len(self) > self._capacity:
            self.evict()

    def num_evictable(self) -> int:
        """Returns the number of cached pages that no row uses."""
        return sum(not self._pool.is_shared(page) for page in self._order)

    def evict(self) -> None:
        """Removes the least recently used page."""
        self._remove(next(iter(self._order)))

    def clear(self) -> None:
        """Removes all pages."""
        while self._order:
            self.evict()

    def _remove(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert not node.children
        del self._nodes[node.parent].children[node.tokens]
        del self._order[page]
        self._pool.release(page)

    def _mark_used(self, path: list[int]) -> None:
        for page in reversed(path):
            self._order.move_to_end(page)


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The pages of a text.

    Attributes:
      pages: the pages in order; the first ``reused // PAGE_SIZE`` are shared and must not be
        written.
      reused: number of leading tokens whose keys and values are cached.
      copy_from: a page to copy into the first page that is not shared; None if there is none.
    """

    pages: list[int]
    reused: int
    copy_from: int | None


class PageAllocator:
    """Allocates pages to texts, from a pool and a tree of cached prefixes."""

    def __init__(self, count: int, capacity: int, size: int = PAGE_SIZE):
        """``count`` pages of ``size`` tokens, of which the tree caches at most ``capacity``."""
        self.size = size
        self.pool = PagePool(count)
        self.tree = PrefixTree(self.pool, capacity, size)

    def allocate(self, tokens: Sequence[int], length: int) -> Allocation | None:
        """Allocates pages for a text of ``length`` tokens that begins with ``tokens``.

        Returns None if there is no room. Evicts cached pages of other texts only if this makes
        enough room. The caller must `free` the allocation.
        """
        count, path = self.tree.match(tokens) if len(self.tree) else (0, [])
        for page in path:  # protects them from eviction
            self.pool.share(page)
        num_shared, copy_from = count // self.size, path[-1] if count % self.size else None
        num_new = -(-length // self.size) - num_shared
        if len(self.pool) < num_new and len(self.pool) + self.tree.num_evictable() < num_new:
            for page in path:
                self.pool.release(page)
            return None
        while len(self.pool) < num_new:
            self.tree.evict()
        new_pages = [self.pool.allocate() for _ in range(num_new)]
        if copy_from is not None:
            self.pool.release(copy_from)  # the next computation copies it before any other write
        return Allocation([*path[:num_shared], *new_pages], count, copy_from)

    def free(self, allocation: Allocation) -> None:
        """Releases a text's pages."""
        for page in allocation.pages:
            self.pool.release(page)
