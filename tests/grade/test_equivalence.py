"""Equivalent entities, and the links that they add to the graph."""

import pytest

from cirag_jax.errors import UserError
from cirag_jax.grade import equivalence, triples
from cirag_jax.grade.equivalence import EquivalenceSettings
from cirag_jax.grade.records import Claim, Edge, Group
from cirag_jax.llm.types import Generate, Generated
from cirag_jax.types import Triple

# Claims 0 and 1 are from document a, claim 2 from b, claim 3 from c.
CLAIMS = tuple(Claim(d, 0, f"claim {i}") for i, d in enumerate("aabc"))


def facts_of(*rows):
    return triples.facts([(Triple(*row[:3]), row[3]) for row in rows])


def nodes(graph):
    return {(edge.head, edge.tail) for edge in graph.edges}


PERRY = facts_of(
    ("Matthew Perry", "had", "high levels of ketamine in his blood", 0),
    ("high levels of ketamine", "led to", "respiratory depression", 1),
    ("USA", "has agency", "FDA", 2),
    ("United States", "borders", "Canada", 3),
)


def test_link_exact_names_are_merged_into_first_node():
    group = Group(0, ("united states", "usa"), "always")
    graph = equivalence.link(PERRY, ((0,), (1,), (2,), (3,)), [group], 12)
    assert ("united states", "fda") in nodes(graph) and ("united states", "canada") in nodes(graph)
    assert not graph.added and "usa" not in graph.surfaces
    assert graph.surfaces["united states"] == ("USA", "United States")
    assert graph.same_as["united states"] == ("united states", "usa")


def test_link_context_names_share_edges_within_cluster():
    pair = ("high levels of ketamine", "high levels of ketamine in his blood")
    graph = equivalence.link(PERRY, ((0, 1), (2, 3)), [Group(0, pair, "context")], 12)
    assert graph.own == tuple(Edge(i, f.head_id, f.tail_id) for i, f in enumerate(PERRY))
    assert set(graph.added) == {
        Edge(0, "matthew perry", "high levels of ketamine"),
        Edge(1, "high levels of ketamine in his blood", "respiratory depression"),
    }
    elsewhere = equivalence.link(PERRY, ((0, 1), (2, 3)), [Group(1, pair, "context")], 12)
    assert not elsewhere.added


def test_link_replaces_both_ends_of_an_edge():
    facts = facts_of(("a", "r", "b", 0))
    groups = [Group(0, ("a", "x"), "context"), Group(0, ("b", "y"), "context")]
    graph = equivalence.link(facts, ((0,),), groups, 12)
    assert nodes(graph) == {("a", "b"), ("a", "y"), ("x", "b"), ("x", "y")}


def test_graph_links_name_the_equivalence():
    facts = facts_of(
        ("a", "r", "b", 0), ("b", "r", "c", 0), ("the c", "r", "d", 1), ("d prime", "r", "e", 1)
    )
    groups = [Group(0, ("c", "the c"), "always"), Group(0, ("d", "d prime"), "context")]
    graph = equivalence.link(facts, ((0, 1),), groups, 12)
    path = [Edge(0, "a", "b"), Edge(1, "b", "c"), Edge(2, "c", "d"), Edge(3, "d", "e")]
    assert set(path) <= set(graph.edges)
    assert graph.links(path) == ("stated", "exact", "context")
    assert graph.is_stated(path) and not graph.is_stated(path[3:])


def test_link_joins_exact_groups_with_shared_name():
    first, members, dissolved = equivalence.joined([("c", "b"), ("x", "y"), ("b", "a")], 12)
    assert first == {"a": "a", "b": "a", "c": "a", "x": "x", "y": "x"}
    assert members == {"a": ("a", "b", "c"), "x": ("x", "y")} and dissolved == 0


def test_link_drops_and_counts_large_groups():
    facts = facts_of(*((f"n{i}", "r", f"m{i}", 0) for i in range(5)))
    whole = tuple(sorted({end for fact in facts for end in (fact.head_id, fact.tail_id)}))
    for kind in ("always", "context"):
        graph = equivalence.link(facts, ((0,),), [Group(0, whole, kind)], 5)
        assert len(graph.own) == 5 and not graph.added
        assert graph.problems == {"merges_too_much": 1}
    chain = [Group(0, pair, "always") for pair in zip(whole, whole[1:], strict=False)]
    graph = equivalence.link(facts, ((0,),), chain, 5)
    assert len(graph.own) == 5 and graph.problems == {"merges_too_much": 1}


