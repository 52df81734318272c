"""Where the keys and values of every token lie: pages that rows hold and that texts share.

A page has room for `PAGE` tokens of one text. A row has the list of its pages; what it has in
common with an earlier text it does not copy but holds as well, so that a page is free again when
the last holder lets go of it. Pages of earlier texts form a tree: a page's parent holds the tokens
before it. A prompt's longest common prefix with everything kept is found to the token: whole pages
by their tokens, then as much of one more as agrees, of which a row gets a copy to write on. The
oldest leaves go when room is needed.

Source: Kwon et al. (2023), PagedAttention; Zheng et al. (2024), RadixAttention.
"""

import collections
import dataclasses
from collections.abc import Sequence

PAGE = 128  # tokens; attention on a CPU reads as many keys at a time
_ROOT = -1


class PagePool:
    """Which of ``count`` pages are free, and by how many each of the others is held."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    def __len__(self) -> int:
        """Pages that are free."""
        return len(self._free)

    def take(self) -> int:
        """A free page, held once."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page that somebody holds."""
        assert self._holders[page] > 0
        self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether it would stay taken if one holder let go of it."""
        return self._holders[page] > 1

    def drop(self, page: int) -> None:
        """One holder less; after the last one the page is free."""
        assert self._holders[page] > 0
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)


@dataclasses.dataclass
class _Node:
    """A kept page: its tokens (fewer than a page has in an unfinished one) and its place."""

    tokens: tuple[int, ...]
    parent: int
    children: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class PrefixTree:
    """Which tokens are kept in which page; it holds at most ``most`` pages of ``size`` tokens."""

    def __init__(self, pool: PagePool, most: int, size: int = PAGE):
        self._pool, self._most, self._size = pool, most, size
        self._nodes: dict[int, _Node] = {_ROOT: _Node((), _ROOT)}
        # Least recently used first. A page is always touched before its parent, so that the first
        # one never has children.
        self._order: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        """Pages kept."""
        return len(self._order)

    def match(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Length of the longest kept prefix of ``tokens``, and the pages that hold it."""
        tokens = tuple(int(token) for token in tokens)
        at, count, path = _ROOT, 0, []
        while True:
            rest = tokens[count : count + self._size]
            children = self._nodes[at].children
            found = children.get(rest) if len(rest) == self._size else None
            if found is not None:
                path.append(found)
                at, count = found, count + self._size
                continue
            best = max(children, key=lambda key: _common(key, rest), default=())
            if common := _common(best, rest):
                path.append(children[best])
                count += common
            self._touch(path)
            return count, path

    def keep(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keeps the pages of a text, except those whose tokens are kept already.

        Tokens may be written after the last ones by whoever holds the pages, as long as these stay.
        """
        tokens = tuple(int(token) for token in tokens)
        at, path = _ROOT, []
        starts = range(0, len(tokens), self._size)
        for start, page in zip(starts, pages, strict=False):
            piece = tokens[start : start + self._size]
            children = self._nodes[at].children
            if piece not in children:
                if any(key[: len(piece)] == piece for key in children):
                    break  # kept already, at the beginning of a longer one
                for key in [key for key in children if key == piece[: len(key)]]:
                    self._forget(children[key])  # an unfinished one that this continues
                self._pool.hold(page)
                self._nodes[page] = _Node(piece, at)
                children[piece] = page
                self._order[page] = None
            at = children[piece]
            path.append(at)
        self._touch(path)
        while len(self) > self._most:
            self.evict()

    def idle(self) -> int:
        """Pages that only the tree holds."""
        return sum(not self._pool.is_shared(page) for page in self._order)

    def evict(self) -> None:
        """Lets go of the least recently used page."""
        self._forget(next(iter(self._order)))

    def clear(self) -> None:
        """Lets go of all."""
        while self._order:
            self.evict()

    def _forget(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert not node.children
        del self._nodes[node.parent].children[node.tokens]
        del self._order[page]
        self._pool.drop(page)

    def _touch(self, path: list[int]) -> None:
        for page in reversed(path):
            self._order.move_to_end(page)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a text is to be written.

    Attributes:
      pages: in order; those of the first ``reused // PAGE`` are shared and not to be written.
      reused: tokens whose keys and values are there, but for those in ``copied``.
      copied: a page whose content the row's own (the first after the shared ones) begins with;
        None: none.
    """

    pages: list[int]
    reused: int
    copied: int | None


class Pages:
    """The pool and the tree: finds places for texts."""

    def __init__(self, count: int, kept: int, size: int = PAGE):
        """``count`` pages of ``size`` tokens, of which the tree keeps at most ``kept``."""
        self.size = size
        self.pool = PagePool(count)
        self.tree = PrefixTree(self.pool, kept, size)

    def place(self, tokens: Sequence[int], length: int) -> Place | None:
        """Pages for a text of ``length`` tokens that begins with ``tokens``; None: no room now.

        Whoever has the place must `free` it once. What is kept of other texts makes room, unless
        that would be in vain.
        """
        count, path = self.tree.match(tokens) if len(self.tree) else (0, [])
        for page in path:  # else they might be evicted now
            self.pool.hold(page)
        shared, copied = count // self.size, path[-1] if count % self.size else None
        wanted = -(-length // self.size) - shared
        if len(self.pool) < wanted and len(self.pool) + self.tree.idle() < wanted:
            for page in path:
                self.pool.drop(page)
            return None
        while len(self.pool) < wanted:
            self.tree.evict()
        own = [self.pool.take() for _ in range(wanted)]
        if copied is not None:
            self.pool.drop(copied)  # read by the very next computation, before any that writes
        return Place([*path[:shared], *own], count, copied)

    def free(self, place: Place) -> None:
        """Lets go of a text's pages."""
        for page in place.pages:
            self.pool.drop(page)
