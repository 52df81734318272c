"""The page allocator and its tree of cached pages, compared with brute force."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.llm.engine.pages import PageAllocator
from cirag_jax.llm.engine.shapes import chunks, prefix_keys

SIZE = 4
# Few different tokens and common beginnings, so that shared prefixes end within pages.
texts = st.builds(
    lambda shared, tail: [7] * shared + tail,
    st.integers(0, 3 * SIZE),
    st.lists(st.integers(0, 2), max_size=2 * SIZE + 3),
)

steps = st.integers(1, 2 * SIZE)  # tokens between two borders


def common(a, b):
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if n is None else n


class SimulatedPages:
    """A simulation of the device that stores the tokens that rows write to each page."""

    def __init__(self, count, kept):
        self.pages = PageAllocator(count, kept, SIZE)
        self.content = [[None] * SIZE for _ in range(count)]
        self.rows = []

    def begin(self, prompt, room, borders):
        """Returns a row with ``prompt`` and room for more tokens; None if pages are too few."""
        place = self.pages.allocate(prompt, len(prompt) + room, borders)
        if place is None:
            return None
        assert place.reused in (0, *borders) and place.reused % SIZE == 0
        row = (place, list(prompt), len(prompt) + room)
        assert self.read(place, place.reused) == prompt[: place.reused]
        self.write(place, prompt, place.reused)
        self.rows.append(row)
        return row

    def write(self, place, tokens, start):
        for i in range(start, len(tokens)):
            page = place.pages[i // SIZE]
            others = [p for p, *_ in self.rows if p is not place and page in p.pages]
            assert not others, "a page is written that another row reads"
            self.content[page][i % SIZE] = tokens[i]

    def read(self, place, count):
        return [self.content[place.pages[i // SIZE]][i % SIZE] for i in range(count)]

    def check(self):
        for place, tokens, _ in self.rows:
            assert self.read(place, len(tokens)) == tokens
        holders = [0] * self.pages.pool.count
        for place, *_ in self.rows:
            for page in place.pages:
                holders[page] += 1
        for page in self.pages.tree._order:
            holders[page] += 1
        assert holders == self.pages.pool._holders
        assert sorted(self.pages.pool._free) == [i for i, n in enumerate(holders) if not n]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(6, 20), st.integers(0, 12))
def test_allocator_random_rows_read_their_tokens(data, count, kept):
    """Rows read only their own tokens while other rows change and pages are evicted."""
    store = SimulatedPages(count, kept)
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["begin", "grow", "end", "forget"]))
        if action == "begin":
            prompt, room = data.draw(texts), data.draw(st.integers(1, SIZE + 2))
            row = store.begin(prompt, room, range(0, len(prompt) + 1, data.draw(steps)))
            if row is not None:
                store.pages.tree.insert(row[1], row[0].pages)
        elif action == "grow" and store.rows:
            place, tokens, capacity = data.draw(st.sampled_from(store.rows))
            new = data.draw(st.lists(st.integers(0, 2), max_size=capacity - len(tokens)))
            tokens.extend(new)
            store.write(place, tokens, len(tokens) - len(new))
        elif action == "end" and store.rows:
            index = data.draw(st.integers(0, len(store.rows) - 1))
            place, *_ = store.rows.pop(index)
            store.pages.free(place)
        elif action == "forget":
            store.pages.tree.clear()
        assert len(store.pages.tree) <= kept
        store.check()
    for place, *_ in store.rows:
        store.pages.free(place)
    store.pages.tree.clear()
    assert len(store.pages.pool) == count


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, min_size=1, max_size=12), st.lists(texts, max_size=6))
def test_allocator_reuses_longest_prefix_up_to_a_page(kept, asked):
    store = SimulatedPages(400, 200)
    for tokens in kept:
        row = store.begin(tokens, 1, range(100))
        assert row is not None
        store.pages.tree.insert(tokens, row[0].pages)
    for tokens in (*kept, *asked):
        longest = max(common(tokens, other) for other in kept)
        row = store.begin(tokens, 1, range(100))
        assert row is not None
        assert row[0].reused == longest // SIZE * SIZE


def allocate(pages, tokens, length):
    place = pages.allocate(tokens, length, range(0, length, SIZE))
    assert place is not None
    return place


def test_tree_evicts_least_recently_used():
    pages = PageAllocator(10, 3, SIZE)
    a, b, c, d = ([token] * SIZE for token in (1, 2, 3, 4))
    for tokens in (a, b, c, a, d):
        place = allocate(pages, tokens, SIZE)
        pages.tree.insert(tokens, place.pages)
        pages.free(place)
    assert [len(pages.tree.match(tokens)) for tokens in (a, b, c, d)] == [1, 0, 1, 1]


def test_allocator_evicts_cached_but_not_used_pages():
    pages = PageAllocator(4, 4, SIZE)
    first = allocate(pages, [1] * SIZE, 2 * SIZE)
    pages.tree.insert([1] * SIZE, first.pages)
    second = allocate(pages, [2] * SIZE, 2 * SIZE)
    assert pages.allocate([3], 1, ()) is None
    assert len(pages.tree) == 1  # evicting it would not make enough room
    pages.free(first)
    assert pages.allocate([3], 4 * SIZE, ()) is None and len(pages.tree) == 1
    assert len(allocate(pages, [3], 2 * SIZE).pages) == 2 and not len(pages.tree)
    pages.free(second)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 900),
    st.integers(0, 900),
    st.integers(0, 900),
    st.sampled_from([(128, 32), (512, 128), (512, 128, 32), (64, 16), (96,)]),
)
def test_prefix_keys_equal_means_computed_by_the_same_calls(shared, first, second, sizes):
    texts = [np.asarray([7] * shared + [n] * own) for n, own in enumerate((first, second), 1)]
    grids = [list(chunks(0, len(tokens), sizes)) for tokens in texts]
    keys = [prefix_keys(tokens, grid) for tokens, grid in zip(texts, grids, strict=True)]
    equal = common(*keys)
    calls = [[call for call in grid if call[0] < equal] for grid in grids]
    assert equal <= shared and calls[0] == calls[1]
    assert equal == shared or grids[0] != grids[1]