def test_link_drops_self_loops():
    facts = facts_of(("the mill", "is", "mill", 0), ("mill", "in", "Osk", 0))
    graph = equivalence.link(facts, ((0,),), [Group(0, ("mill", "the mill"), "always")], 12)
    assert nodes(graph) == {("mill", "osk")} and graph.problems == {"self_loop": 1}


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        ([("The Osk Mill", "r", "a", 0), ("Osk Mill", "r", "b", 1)],
         [(("osk mill", "the osk mill"), "always")]),
        ([("The mill", "r", "a", 0), ("mill", "r", "b", 1)], []),
        ([("St. Osk", "r", "a", 0), ("St Osk", "r", "b", 2)], [(("st osk", "st. osk"), "always")]),
        ([("NASA", "r", "a", 0), ("National Air and Space Administration", "r", "b", 2)],
         [(("nasa", "national air and space administration"), "always")]),
        # An acronym of two names is ambiguous.
        ([("AB", "r", "a", 0), ("Ann Bell", "r", "b", 0), ("Ada Byrd", "r", "c", 0)], []),
        # A surname matches a full name only in the same document.
        ([("Ann Bell", "r", "a", 0), ("Bell", "r", "b", 1)], [(("bell", "ann bell"), "context")]),
        ([("Ann Bell", "r", "a", 0), ("Bell", "r", "b", 2)], []),
        ([("Ann Bell", "r", "a", 0), ("Bob Bell", "r", "b", 1), ("Bell", "r", "c", 1)], []),
        # The two ends of a triple are never equivalent.
        ([("Ada Bell", "is a sister of", "Bell", 0)], []),
        ([("Western Osk", "r", "a", 0), ("Osk", "r", "b", 0)], []),
        ([("Osk", "r", "a", 0), ("Osk Report", "r", "b", 0), ("mill of Osk", "r", "c", 0)], []),
        ([("Gold Coast", "r", "a", 0), ("Old Gold Coast", "r", "b", 0)], []),
        ([("1.5", "r", "a", 0), ("15", "r", "b", 0)], []),
    ],
)  # fmt: skip
def test_by_rules_examples(rows, groups):
    assert equivalence.by_rules(facts_of(*rows), CLAIMS) == groups


def drive(text, finish="stop"):
    settings = EquivalenceSettings()
    program = equivalence.find(PERRY, CLAIMS, settings)
    request = next(program)
    assert isinstance(request, Generate) and request.role == "matcher"
    assert "Triple: USA|has agency|FDA Claim: claim 2" in request.messages[-1].text
    with pytest.raises(StopIteration) as end:
        program.send(Generated(text, finish))
    return end.value.value


def test_find_by_model_maps_names_to_nodes():
    result = drive('[United States|usa|"always"]\n[FDA|Canada|"context"]')
    assert result["groups"] == [
        [["united states", "usa"], "always"],
        [["canada", "fda"], "context"],
    ]
    assert result["problems"] == []
    assert drive("[", "length") == {"groups": [], "problems": ["no_groups", "truncated"]}


def test_parts_split_large_and_skip_tiny_clusters():
    facts = facts_of(*((f"n{i}", "r", f"m{i}", i) for i in range(5)))
    small = EquivalenceSettings(claims=2)
    parts = list(equivalence.parts(((0, 1, 2, 3, 4), (0,)), facts, small))
    assert parts == [(0, (0, 1)), (0, (2, 3))]
    whole = EquivalenceSettings(kind="rules", claims=2)
    assert list(equivalence.parts(((0, 1, 2, 3, 4),), facts, whole)) == [(0, (0, 1, 2, 3, 4))]


@pytest.mark.parametrize("fields", [{"kind": "magic"}, {"most_names": 1}, {"claims": 0}])
def test_settings_reject_invalid_values(fields):
    with pytest.raises(UserError, match="config.equivalence"):
        EquivalenceSettings(**fields)
