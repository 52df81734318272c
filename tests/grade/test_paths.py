"""Paths compared with brute force, and the random selection of paths."""

import itertools
import random

import pytest

from cirag_jax import errors
from cirag_jax.errors import UserError
from cirag_jax.grade import paths, records
from cirag_jax.grade.paths import PathSettings
from cirag_jax.grade.records import Edge

pytest.importorskip("networkx")


def edges_of(*pairs):
    return [Edge(fact, *pair) for fact, pair in enumerate(pairs)]


def brute_force_paths(edges, hops, shortest):
    """Returns all simple paths of these lengths, or only the shortest ones between two nodes."""
    nodes = sorted({node for edge in edges for node in (edge.head, edge.tail)})
    pairs = {(edge.head, edge.tail) for edge in edges}
    walks = [
        walk
        for length in range(2, max(hops) + 2)
        for walk in itertools.permutations(nodes, length)
        if all(pair in pairs for pair in itertools.pairwise(walk))
    ]
    least = {}
    for walk in walks:
        ends = walk[0], walk[-1]
        least[ends] = min(least.get(ends, len(walk)), len(walk))
    return {
        walk
        for walk in walks
        if len(walk) - 1 in hops and (not shortest or len(walk) == least[walk[0], walk[-1]])
    }


@pytest.mark.parametrize("kind", ["shortest", "simple"])
@pytest.mark.parametrize("seed", range(6))
def test_node_paths_match_brute_force(kind, seed):
    rng = random.Random(seed)
    pairs = {(rng.randrange(7), rng.randrange(7)) for _ in range(5 + 3 * seed)}
    edges = edges_of(*((f"n{a}", f"n{b}") for a, b in sorted(pairs) if a != b))
    for hops in ((2, 3, 4, 5), (1,), (3, 5)):
        result = list(paths.node_paths(edges, PathSettings(kind=kind, hops=hops)))
        assert len(result) == len(set(result))
        assert set(result) == brute_force_paths(edges, hops, kind == "shortest")


def test_draw_tries_parallel_facts_once_per_pair_of_ends():
    edges = edges_of(("a", "b"), ("a", "b"), ("b", "c"), ("a", "x"), ("x", "c"))
    settings = PathSettings(hops=(2,), per_hop=0)
    drawn = paths.draw(edges, settings, lambda path: None if path[0].fact == 1 else "first")
    assert [tuple(edge.fact for edge in path) for path in drawn.paths] == [(1, 2)]
    assert drawn.candidates == {2: 2}
    assert drawn.reasons[2] == {}
    drawn = paths.draw(edges, settings, lambda path: "never")
    assert drawn.paths == () and drawn.reasons[2] == {"never": 1}


def test_draw_pairs_with_parallel_paths_are_not_preferred():
    """One pair of ends has 20 paths, and 20 pairs have one path each."""
    edges = edges_of(
        *(pair for i in range(20) for pair in (("a", f"m{i}"), (f"m{i}", "z"))),
        *(pair for i in range(20) for pair in ((f"s{i}", f"h{i}"), (f"h{i}", f"e{i}"))),
    )
    draws = [
        paths.draw(edges, PathSettings(hops=(2,), per_hop=1, seed=seed)).paths[0]
        for seed in range(200)
    ]
    of_many = [path for path in draws if path[0].head == "a"]
    assert 2 <= len(of_many) <= 25  # 1 of 21 pairs: 9.5 expected; of paths, 100 would be.
    assert len({path[0].tail for path in of_many}) > 1


def test_draw_counts_lengths_without_paths():
    drawn = paths.draw(edges_of(("a", "b"), ("b", "c")), PathSettings())
    assert len(drawn.paths) == 1 and drawn.candidates == {2: 1, 3: 0, 4: 0, 5: 0}
    assert paths.draw([], PathSettings()).paths == ()


def star(count):
    return edges_of(*((f"s{i}", "hub") for i in range(count)), ("hub", "end"))


def test_draw_limits_paths_per_start_and_end():
    drawn = paths.draw(star(9), PathSettings(hops=(2,), most_per_end=4))
    assert len(drawn.paths) == 4 and drawn.reasons == {2: {"end_used_up": 5}}
    fan = edges_of(("a", "hub"), *(("hub", f"e{i}") for i in range(9)))
    drawn = paths.draw(fan, PathSettings(hops=(2,), most_per_start=2))
    assert len(drawn.paths) == 2 and drawn.reasons == {2: {"start_used_up": 7}}


@pytest.mark.parametrize("kind", ["shortest", "simple"])
def test_draw_counts_cut_sources(kind):
    """Sources with too many paths are cut; ``a`` has six paths of one or two edges, ``b`` five."""
    edges = edges_of(("a", "b"), *(("b", f"e{i}") for i in range(5)))
    for most, wanted in ((4, 2), (5, 1), (6, 0), (0, 0)):
        settings = PathSettings(kind=kind, hops=(2,), per_hop=0, most_per_source=most)
        drawn = paths.draw(edges, settings)
        assert drawn.cut_sources == wanted
        # Shortest paths are enumerated by distance.
        assert kind == "simple" or drawn.candidates == {2: min(most or 6, 6) - 1}


def test_draw_is_reproducible_and_has_requested_number():
    settings = PathSettings(hops=(2,), per_hop=5)
    first = paths.draw(star(60), settings)
    assert len(first.paths) == 5 and first == paths.draw(star(60), settings)
    assert first.paths != paths.draw(star(60), PathSettings(hops=(2,), per_hop=5, seed=1)).paths


def test_draw_samples_candidates_uniformly():
    result = set()
    for seed in range(40):
        settings = PathSettings(hops=(2,), most_candidates=3, seed=seed, per_hop=0)
        drawn = paths.draw(star(12), settings)
        assert len(drawn.paths) == 3 and drawn.candidates == {2: 12}
        result |= {path[0].head for path in drawn.paths}
    assert len(result) == 12


@pytest.mark.parametrize(
    "fields", [{"kind": "long"}, {"hops": ()}, {"hops": (0,)}, {"per_hop": -1}]
)
def test_settings_reject_invalid_values(fields):
    with pytest.raises(UserError, match="config.paths"):
        PathSettings(**fields)


def test_draw_reports_missing_library(monkeypatch):
    def gone(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(errors.importlib, "import_module", gone)
    with pytest.raises(
        UserError, match="needs sklearn, .* run: pip install -r requirements-grade.txt"
    ):
        records.extra("sklearn.mixture")
