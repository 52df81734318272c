"""Allocation of pages, which store the keys and values of tokens.

A page has room for `PAGE_SIZE` tokens of one text. Every row (a request that is being decoded) has
a list of pages. Rows that begin with the same tokens share pages, so a page becomes free when its
last holder releases it.

Cached pages of earlier texts form a tree, in which the parent of a page has the tokens that precede
the page. A new prompt shares the pages of its longest cached prefix. If pages are needed, the least
recently used leaves of the tree are evicted. The tree has full pages only, which are never written
again.

Source: Kwon et al. (2023), PagedAttention; Zheng et al. (2024), RadixAttention.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

PAGE_SIZE = 128  # tokens; CPU attention reads keys in blocks of this size
_ROOT = -1


class PagePool:
    """The free pages, and the number of holders of each page."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    def __len__(self) -> int:
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
    """A cached page, and the keys of its tokens."""

    keys: tuple[int, ...]
    parent: int
    children: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)


class PrefixTree:
    """A tree of cached pages; at most ``capacity`` pages of ``size`` tokens.

    Each token of a text has an integer key. Texts whose keys are equal up to the end of a page have
    the same page.
    """

    def __init__(self, pool: PagePool, capacity: int, size: int = PAGE_SIZE):
        self._pool, self._capacity, self._size = pool, capacity, size
        self._nodes: dict[int, _Node] = {_ROOT: _Node((), _ROOT)}
        # Least recently used first. A page is always moved to the end before its parent is, so the
        # first page never has children.
        self._order: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def match(self, keys: Sequence[int]) -> list[int]:
        """Returns the pages of the longest cached prefix."""
        node, path = _ROOT, []
        for part in self._parts(keys):
            node = self._nodes[node].children.get(part)
            if node is None:
                break
            path.append(node)
        self._mark_used(path)
        return path

    def insert(self, keys: Sequence[int], pages: Sequence[int]) -> None:
        """Adds the full pages of a text, except those that are already cached."""
        node, path = _ROOT, []
        for part, page in zip(self._parts(keys), pages, strict=False):
            children = self._nodes[node].children
            if part not in children:
                self._pool.share(page)
                self._nodes[page] = _Node(part, node)
                children[part] = page
                self._order[page] = None
            node = children[part]
            path.append(node)
        self._mark_used(path)
        while len(self) > self._capacity:
            self.evict()

    def _parts(self, keys: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for end in range(self._size, len(keys) + 1, self._size):
            yield tuple(keys[end - self._size : end])

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
        del self._nodes[node.parent].children[node.keys]
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
    """

    pages: list[int]
    reused: int


class PageAllocator:
    """Allocates pages to texts, from a pool and a tree of cached prefixes."""

    def __init__(self, count: int, capacity: int, size: int = PAGE_SIZE):
        """``count`` pages of ``size`` tokens, of which the tree caches at most ``capacity``."""
        self.size = size
        self.pool = PagePool(count)
        self.tree = PrefixTree(self.pool, capacity, size)

    def allocate(
        self, keys: Sequence[int], length: int, borders: Sequence[int]
    ) -> Allocation | None:
        """Allocates pages for a text of ``length`` tokens.

        ``keys`` are the keys of its first tokens, see `PrefixTree`. The text reuses its longest
        cached prefix that ends between two pages, at one of the positions ``borders``. Returns None
        if there is no room. Evicts cached pages of other texts only if this makes enough room. The
        caller must `free` the allocation.
        """
        path = self.tree.match(keys)
        cached = len(path) * self.size
        ends = (border for border in borders if border <= cached and border % self.size == 0)
        reused = max(ends, default=0)
        shared = path[: reused // self.size]
        for page in shared:  # protects them from eviction
            self.pool.share(page)
        num_new = -(-length // self.size) - len(shared)
        if len(self.pool) < num_new and len(self.pool) + self.tree.num_evictable() < num_new:
            for page in shared:
                self.pool.release(page)
            return None
        while len(self.pool) < num_new:
            self.tree.evict()
        return Allocation([*shared, *(self.pool.allocate() for _ in range(num_new))], reused)

    def free(self, allocation: Allocation) -> None:
        """Releases a text's pages."""
        for page in allocation.pages:
            self.pool.release(page)
