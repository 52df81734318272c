"""Entities that mean the same, and the graph with the links that this adds (section 3.1).

*Exact* equivalence (``always``) holds everywhere: groups of all clusters that share a name are
joined, and the first of their names stands for all. *Contextual* equivalence (``context``) holds in
its cluster: there every edge of one entity is an edge of the other, too.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

from cirag_jax.errors import check_at_least, check_choice
from cirag_jax.grade import prompts
from cirag_jax.grade.clusters import Clusters
from cirag_jax.grade.records import Claim, Edge, Fact, Group, Kind
from cirag_jax.runtime.requests import Generate, Generated, Program

_ARTICLE = re.compile(r"^(the|a|an) ", re.IGNORECASE)
_REGION = re.compile(
    r"((north|south|east|west|central)\w*|greater|upper|lower|inner|outer|new|old|colonial|modern|"
    r"ancient|british|french|spanish|dutch|german) "
)
_POINTS = re.compile(r"[.,'’\"“”]")
_ACRONYM = re.compile(r"\b(?:[A-Z]\.?){2,6}(?![\w.])")
_FULL_NAME = re.compile(r"[A-Z][\w'’-]+(?: [A-Z][\w'’.-]*){0,3}")
SMALL_WORDS = frozenset({"the", "a", "an", "of", "and", "for", "in", "on", "de", "la", "du", "des"})


@dataclasses.dataclass(frozen=True)
class EquivalenceSettings:
    """Who finds equivalent entities.

    Attributes:
      kind: model, rules, or off.
      claims: claims that one request shows; a larger cluster is shown in parts.
      max_tokens: most new tokens of its answer.
      most_names: of a group, exact groups joined; a larger one merges what it should not, and is
        dropped.
    """

    kind: Literal["model", "rules", "off"] = "model"
    claims: int = 40
    max_tokens: int = 512
    most_names: int = 12

    def __post_init__(self):
        check_choice("config.equivalence.kind", self.kind, ("model", "rules", "off"))
        check_at_least(1, self, "claims", "max_tokens", prefix="config.equivalence.")
        check_at_least(2, self, "most_names", prefix="config.equivalence.")

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of a language model that is asked."""
        return ("matcher",) if self.kind == "model" else ()


# ------------------------------------------------------------------------------- finding the groups


class Outcome(TypedDict):
    """What `find` gives."""

    groups: list[tuple[list[str], Kind]]
    problems: list[str]


def find(
    facts: Sequence[Fact], claims: Sequence[Claim], settings: EquivalenceSettings
) -> Program[Mapping[str, Any]]:
    """The groups of one cluster (A.9.4), by a language model or by rules.

    Args:
      facts: of the cluster's claims.
      claims: all.
      settings: how.

    Returns:
      ``groups``: nodes and kind; ``problems``: see `grade.prompts.parse_groups`.
    """
    if settings.kind == "rules":
        return {"groups": [list(group) for group in by_rules(facts, claims)], "problems": []}
    nodes = {name: node for fact in reversed(facts) for name, node in _ends(fact)}
    shown = [(fact.parts, claims[fact.claim].text) for fact in facts]
    messages = prompts.same_messages(shown)
    told: Generated = yield Generate(messages, "matcher", settings.max_tokens)
    found = prompts.parse_groups(told.text, told.finish_reason, list(nodes))
    groups = [[sorted({nodes[name] for name in names}), kind] for names, kind in found.groups]
    return {"groups": [g for g in groups if len(g[0]) > 1], "problems": list(found.problems)}


