"""The tree of kept blocks against brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cirag_jax.llm.engine.prefix_cache import BLOCK, PrefixIndex

# Few different tokens and shared beginnings, so that prefixes meet in the middle of blocks.
sequences = st.lists(
    st.builds(
        lambda shared, tail: [7] * shared + tail,
        st.integers(0, 3 * BLOCK),
        st.lists(st.integers(0, 2), max_size=2 * BLOCK + 3),
    ),
    min_size=1,
    max_size=12,
)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


class Written:
    """What a store would hold: the tokens of each block, as insert says they are to be written."""

    def __init__(self, num_blocks):
        self.index = PrefixIndex(num_blocks)
        self.content = {}

    def insert(self, tokens):
        path, known = self.index.insert(tokens)
        for i, block in enumerate(path):
            piece = tokens[i * BLOCK : (i + 1) * BLOCK]
            if i >= known:
                self.content[block] = piece
            assert self.content[block][: len(piece)] == piece
        return path

    def read(self, tokens):
        """The matched prefix, read back from the blocks."""
        count, path = self.index.match(tokens)
        held = [token for block in path for token in self.content[block]]
        assert len(path) == -(-count // BLOCK)
        assert held[:count] == tokens[:count]
        return count


@settings(max_examples=200, deadline=None)
@given(sequences, st.data())
def test_the_longest_prefix_is_found_to_the_token(kept, data):
    store = Written(200)
    for tokens in kept:
        store.insert(tokens)
    asked = data.draw(sequences)
    for tokens in (*kept, *asked):
        longest = 0
        for other in kept:
            differ = common(tokens, other)
            longest = max(longest, min(len(tokens), len(other)) if differ is None else differ)
        assert store.read(tokens) == longest


@settings(max_examples=200, deadline=None)
@given(sequences, st.integers(1, 6))
def test_a_full_store_forgets_the_oldest_and_never_mixes(kept, num_blocks):
    store = Written(num_blocks)
    for tokens in kept:
        path = store.insert(tokens)
        assert len(set(path)) == len(path) <= num_blocks
        assert len(store.index) <= num_blocks
        # What was kept last is there, as far as it has room.
        assert store.read(tokens) >= min(len(tokens), len(path) * BLOCK)
        for other in kept:
            store.read(other)


def test_recent_use_protects():
    index = PrefixIndex(3)
    a, b, c = ([token] * BLOCK for token in (1, 2, 3))
    index.insert(a)
    index.insert(b)
    index.insert(c)
    assert index.match(a)[0] == BLOCK
    index.insert([4] * BLOCK)
    assert [index.match(tokens)[0] for tokens in (a, b, c)] == [BLOCK, 0, BLOCK]
