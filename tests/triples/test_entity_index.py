"""Search for entities by their words, and the triples that contain them."""

import difflib

from hypothesis import given
from hypothesis import strategies as st

from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.triples.normalization import name_key
from cirag_jax.types import Triple

TRIPLES = (
    Triple("Tower of London", "built in", "1078", "a", 0),
    Triple("London", "capital of", "England", "a", 1),
    Triple("tower of london!", "built in", "1078", "b", 0),
    Triple("Ada Moen", "lives in", "London Bridge Road", "b", 1),
    Triple("", "is", "nothing", "b", 2),
)
WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "the", "of"]), min_size=1, max_size=5)
NAMES = st.lists(WORDS.map(" ".join), min_size=1, max_size=30)


def test_entities_equal_normal_forms_are_merged():
    index = EntityIndex(TRIPLES)
    assert len(index) == 6 and len(index.triples) == 4
    assert index.statistics() == {"entities": 6, "relations": 3, "triples": 3}
    assert index.neighbors(["TOWER of London"]) == (TRIPLES[0], TRIPLES[2])
    assert index.neighbors(["England", "London", "Ada Moen"]) == (TRIPLES[1], TRIPLES[3])
    assert index.neighbors(["Paris"]) == ()


def test_anchors_by_coverage_prefer_shorter_names():
    index = EntityIndex(TRIPLES)
    assert index.anchors("London", 9) == ("London", "Tower of London", "London Bridge Road")
    assert index.anchors("the London Tower", 2) == ("Tower of London", "London")
    assert index.anchors("Paris", 3) == () and index.anchors("London", 0) == ()
    assert index.anchors("?!", 3) == () and EntityIndex(()).anchors("London", 3) == ()


def test_anchors_by_ratio_are_the_most_similar():
    index = EntityIndex(TRIPLES)
    assert index.anchors("Londn Bridge", 1, "ratio") == ("London Bridge Road",)
    assert index.anchors("Londn", 3, "ratio") == ()  # No common word.
    assert index.anchors("london", 2, "ratio") == ("London", "Tower of London")


@given(NAMES, WORDS.map(" ".join), st.integers(1, 6))
def test_anchors_equal_brute_force(names, surface, n):
    index = EntityIndex(Triple(name, "r", "zz") for name in names)
    entities = list(dict.fromkeys([names[0], "zz", *names]))
    words = set(surface.split())

    def covered(name):
        return len(words & set(name.split()))

    near = [name for name in entities if covered(name)]
    best = sorted(near, key=lambda name: (-covered(name), len(name)))  # Stable sort.
    assert index.anchors(surface, n) == tuple(best[:n])

    def ratio(name):
        return difflib.SequenceMatcher(None, surface, name).ratio()

    found = index.anchors(surface, n, "ratio")
    assert [ratio(name) for name in found] == sorted(map(ratio, near), reverse=True)[:n]


@given(st.lists(st.text(max_size=6), max_size=8), st.text(max_size=8))
def test_anchors_accept_any_names(names, surface):
    index = EntityIndex(Triple(name, "is", "x") for name in names)
    for match in ("coverage", "ratio"):
        found = index.anchors(surface, 3, match)
        assert len(found) <= 3
        assert all(
            set(name_key(surface, "unicode").split()) & set(name_key(f, "unicode").split())
            for f in found
        )
