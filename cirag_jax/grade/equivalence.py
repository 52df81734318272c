"""Equivalent entities, and the graph of facts with the edges that equivalence adds (section 3.1).

*Exact* equivalence (``always``) is valid everywhere: groups that share a name are joined, and the
first name of a joined group becomes the common node. *Contextual* equivalence (``context``) is
valid within a cluster, where equivalent entities also get each other's edges.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from cirag_jax.grade import prompts
from cirag_jax.grade.clusters import Clusters
from cirag_jax.grade.records import Claim, Edge, Fact, Group, Kind
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.types import PositiveInt
from cirag_jax.validation import check_fields

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
    """Settings of the search for equivalent entities.

    Attributes:
      kind: search by a model or by rules, or off.
      claims: maximum number of claims per request; larger clusters are split.
      max_tokens: maximum number of new tokens of a response.
      most_names: maximum number of names in a group, after exact groups are joined. Larger groups
        are probably wrong and are dropped.
    """

    kind: Literal["model", "rules", "off"] = "model"
    claims: PositiveInt = 40
    max_tokens: PositiveInt = 512
    most_names: Annotated[int, msgspec.Meta(ge=2)] = 12

    def __post_init__(self):
        check_fields(self, prefix="config.equivalence.")

    @property
    def roles(self) -> tuple[str, ...]:
        """Returns the roles of language models in this step."""
        return ("matcher",) if self.kind == "model" else ()


# ------------------------------------------------------------------------------- finding the groups


class GroupResult(TypedDict):
    """Result of `find`."""

    groups: list[tuple[list[str], Kind]]
    problems: list[str]


def find(
    facts: Sequence[Fact], claims: Sequence[Claim], settings: EquivalenceSettings
) -> Program[Mapping[str, Any]]:
    """Finds the groups of one cluster (A.9.4), by a language model or by rules.

    ``facts`` are those of the cluster, and ``claims`` are all claims.

    Returns:
      ``groups`` (nodes and kind of each group), and ``problems`` of `grade.prompts.parse_groups`.
    """
    if settings.kind == "rules":
        return {"groups": [list(group) for group in by_rules(facts, claims)], "problems": []}
    nodes = {name: node for fact in reversed(facts) for name, node in _ends(fact)}
    messages = prompts.same_messages([(fact.parts, claims[fact.claim].text) for fact in facts])
    response: Generated = yield Generate(messages, "matcher", settings.max_tokens)
    parsed = prompts.parse_groups(response.text, response.finish_reason, list(nodes))
    groups = [[sorted({nodes[name] for name in names}), kind] for names, kind in parsed.groups]
    return {"groups": [g for g in groups if len(g[0]) > 1], "problems": list(parsed.problems)}


def parts(
    clusters: Clusters, facts: Sequence[Fact], settings: EquivalenceSettings
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the parts of clusters to search, as (cluster, indices of untyped facts).

    A part has at least three nodes.
    """
    by_claim = facts_of_claims(facts)
    for cluster, claims in enumerate(clusters):
        size = settings.claims if settings.kind == "model" else len(claims)
        for first in range(0, len(claims), size):
            indices = tuple(
                index
                for claim in claims[first : first + size]
                for index in by_claim.get(claim, ())
                if not facts[index].type
            )
            if len({node for index in indices for _, node in _ends(facts[index])}) > 2:
                yield cluster, indices


def facts_of_claims(facts: Sequence[Fact]) -> Mapping[int, Sequence[int]]:
    """Maps each claim to the indices of its facts."""
    by_claim: dict[int, list[int]] = collections.defaultdict(list)
    for index, fact in enumerate(facts):
        by_claim[fact.claim].append(index)
    return by_claim


def _ends(fact: Fact) -> tuple[tuple[str, str], tuple[str, str]]:
    return (fact.head, fact.head_id), (fact.tail, fact.tail_id)


def by_rules(facts: Sequence[Fact], claims: Sequence[Claim]) -> list[tuple[tuple[str, ...], Kind]]:
    """Finds the groups of a cluster by rules.

    Exact groups are proper names that differ only in articles or punctuation, or an acronym and the
    only name that it abbreviates. Contextual groups are a surname and the only full name in the
    same document that ends in the surname, unless the full name looks like a region ("North
    Korea"). The two ends of a triple are never equivalent.
    """
    names = {node: name for fact in reversed(facts) for name, node in _ends(fact)}
    related = {frozenset((fact.head_id, fact.tail_id)) for fact in facts}
    always: list[tuple[str, ...]] = [*_spellings(names), *_acronyms(names)]
    exact = {frozenset(pair) for pair in always}
    context = [pair for pair in _surnames(facts, claims) if frozenset(pair) not in exact]
    kinds: list[tuple[tuple[str, ...], Kind]] = [(pair, "always") for pair in always]
    kinds.extend((pair, "context") for pair in context)
    return [(pair, kind) for pair, kind in kinds if frozenset(pair) not in related]


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
        candidates = full.get(name.replace(".", ""), set()) - {node}
        if _ACRONYM.fullmatch(name) and len(candidates) == 1:
            yield node, next(iter(candidates))


def _surnames(facts: Sequence[Fact], claims: Sequence[Claim]) -> Iterator[tuple[str, str]]:
    by_document: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for fact in facts:
        for name, node in _ends(fact):
            if _FULL_NAME.fullmatch(name):
                by_document[claims[fact.claim].document][node] = None
    pairs: dict[tuple[str, str], None] = {}
    for nodes in by_document.values():
        for short in (node for node in nodes if " " not in node):
            longer = [node for node in nodes if node.endswith(f" {short}")]
            if len(longer) == 1 and not _REGION.match(longer[0]):
                pairs[short, longer[0]] = None
    return iter(pairs)


