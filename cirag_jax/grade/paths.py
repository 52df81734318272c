"""Paths through the graph: chains of facts of which questions are asked (section 3.2)."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.grade.records import Edge, Path, extra

Nodes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PathSettings:
    """Which paths are drawn.

    Attributes:
      kind: shortest (the paper: no chain of fewer facts joins its ends) or simple.
      hops: lengths.
      per_hop: paths of each length; 0: all.
      most_per_start: of them with one first node, of all lengths; 0: any number.
      most_per_end: of them with one last node; 0: any number.
      most_candidates: paths of a length among which is drawn, themselves drawn of all.
      most_per_source: paths that are looked at from one node; 0: all.
      seed: of the draw.
    """

    kind: Literal["shortest", "simple"] = "shortest"
    hops: tuple[int, ...] = (2, 3, 4, 5)
    per_hop: int = 400
    most_per_start: int = 0
    most_per_end: int = 0
    most_candidates: int = 100_000
    most_per_source: int = 200_000
    seed: int = 42

    def __post_init__(self):
        check_choice("config.paths.kind", self.kind, ("shortest", "simple"))
        sizes = ("per_hop", "most_per_start", "most_per_end", "most_per_source")
        check_at_least(0, self, *sizes, prefix="config.paths.")
        check_at_least(1, self, "most_candidates", prefix="config.paths.")
        if not self.hops or min(self.hops) < 1:
            raise UserError("config.paths.hops must be numbers of at least 1.")


def node_paths(
    edges: Iterable[Edge], settings: PathSettings, cut: list[str] | None = None
) -> Iterator[Nodes]:
    """The nodes of all paths of the lengths wanted, in an order that the edges' order decides.

    ``cut`` gets the nodes from which more paths lead than ``settings.most_per_source``.
    """
    networkx = extra("networkx")
    found = networkx.DiGraph()
    found.add_edges_from((edge.head, edge.tail) for edge in edges)
    walk = _shortest if settings.kind == "shortest" else _simple
    wanted, most = frozenset(settings.hops), max(settings.hops)
    for source in found:
        paths = walk(networkx, found, source, most)
        for nodes in itertools.islice(paths, settings.most_per_source or None):
            if len(nodes) - 1 in wanted:
                yield nodes
        if cut is not None and next(paths, None) is not None:
            cut.append(source)


def _shortest(networkx: Any, graph: Any, source: str, most: int) -> Iterator[Nodes]:
    """All shortest paths of at most ``most`` edges from a node."""
    before = networkx.predecessor(graph, source, cutoff=most)

    def to(node: str) -> Iterator[Nodes]:
        if node == source:
            yield (source,)
        for previous in before[node]:
            for nodes in to(previous):
                yield (*nodes, node)

    return (nodes for node in before if node != source for nodes in to(node))


def _simple(networkx: Any, graph: Any, source: str, most: int) -> Iterator[Nodes]:
    """All paths of at most ``most`` edges from a node that meet no node twice."""
    others = [node for node in graph if node != source]
    paths = networkx.all_simple_paths(graph, source, others, cutoff=most)
    return (tuple(nodes) for nodes in paths)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Paths in the order of their lengths, and why candidates were passed over -> how many.

    ``cut_sources`` is the number of nodes of which not all paths were looked at.
    """

    paths: tuple[Path, ...]
    candidates: dict[int, int]
    reasons: dict[int, dict[str, int]]
    cut_sources: int


def draw(
    edges: Sequence[Edge],
    settings: PathSettings,
    usable: Callable[[Path], str | None] = lambda path: None,
) -> Drawn:
    """Draws paths of every length, at most one for a pair of ends.

    Where facts run side by side the first that is usable is taken.

    Args:
      edges: of the graph; an order that decides.
      settings: what is drawn.
      usable: why a path cannot be used; None: it can.
    """
    rng = np.random.default_rng(settings.seed)
    held: dict[int, list[Nodes]] = {hops: [] for hops in settings.hops}
    seen: collections.Counter[int] = collections.Counter()
    cut: list[str] = []
    for nodes in node_paths(edges, settings, cut):
        _hold(held[len(nodes) - 1], nodes, seen, settings.most_candidates, rng)
    between: dict[tuple[str, str], list[Edge]] = collections.defaultdict(list)
    for edge in edges:
        between[edge.head, edge.tail].append(edge)
    paths: list[Path] = []
    reasons: dict[int, dict[str, int]] = {}
    starts: collections.Counter[str] = collections.Counter()
    for hops, candidates in held.items():
        why: collections.Counter[str] = collections.Counter()
        ends: collections.Counter[str] = collections.Counter()
        pairs: set[tuple[str, str]] = set()
        drawn = 0
        for place in rng.permutation(len(candidates)):
            if settings.per_hop and drawn >= settings.per_hop:
                break
            nodes = candidates[place]
            start, end = nodes[0], nodes[-1]
            if (start, end) in pairs:
                why["same_ends"] += 1
            elif settings.most_per_start and starts[start] >= settings.most_per_start:
                why["start_used_up"] += 1
            elif settings.most_per_end and ends[end] >= settings.most_per_end:
                why["end_used_up"] += 1
            else:
                path, reason = _first_usable(nodes, between, usable)
                if path is None:
                    why[reason] += 1
                    continue
                paths.append(path)
                drawn += 1
                pairs.add((start, end))
                starts[start] += 1
                ends[end] += 1
        reasons[hops] = dict(why)
    counts = {hops: seen[hops] for hops in settings.hops}
    return Drawn(tuple(paths), counts, reasons, len(cut))


def _hold(
    held: list[Nodes], nodes: Nodes, seen: collections.Counter[int], most: int, rng: Any
) -> None:
    """Keeps a uniform sample of what comes (reservoir sampling)."""
    hops = len(nodes) - 1
    seen[hops] += 1
    if len(held) < most:
        held.append(nodes)
    elif (place := int(rng.integers(seen[hops]))) < most:
        held[place] = nodes


def _first_usable(
    nodes: Nodes,
    between: dict[tuple[str, str], list[Edge]],
    usable: Callable[[Path], str | None],
) -> tuple[Path | None, str]:
    """The first choice among facts side by side that can be used; else why the first cannot."""
    first = ""
    choices = itertools.product(*(between[pair] for pair in itertools.pairwise(nodes)))
    for path in itertools.islice(choices, 64):
        reason = usable(path)
        if reason is None:
            return path, ""
        first = first or reason
    return None, first