def parts(
    clusters: Clusters, facts: Sequence[Fact], settings: EquivalenceSettings
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """What is looked at together: (cluster, places of untyped facts), of three nodes or more."""
    by_claim = facts_of_claims(facts)
    size = settings.claims if settings.kind == "model" else 0
    for cluster, claims in enumerate(clusters):
        for first in range(0, len(claims), size or len(claims)):
            some = claims[first : first + size] if size else claims
            places = tuple(
                at for claim in some for at in by_claim.get(claim, ()) if not facts[at].type
            )
            if len({node for at in places for _, node in _ends(facts[at])}) > 2:
                yield cluster, places


def facts_of_claims(facts: Sequence[Fact]) -> Mapping[int, Sequence[int]]:
    """Claim -> the places of its facts."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    for at, fact in enumerate(facts):
        found[fact.claim].append(at)
    return found


def _ends(fact: Fact) -> tuple[tuple[str, str], tuple[str, str]]:
    return (fact.head, fact.head_id), (fact.tail, fact.tail_id)


def by_rules(
    facts: Sequence[Fact], claims: Sequence[Claim]
) -> list[tuple[tuple[str, ...], Literal["always", "context"]]]:
    """The groups that rules find in a cluster.

    Exact: proper names that differ in an article or in points, and an acronym beside the one name
    that it abbreviates.
    Contextual: in one document, a surname beside the one full name that ends in it. Not a part of a
    region beside it; and what a triple relates are two things.
    """
    names = {node: name for fact in reversed(facts) for name, node in _ends(fact)}
    apart = {frozenset((fact.head_id, fact.tail_id)) for fact in facts}
    always = [*_spellings(names), *_acronyms(names)]
    same = {frozenset(pair) for pair in always}
    context = [pair for pair in _surnames(facts, claims) if frozenset(pair) not in same]
    kinds = [*((pair, "always") for pair in always), *((pair, "context") for pair in context)]
    return [(pair, kind) for pair, kind in kinds if frozenset(pair) not in apart]


def _spellings(names: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    by_key: dict[str, list[str]] = collections.defaultdict(list)
    proper = (n for n in sorted(names) if any(c.isupper() for c in _ARTICLE.sub("", names[n])))
    for node in proper:
        key = _ARTICLE.sub("", node)
        key = key if re.search(r"\d", key) else " ".join(_POINTS.sub("", key).split())
        by_key[key or node].append(node)
    return (tuple(nodes) for nodes in by_key.values() if len(nodes) > 1)


def _acronyms(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    full: dict[str, set[str]] = collections.defaultdict(set)
    for node, name in names.items():
        words = [word for word in re.findall(r"\w+", name) if word.casefold() not in SMALL_WORDS]
        if len(words) > 1 and all(word[0].isupper() for word in words):
            full["".join(word[0] for word in words).upper()].add(node)
    for node, name in sorted(names.items()):
        found = full.get(name.replace(".", ""), set()) - {node}
        if _ACRONYM.fullmatch(name) and len(found) == 1:
            yield node, next(iter(found))


def _surnames(facts: Sequence[Fact], claims: Sequence[Claim]) -> Iterator[tuple[str, str]]:
    by_document: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for fact in facts:
        for name, node in _ends(fact):
            if _FULL_NAME.fullmatch(name):
                by_document[claims[fact.claim].document][node] = None
    found: dict[tuple[str, str], None] = {}
    for nodes in by_document.values():
        for short in (node for node in nodes if " " not in node):
            longer = [node for node in nodes if node.endswith(f" {short}")]
            if len(longer) == 1 and not _REGION.match(longer[0]):
                found[short, longer[0]] = None
    return iter(found)


# ------------------------------------------------------------------------------------ applying them


@dataclasses.dataclass(frozen=True)
class Graph:
    """Facts as edges between nodes.

    Attributes:
      facts: all.
      own: edges that facts state, one a fact.
      added: distinct other edges, by contextual equivalence.
      surfaces: node -> its names as facts have them, that of its first fact first.
      same_as: node -> the names that always mean it.
      problems: why groups were not applied -> how many.
    """

    facts: Sequence[Fact]
    own: tuple[Edge, ...]
    added: tuple[Edge, ...]
    surfaces: Mapping[str, tuple[str, ...]]
    same_as: Mapping[str, tuple[str, ...]]
    problems: Mapping[str, int]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All of them."""
        return self.own + self.added

    def name(self, node: str) -> str:
        """What to call a node."""
        return self.surfaces[node][0]

    def is_stated(self, path: Sequence[Edge]) -> bool:
        """Whether facts themselves have both ends of a path: else it is another one's copy."""
        first, last = (self._own[edge.fact] for edge in (path[0], path[-1]))
        return first.head == path[0].head and last.tail == path[-1].tail

    @functools.cached_property
    def _own(self) -> Mapping[int, Edge]:
        return {edge.fact: edge for edge in self.own}

    def links(self, path: Sequence[Edge]) -> tuple[str, ...]:
        """How every edge of a path is joined to the next.

        ``stated``: both facts have the node itself; ``exact``: only exact equivalence makes their
        nodes one; ``context``: only contextual equivalence does.
        """
        pairs = itertools.pairwise(path)
        return tuple(self._link(one, other) for one, other in pairs)

    def _link(self, one: Edge, other: Edge) -> str:
        left, right = self.facts[one.fact], self.facts[other.fact]
        if left.tail_id == right.head_id:
            return "stated"
        same = {one.tail, *self.same_as.get(one.tail, ())}
        return "exact" if {left.tail_id, right.head_id} <= same else "context"


def link(
    facts: Sequence[Fact], clusters: Clusters, groups: Sequence[Group], most_names: int
) -> Graph:
    """The graph of facts with the groups applied.

    An exact group's nodes become its first in alphabetical order; edges of a node to itself go. A
    group of more than ``most_names`` nodes, exact ones joined, is left out (``merges_too_much``).
    """
    problems: collections.Counter[str] = collections.Counter()
    kept = [group for group in groups if len(group.nodes) <= most_names]
    problems["merges_too_much"] += len(groups) - len(kept)
    first, members, dissolved = joined(
        [group.nodes for group in kept if group.kind == "always"], most_names
    )
    problems["merges_too_much"] += dissolved
    own: list[Edge] = []
    for at, fact in enumerate(facts):
        head, tail = (first.get(node, node) for node in (fact.head_id, fact.tail_id))
        if head != tail:
            own.append(Edge(at, head, tail))
        else:
            problems["self_loop"] += 1
    added = dict.fromkeys(_mirrored(own, facts, clusters, kept, first))
    names: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for edge in own:
        names[edge.head][facts[edge.fact].head] = None
        names[edge.tail][facts[edge.fact].tail] = None
    surfaces = {node: tuple(found) for node, found in names.items()}
    counted = {name: count for name, count in problems.items() if count}
    return Graph(facts, tuple(own), tuple(added), surfaces, members, counted)


def joined(
    groups: Iterable[Sequence[str]], most_names: int
) -> tuple[dict[str, str], dict[str, tuple[str, ...]], int]:
    """Groups that share a node joined, by union-find.

    Returns:
      Node -> the first of its group; first -> its group; and how many groups were left as they
      were because they have more than ``most_names`` nodes.
    """
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = node = parent[above]
        return node

    for group in groups:
        for node in group[1:]:
            parent[root(node)] = root(group[0])
    whole: dict[str, list[str]] = collections.defaultdict(list)
    for node in sorted(parent):
        whole[root(node)].append(node)
    kept = [nodes for nodes in whole.values() if len(nodes) <= most_names]
    first = {node: nodes[0] for nodes in kept for node in nodes}
    return first, {nodes[0]: tuple(nodes) for nodes in kept}, len(whole) - len(kept)


def _mirrored(
    own: Sequence[Edge],
    facts: Sequence[Fact],
    clusters: Clusters,
    groups: Sequence[Group],
    first: Mapping[str, str],
) -> Iterator[Edge]:
    """Edges that contextual groups add, in each cluster: over the products of both ends' groups."""
    edges: dict[int, list[Edge]] = collections.defaultdict(list)
    for edge in own:
        edges[facts[edge.fact].claim].append(edge)
    by_cluster: dict[int, list[Group]] = collections.defaultdict(list)
    for group in groups:
        if group.kind == "context":
            by_cluster[group.cluster].append(group)
    for cluster, found in by_cluster.items():
        others: dict[str, dict[str, None]] = collections.defaultdict(dict)
        for group in found:
            nodes = [first.get(node, node) for node in group.nodes]
            for node in nodes:
                others[node].update(dict.fromkeys(nodes))
        for edge in (e for claim in clusters[cluster] for e in edges[claim]):
            heads = others.get(edge.head, {edge.head: None})
            tails = others.get(edge.tail, {edge.tail: None})
            for head, tail in itertools.product(heads, tails):
                if head != tail and (head, tail) != (edge.head, edge.tail):
                    yield Edge(edge.fact, head, tail)