# --------------------------------------------------------------------------------------- the graph


@dataclasses.dataclass(frozen=True)
class Graph:
    """Facts as edges between nodes.

    Attributes:
      facts: all facts.
      own: edges stated by facts, at most one per fact.
      added: further distinct edges, from contextual equivalence.
      surfaces: node -> its names in facts, in the order of the facts.
      same_as: node -> all nodes of its exact group.
      problems: reason -> number of dropped groups or facts.
    """

    facts: Sequence[Fact]
    own: tuple[Edge, ...]
    added: tuple[Edge, ...]
    surfaces: Mapping[str, tuple[str, ...]]
    same_as: Mapping[str, tuple[str, ...]]
    problems: Mapping[str, int]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Returns stated and added edges."""
        return self.own + self.added

    def name(self, node: str) -> str:
        """Returns a node's name."""
        return self.surfaces[node][0]

    def is_stated(self, path: Sequence[Edge]) -> bool:
        """Returns whether facts state both ends of a path, not equivalent entities of the ends."""
        first, last = (self._own[edge.fact] for edge in (path[0], path[-1]))
        return first.head == path[0].head and last.tail == path[-1].tail

    @functools.cached_property
    def _own(self) -> Mapping[int, Edge]:
        return {edge.fact: edge for edge in self.own}

    def links(self, path: Sequence[Edge]) -> tuple[str, ...]:
        """Returns the kind of connection between each edge of a path and the next edge.

        * ``stated``: the facts of both edges share the node.
        * ``exact``: the nodes of the facts are exactly equivalent.
        * ``context``: the nodes of the facts are contextually equivalent.
        """
        return tuple(self._link(edge, following) for edge, following in itertools.pairwise(path))

    def _link(self, edge: Edge, following: Edge) -> str:
        fact, next_fact = self.facts[edge.fact], self.facts[following.fact]
        if fact.tail_id == next_fact.head_id:
            return "stated"
        exact = {edge.tail, *self.same_as.get(edge.tail, ())}
        return "exact" if {fact.tail_id, next_fact.head_id} <= exact else "context"


def link(
    facts: Sequence[Fact], clusters: Clusters, groups: Sequence[Group], most_names: int
) -> Graph:
    """Builds the graph of facts and applies the groups to it.

    The first node (alphabetically) of an exact group replaces the group's other nodes. Drops edges
    from a node to itself (``self_loop``), and groups with more than ``most_names`` nodes before or
    after exact groups are joined (``merges_too_much``).
    """
    problems: collections.Counter[str] = collections.Counter()
    kept = [group for group in groups if len(group.nodes) <= most_names]
    problems["merges_too_much"] += len(groups) - len(kept)
    first, members, dissolved = joined(
        [group.nodes for group in kept if group.kind == "always"], most_names
    )
    problems["merges_too_much"] += dissolved
    own: list[Edge] = []
    for index, fact in enumerate(facts):
        head, tail = (first.get(node, node) for node in (fact.head_id, fact.tail_id))
        if head != tail:
            own.append(Edge(index, head, tail))
        else:
            problems["self_loop"] += 1
    added = dict.fromkeys(_mirrored(own, facts, clusters, kept, first))
    names: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for edge in own:
        names[edge.head][facts[edge.fact].head] = None
        names[edge.tail][facts[edge.fact].tail] = None
    surfaces = {node: tuple(node_names) for node, node_names in names.items()}
    counts = {reason: count for reason, count in problems.items() if count}
    return Graph(facts, tuple(own), tuple(added), surfaces, members, counts)


def joined(
    groups: Iterable[Sequence[str]], most_names: int
) -> tuple[dict[str, str], dict[str, tuple[str, ...]], int]:
    """Joins groups that share a node, by union-find.

    Returns:
      A map from each node to the first node of its group, a map from each first node to its group,
      and the number of groups that were dropped because they have more than ``most_names`` nodes.
    """
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = node = parent[above]
        return node

    for group in groups:
        for node in group[1:]:
            parent[root(node)] = root(group[0])
    nodes_by_root: dict[str, list[str]] = collections.defaultdict(list)
    for node in sorted(parent):
        nodes_by_root[root(node)].append(node)
    kept = [nodes for nodes in nodes_by_root.values() if len(nodes) <= most_names]
    first = {node: nodes[0] for nodes in kept for node in nodes}
    return first, {nodes[0]: tuple(nodes) for nodes in kept}, len(nodes_by_root) - len(kept)


def _mirrored(
    own: Sequence[Edge],
    facts: Sequence[Fact],
    clusters: Clusters,
    groups: Sequence[Group],
    first: Mapping[str, str],
) -> Iterator[Edge]:
    """Yields edges from contextual groups: between all nodes equivalent to the ends of an edge."""
    edges: dict[int, list[Edge]] = collections.defaultdict(list)
    for edge in own:
        edges[facts[edge.fact].claim].append(edge)
    by_cluster: dict[int, list[Group]] = collections.defaultdict(list)
    for group in groups:
        if group.kind == "context":
            by_cluster[group.cluster].append(group)
    for cluster, cluster_groups in by_cluster.items():
        others: dict[str, dict[str, None]] = collections.defaultdict(dict)
        for group in cluster_groups:
            nodes = [first.get(node, node) for node in group.nodes]
            for node in nodes:
                others[node].update(dict.fromkeys(nodes))
        for edge in (e for claim in clusters[cluster] for e in edges[claim]):
            heads = others.get(edge.head, {edge.head: None})
            tails = others.get(edge.tail, {edge.tail: None})
            for head, tail in itertools.product(heads, tails):
                if head != tail and (head, tail) != (edge.head, edge.tail):
                    yield Edge(edge.fact, head, tail)
