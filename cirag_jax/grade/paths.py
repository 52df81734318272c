"""Paths through the graph: chains of facts that become questions (section 3.2)."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.grade.records import Edge, Path, extra
from cirag_jax.types import Count, PositiveInt
from cirag_jax.validation import check_fields

Nodes = tuple[str, ...]

_MOST_PATHS = 64  # Paths of a pair of ends that are tried; further ones are sampled.


@dataclasses.dataclass(frozen=True)
class PathSettings:
    """Settings for drawing paths.

    Attributes:
      kind: shortest (paper: no shorter path connects the same ends), or simple (no repeated nodes).
      hops: lengths of the paths, in edges.
      per_hop: number of paths of each length; 0 means all.
      most_per_start: maximum number of paths with the same first node, over all lengths; 0 means no
        limit.
      most_per_end: maximum number of paths with the same length and last node; 0 means no limit.
      most_candidates: maximum number of pairs of ends of each length, sampled randomly from all
        pairs that a path connects.
      most_per_source: maximum number of paths to enumerate from one node; 0 means all.
      seed: seed for sampling.
    """

    kind: Literal["shortest", "simple"] = "shortest"
    hops: tuple[int, ...] = (2, 3, 4, 5)
    per_hop: Count = 400
    most_per_start: Count = 0
    most_per_end: Count = 0
    most_candidates: PositiveInt = 100_000
    most_per_source: Count = 200_000
    seed: int = 42

    def __post_init__(self):
        check_fields(self, prefix="config.paths.")
        if not self.hops or min(self.hops) < 1:
            raise UserError("config.paths.hops must have one or more numbers, each at least 1.")


def node_paths(
    edges: Iterable[Edge], settings: PathSettings, cut_sources: list[str] | None = None
) -> Iterator[Nodes]:
    """Yields the nodes of each path whose length is in ``settings.hops``.

    The order of the paths depends on the order of ``edges``. Appends to ``cut_sources`` the nodes
    with more than ``settings.most_per_source`` paths.
    """
    networkx = extra("networkx")
    graph = networkx.DiGraph()
    graph.add_edges_from((edge.head, edge.tail) for edge in edges)
    paths_from = _shortest if settings.kind == "shortest" else _simple
    hops, most = frozenset(settings.hops), max(settings.hops)
    for source in graph:
        paths = paths_from(networkx, graph, source, most)
        for nodes in itertools.islice(paths, settings.most_per_source or None):
            if len(nodes) - 1 in hops:
                yield nodes
        if cut_sources is not None and next(paths, None) is not None:
            cut_sources.append(source)


def _shortest(networkx: Any, graph: Any, source: str, most: int) -> Iterator[Nodes]:
    """Yields all shortest paths of at most ``most`` edges from a node."""
    predecessors = networkx.predecessor(graph, source, cutoff=most)

    def paths_to(node: str) -> Iterator[Nodes]:
        if node == source:
            yield (source,)
        for previous in predecessors[node]:
            for nodes in paths_to(previous):
                yield (*nodes, node)

    return (nodes for node in predecessors if node != source for nodes in paths_to(node))


def _simple(networkx: Any, graph: Any, source: str, most: int) -> Iterator[Nodes]:
    """Yields all paths of at most ``most`` edges from a node without repeated nodes."""
    others = [node for node in graph if node != source]
    paths = networkx.all_simple_paths(graph, source, others, cutoff=most)
    return (tuple(nodes) for nodes in paths)


@dataclasses.dataclass(frozen=True)
class DrawnPaths:
    """Drawn paths, grouped by length.

    Attributes:
      paths: the paths.
      candidates: length -> number of paths in the graph.
      reasons: length -> reason for rejecting a pair of ends -> count.
      cut_sources: number of nodes whose paths were not all enumerated.
    """

    paths: tuple[Path, ...]
    candidates: dict[int, int]
    reasons: dict[int, dict[str, int]]
    cut_sources: int


def draw(
    edges: Sequence[Edge],
    settings: PathSettings,
    usable: Callable[[Path], str | None] = lambda path: None,
) -> DrawnPaths:
    """Draws paths of every length; of one length, at most one path for each pair of ends.

    First pairs of ends are drawn, then a path between each pair's ends (released code), so that
    pairs with many paths are not drawn more often.

    Args:
      edges: edges of the graph; their order influences the draw. Among parallel edges, the first
        usable edge is taken.
      settings: settings of the paths.
      usable: returns the reason why a path cannot be used, or None.
    """
    rng = np.random.default_rng(settings.seed)
    samples: dict[int, list[_Connection]] = {hops: [] for hops in settings.hops}
    num_paths: collections.Counter[int] = collections.Counter()
    num_pairs: collections.Counter[int] = collections.Counter()
    cut_sources: list[str] = []
    # The paths of a pair follow each other, because all paths of a source do.
    for _, group in itertools.groupby(node_paths(edges, settings, cut_sources), lambda n: n[0]):
        connections: dict[tuple[int, str], _Connection] = {}
        for nodes in group:
            hops = len(nodes) - 1
            num_paths[hops] += 1
            connection = connections.setdefault((hops, nodes[-1]), _Connection())
            connection.count += 1
            _sample(connection.paths, nodes, connection.count, _MOST_PATHS, rng)
        for (hops, _), connection in connections.items():
            num_pairs[hops] += 1
            sample = samples[hops]
            _sample(sample, connection, num_pairs[hops], settings.most_candidates, rng)
    between: dict[tuple[str, str], list[Edge]] = collections.defaultdict(list)
    for edge in edges:
        between[edge.head, edge.tail].append(edge)
    paths: list[Path] = []
    reasons: dict[int, dict[str, int]] = {}
    starts: collections.Counter[str] = collections.Counter()
    for hops, candidates in samples.items():
        rejected: collections.Counter[str] = collections.Counter()
        ends: collections.Counter[str] = collections.Counter()
        drawn = 0
        for index in rng.permutation(len(candidates)):
            if settings.per_hop and drawn >= settings.per_hop:
                break
            parallel = candidates[index].paths
            start, end = parallel[0][0], parallel[0][-1]
            if settings.most_per_start and starts[start] >= settings.most_per_start:
                rejected["start_used_up"] += 1
            elif settings.most_per_end and ends[end] >= settings.most_per_end:
                rejected["end_used_up"] += 1
            else:
                order = rng.permutation(len(parallel))
                path, reason = _first_usable([parallel[i] for i in order], between, usable)
                if path is None:
                    rejected[reason] += 1
                    continue
                paths.append(path)
                drawn += 1
                starts[start] += 1
                ends[end] += 1
        reasons[hops] = dict(rejected)
    candidate_counts = {hops: num_paths[hops] for hops in settings.hops}
    return DrawnPaths(tuple(paths), candidate_counts, reasons, len(cut_sources))


@dataclasses.dataclass
class _Connection:
    """The paths of one length between two ends: a sample, and their number."""

    paths: list[Nodes] = dataclasses.field(default_factory=list)
    count: int = 0


def _sample(sample: list[Any], item: Any, count: int, most: int, rng: np.random.Generator) -> None:
    """Adds the ``count``-th item to a uniform sample of at most ``most`` (reservoir sampling)."""
    if len(sample) < most:
        sample.append(item)
    elif (index := int(rng.integers(count))) < most:
        sample[index] = item


def _first_usable(
    parallel: Iterable[Nodes],
    between: dict[tuple[str, str], list[Edge]],
    usable: Callable[[Path], str | None],
) -> tuple[Path | None, str]:
    """Returns the first usable path over parallel edges, or why the first path cannot be used."""
    first_reason = ""
    for nodes in parallel:
        choices = itertools.product(*(between[pair] for pair in itertools.pairwise(nodes)))
        for path in itertools.islice(choices, 64):
            reason = usable(path)
            if reason is None:
                return path, ""
            first_reason = first_reason or reason
    return None, first_reason
