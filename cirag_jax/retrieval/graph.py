"""HippoRAG 2's graph of entities and passages (Gutiérrez et al., ICML 2025).

The entities of all triples and the passages are nodes. Edges join the two entities of a triple, a
passage with the entities of its triples, and entities whose names have similar embeddings
(synonyms). A question is linked to its nearest triples. A random walk that restarts at their
entities, and with a low weight at similar passages, ranks the passages.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from cirag_jax.datasets.records import convert
from cirag_jax.errors import UserError
from cirag_jax.identity import check_same, of_records
from cirag_jax.io import read_json, replacing, write_json
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.retrieval.index import MAY_DIFFER
from cirag_jax.retrieval.links import normalized, page_rank
from cirag_jax.retrieval.rankers import TripleForm, TripleText
from cirag_jax.retrieval.search import ExactIndex, accelerators, save_array
from cirag_jax.retrieval.synonyms import no_synonyms, synonyms
from cirag_jax.triples.normalization import Normalization, triple_key
from cirag_jax.triples.store import content_hash
from cirag_jax.types import Config, Count, Passage, Triple, UnitInterval
from cirag_jax.validation import check_fields

MANIFEST = "manifest.json"
FORMAT = 1

_MIN_LETTERS = 3  # Shorter names get no synonyms, as in the released code.
_BLOCK = 1 << 24  # Maximum number of probabilities in memory: 64 MiB.


@dataclasses.dataclass(frozen=True, slots=True)
class GraphOptions:
    """Options of the graph (documented in configs/retrievers.py)."""

    synonym_score: UnitInterval = 0.8
    max_synonyms: Count = 100
    normalization: Normalization = "ascii"
    triple_text: TripleForm = "tuple"

    @classmethod
    def of(cls, config: Config) -> "GraphOptions":
        """Reads and validates the options in a ``configs.retrievers.graph()`` block."""
        options = cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})
        check_fields(options, prefix="config.graph.")
        return options


class LinkedTriples(NamedTuple):
    """The triples nearest to a query, best first, their cosines, and the lowest of all cosines."""

    triples: tuple[Triple, ...]
    scores: tuple[float, ...]
    lowest: float


@dataclasses.dataclass(frozen=True, slots=True)
class WalkSeeds:
    """The start of the walk for one query.

    Attributes:
      triples: triples whose entities are seeds.
      weights: their weights. An entity's weight is the mean over its triples, divided by the number
        of passages that contain the entity.
      num_entities: number of entities with the highest weights that are seeds; 0 is all.
      rows: passages that are seeds, and their weights in ``row_weights``.
    """

    triples: tuple[Triple, ...]
    weights: tuple[float, ...]
    num_entities: int
    rows: np.ndarray
    row_weights: np.ndarray


class _Scope(NamedTuple):
    """The graph of some passages.

    Attributes:
      entities: the entities of these passages, which are the first nodes.
      rows: the passages, which are the nodes after the entities.
      counts: number of passages of each entity.
      step_NN: transition probabilities between nodes.
    """

    entities: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    step_NN: sparse.csr_array

    @property
    def num_nodes(self) -> int:
        return len(self.entities) + len(self.rows)


class TripleGraph:
    """A graph of entities and passages, to which passages can be added.

    Triples are equal if their normalized parts are. Memory, in bytes: 4 D per entity and per
    triple, and 8 ``max_synonyms`` per entity.

    Args:
      encoder: embeds entities, triples and queries.
      options: see `GraphOptions`.
    """

    def __init__(self, encoder: Encoder, options: GraphOptions | None = None):
        self.options = options or GraphOptions()
        self._encoder = encoder
        self._write = TripleText(self.options.triple_text, self.options.normalization)
        self._hashes: dict[str, str] = {}  # passage id -> hash, in row order.
        self._entities: dict[str, int] = {}  # Normalized name -> row.
        self._facts: dict[tuple[str, str, str], int] = {}  # Normalized parts -> row.
        self._triples: list[Triple] = []  # The first triple of each fact.
        self._ends_F2 = np.zeros((0, 2), np.int32)  # Head and tail of each fact.
        self._fact_O = np.zeros(0, np.int32)  # The facts of all passages, in order.
        # The first index of each passage in fact_O, and the end.
        self._start_P = np.zeros(1, np.int64)
        self._entity_ED = np.zeros((0, encoder.dim), np.float32)
        self._fact_FD = np.zeros((0, encoder.dim), np.float32)
        self._synonyms = no_synonyms(0, self.options.max_synonyms)

    def __len__(self) -> int:
        return len(self._hashes)

    def statistics(self) -> dict[str, int]:
        """Counts nodes and edges by kind."""
        near_EM, _ = self._synonyms
        entity_N, near_N = np.repeat(np.arange(len(near_EM)), near_EM.shape[1]), near_EM.reshape(-1)
        pairs = np.sort(np.stack([entity_N, near_N], 1)[near_N >= 0], axis=1)
        return {
            "passages": len(self),
            "entities": len(self._entities),
            "triples": len(self._triples),
            "synonyms": len(np.unique(pairs, axis=0)),
        }

    # ------------------------------------------------------------------------------- construction

    def add(self, passages: Sequence[Passage], triples: Mapping[str, Sequence[Triple]]) -> None:
        """Adds passages after the existing ones; only new entities and triples are embedded.

        The result is the same as that of a new graph with all passages in this order.

        Args:
          passages: passages with new ids.
          triples: triples by passage id; triples with an empty end are ignored.
        """
        num_entities, num_facts = len(self._entities), len(self._facts)
        ends, facts, counts = list[tuple[int, int]](), list[int](), list[int]()
        for passage in passages:
            own = triples.get(passage.id) or ()
            if passage.id in self._hashes:
                raise ValueError(f"the graph already has the passage {passage.id!r}")
            self._hashes[passage.id] = passage_hash(passage, own)
            rows = dict[int, None]()
            for triple in own:
                key = triple_key(triple, self.options.normalization)
                if not (key[0] and key[2]):
                    continue
                if key not in self._facts:
                    self._facts[key] = len(self._triples)
                    self._triples.append(triple)
                    names = (key[0], key[2])
                    head, tail = (self._entities.setdefault(n, len(self._entities)) for n in names)
                    ends.append((head, tail))
                rows[self._facts[key]] = None
            facts += rows
            counts.append(len(rows))
        self._start_P = np.concatenate([self._start_P, self._start_P[-1] + np.cumsum(counts)])
        self._fact_O = np.concatenate([self._fact_O, np.array(facts, np.int32)])
        self._ends_F2 = np.concatenate([self._ends_F2, np.array(ends, np.int32).reshape(-1, 2)])
        names = list(self._entities)[num_entities:]
        texts = [self._write(triple) for triple in self._triples[num_facts:]]
        self._entity_ED = _extended(self._entity_ED, names, self._encoder, "passage")
        self._fact_FD = _extended(self._fact_FD, texts, self._encoder, "triple")
        self._synonyms = synonyms(
            self._entity_ED,
            np.array([len(name.replace(" ", "")) >= _MIN_LETTERS for name in self._entities], bool),
            self.options.synonym_score,
            self.options.max_synonyms,
            known=self._synonyms,
        )
        self._forget()

    def arrange(self, ids: Sequence[str]) -> None:
        """Puts the passages into the order of ``ids``, which must be the ids of all passages."""
        row_of = {passage_id: row for row, passage_id in enumerate(self._hashes)}
        row_P = np.array([row_of[passage_id] for passage_id in ids], np.int64)
        if len(row_P) != len(row_of) or len(set(ids)) != len(row_of):
            raise ValueError("the ids must be those of all passages of the graph")
        self._hashes = {passage_id: self._hashes[passage_id] for passage_id in ids}
        self._fact_O = self._fact_O[self._occurrences(row_P)]
        self._start_P = np.concatenate([[0], np.cumsum(np.diff(self._start_P)[row_P])])
        self._forget()

    def _forget(self) -> None:
        for name in ("_index", "_whole"):
            self.__dict__.pop(name, None)

    @functools.cached_property
    def _index(self) -> ExactIndex:
        return ExactIndex(self._fact_FD, mesh=accelerators())

    @functools.cached_property
    def _whole(self) -> _Scope:
        return self._scope(np.arange(len(self)))

    def _occurrences(self, row_P: np.ndarray) -> np.ndarray:
        """Returns the indices of the passages' facts in ``fact_O``."""
        first_P, count_P = self._start_P[row_P], np.diff(self._start_P)[row_P]
        shift_P = first_P - np.concatenate([[0], np.cumsum(count_P)[:-1]])[: len(row_P)]
        return np.arange(count_P.sum()) + np.repeat(shift_P, count_P)

    def _scope(self, row_P: np.ndarray) -> _Scope:
        """Returns the graph of the passages ``row_P`` with their triples only.

        The weights are those of the released code: 2 for each passage of a triple, 1 between a
        passage and an entity, and the cosine of synonyms, for each direction in which the search
        has found them. A triple and a synonym edge between the same entities are added.
        """
        fact_O = self._fact_O[self._occurrences(row_P)]
        passage_O = np.repeat(np.arange(len(row_P)), np.diff(self._start_P)[row_P])
        ends_O2 = self._ends_F2[fact_O]
        entity_E = np.unique(ends_O2)
        place = np.full(len(self._entities) + 1, -1, np.int64)  # The last place is that of row -1.
        place[entity_E] = np.arange(len(entity_E))
        head_O, tail_O = place[ends_O2].T
        mention_M2 = np.unique(
            np.concatenate([np.stack([passage_O, head_O], 1), np.stack([passage_O, tail_O], 1)]),
            axis=0,
        )
        near_EM, score_EM = (array[entity_E] for array in self._synonyms)
        near_N = place[near_EM].reshape(-1)
        entity_N = np.repeat(np.arange(len(entity_E)), near_EM.shape[1])
        is_edge_O, is_near_N = head_O != tail_O, near_N >= 0
        source = [head_O[is_edge_O], len(entity_E) + mention_M2[:, 0], entity_N[is_near_N]]
        target = [tail_O[is_edge_O], mention_M2[:, 1], near_N[is_near_N]]
        weight = [
            np.full(is_edge_O.sum(), 2.0),
            np.ones(len(mention_M2)),
            score_EM.reshape(-1)[is_near_N],
        ]
        size = len(entity_E) + len(row_P)
        ends = (np.concatenate(source), np.concatenate(target))
        edge_NN = sparse.csr_array((np.concatenate(weight), ends), shape=(size, size))
        counts = np.bincount(mention_M2[:, 1], minlength=len(entity_E))
        return _Scope(entity_E, row_P, counts, normalized(edge_NN + edge_NN.T))

    # ------------------------------------------------------------------------------------- search

    def link(
        self, queries: Sequence[str], n: int, allowed: Sequence[np.ndarray] | None = None
    ) -> list[LinkedTriples]:
        """Returns the ``n`` triples nearest to each query.

        ``allowed`` has the passages of each query, of which only the triples are searched; None
        allows all.
        """
        n = min(n, len(self._triples))
        if not n or not queries:
            return [LinkedTriples((), (), 0.0)] * len(queries)
        query_QD = self._encoder.encode(list(queries), "query")
        facts = None
        if allowed is not None:
            facts = [np.unique(self._fact_O[self._occurrences(rows)]) for rows in allowed]
        fact_QN, score_QN = self._index.search(query_QD, n, facts)
        _, lowest_Q1 = self._index.search(-query_QD, 1, facts)
        linked = []
        for fact_N, score_N, lowest in zip(fact_QN, score_QN, lowest_Q1[:, 0], strict=True):
            is_found = fact_N >= 0
            triples = tuple(self._triples[fact] for fact in fact_N[is_found])
            scores = tuple(float(score) for score in score_N[is_found])
            linked.append(LinkedTriples(triples, scores, float(-lowest) if triples else 0.0))
        return linked

    def walk(
        self,
        seeds: Sequence[WalkSeeds],
        k: int,
        restart: float = 0.5,
        allowed: Sequence[np.ndarray] | None = None,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the rows and the PageRank of the ``k`` best passages of each walk, best first.

        Passages that the walk does not reach are not returned. Ties go to the passage that comes
        first in the seeds, then to the lower row.

        Args:
          seeds: see `WalkSeeds`.
          k: number of passages.
          restart: probability of a restart at each step.
          allowed: the passages of each walk, to whose graph it is limited; None allows all.
        """
        if allowed is not None:
            scopes = [self._scope(np.unique(rows)) for rows in allowed]
            return [
                self._best(one, scope, self._ranks([one], scope, restart)[:, 0], k)
                for one, scope in zip(seeds, scopes, strict=True)
            ]
        scope, results = self._whole, []
        block = max(_BLOCK // max(scope.num_nodes, 1), 1)
        for start in range(0, len(seeds), block):
            part = seeds[start : start + block]
            rank_NQ = self._ranks(part, scope, restart)
            results += [self._best(s, scope, rank_NQ[:, q], k) for q, s in enumerate(part)]
        return results

    def _ranks(self, seeds: Sequence[WalkSeeds], scope: _Scope, restart: float) -> np.ndarray:
        seed_NQ = np.stack([self._seed_weights(one, scope) for one in seeds], axis=1)
        return page_rank(scope.step_NN, seed_NQ.astype(np.float32), restart)

    def _seed_weights(self, seeds: WalkSeeds, scope: _Scope) -> np.ndarray:
        """Returns the weight of each node of ``scope`` as a start of the walk."""
        weights = dict[int, list[float]]()
        for triple, weight in zip(seeds.triples, seeds.weights, strict=True):
            fact = self._facts.get(triple_key(triple, self.options.normalization))
            for entity in () if fact is None else self._ends_F2[fact].tolist():
                place = int(np.searchsorted(scope.entities, entity))
                if place < len(scope.entities) and scope.entities[place] == entity:
                    weights.setdefault(place, []).append(weight / scope.counts[place])
        means = {place: sum(all_) / len(all_) for place, all_ in weights.items()}
        best = sorted(means, key=lambda place: -means[place])[: seeds.num_entities or None]
        seed_N = np.zeros(scope.num_nodes)
        seed_N[best] = [means[place] for place in best]
        place_R = np.searchsorted(scope.rows, seeds.rows)
        seed_N[len(scope.entities) + place_R] = seeds.row_weights
        return seed_N

    def _best(
        self, seeds: WalkSeeds, scope: _Scope, rank_N: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rank_P = rank_N[len(scope.entities) :]
        order_P = np.full(len(rank_P), len(rank_P))
        order_P[np.searchsorted(scope.rows, seeds.rows)] = np.arange(len(seeds.rows))
        best = np.lexsort((np.arange(len(rank_P)), order_P, -rank_P))[:k]
        best = best[rank_P[best] > 0]
        return scope.rows[best], rank_P[best]

    # ------------------------------------------------------------------------------------- folder

    def _identity(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "encoder": dict(self._encoder.identity),
            "options": dataclasses.asdict(self.options),
        }

    def save(self, folder: pathlib.Path) -> None:
        """Writes the graph to a folder, and replaces an older graph there."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        near_EM, score_EM = self._synonyms
        entity_S, place_S = np.nonzero(near_EM >= 0)
        arrays = {
            "ends": self._ends_F2,
            "starts": self._start_P,
            "facts": self._fact_O,
            "entity_vectors": self._entity_ED,
            "triple_vectors": self._fact_FD,
            "synonym_entities": entity_S.astype(np.int32),
            "synonym_neighbors": near_EM[entity_S, place_S],
            "synonym_scores": score_EM[entity_S, place_S],
        }
        with replacing(folder) as aside:
            aside.mkdir()
            for name, array in arrays.items():
                save_array(aside / f"{name}.npy", array)
            texts = {"passages": self._hashes, "triples": self._triples}
            write_json(aside / "texts.json", texts)
            write_json(aside / MANIFEST, {**self._identity(), **self.statistics()})

    @classmethod
    def load(
        cls, folder: pathlib.Path, encoder: Encoder, options: GraphOptions | None = None
    ) -> "TripleGraph":
        """Reads a folder that `save` wrote with an equal encoder and equal options."""
        graph = cls(encoder, options)
        manifest = convert(str(folder / MANIFEST), read_json(folder / MANIFEST), dict[str, Any])
        remedy = "use another config.graph.folder, or remove it to build the graph again"
        own = {name: manifest.get(name) for name in graph._identity()}
        check_same(folder, own, graph._identity(), remedy, may_differ=MAY_DIFFER)
        try:
            graph._read(folder)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError):
            raise UserError(
                f"config.graph.folder={folder} is damaged; remove it to build the graph again"
            ) from None
        return graph

    def _read(self, folder: pathlib.Path) -> None:
        def array(name: str) -> np.ndarray:
            return np.load(folder / f"{name}.npy", allow_pickle=False)

        texts = read_json(folder / "texts.json")
        self._hashes = {str(passage_id): str(h) for passage_id, h in texts["passages"].items()}
        self._triples = [Triple(*parts) for parts in texts["triples"]]
        for row, triple in enumerate(self._triples):
            key = triple_key(triple, self.options.normalization)
            self._facts[key] = row
            for name in (key[0], key[2]):
                self._entities.setdefault(name, len(self._entities))
        self._ends_F2, self._start_P, self._fact_O = map(array, ("ends", "starts", "facts"))
        self._entity_ED, self._fact_FD = map(array, ("entity_vectors", "triple_vectors"))
        near_EM, score_EM = no_synonyms(len(self._entities), self.options.max_synonyms)
        entity_S = array("synonym_entities")
        place_S = np.arange(len(entity_S)) - np.searchsorted(entity_S, entity_S)
        near_EM[entity_S, place_S] = array("synonym_neighbors")
        score_EM[entity_S, place_S] = array("synonym_scores")
        self._synonyms = near_EM, score_EM
        dim = self._encoder.dim
        if (
            self._ends_F2.shape != (len(self._triples), 2)
            or self._entity_ED.shape != (len(self._entities), dim)
            or self._fact_FD.shape != (len(self._facts), dim)
            or len(self._facts) != len(self._triples)
            or len(self._start_P) != len(self) + 1
            or self._start_P[-1] != len(self._fact_O)
            or max(self._fact_O, default=-1) >= len(self._facts)
            or self._ends_F2.max(initial=-1) >= len(self._entities)
            or near_EM.max(initial=-1) >= len(self._entities)
            or not np.isfinite(self._entity_ED).all()
        ):
            raise ValueError("the arrays do not fit together")

    @property
    def hashes(self) -> Mapping[str, str]:
        """The `passage_hash` of each passage by its id, in row order."""
        return self._hashes


def passage_hash(passage: Passage, triples: Sequence[Triple]) -> str:
    """Returns a hash of a passage and its triples."""
    return of_records([content_hash(passage).hex(), [list(t[:3]) for t in triples]])[:16]


def open_graph(
    config: Config,
    passages: Sequence[Passage],
    triples: Mapping[str, Sequence[Triple]],
    encoder: Encoder,
) -> TripleGraph:
    """Opens the graph of a ``configs.retrievers.graph()`` block over ``passages``.

    If ``config.folder`` has a graph of some of the passages, the others are added to it.
    """
    options = GraphOptions.of(config)
    if not config.folder:
        graph = TripleGraph(encoder, options)
        graph.add(passages, triples)
        return graph
    folder = pathlib.Path(config.folder).expanduser()
    if (folder / MANIFEST).is_file():
        graph = TripleGraph.load(folder, encoder, options)
    elif folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise UserError(f"config.graph.folder={folder} is not a graph; name a new or empty folder")
    else:
        graph = TripleGraph(encoder, options)
    now = {p.id: passage_hash(p, triples.get(p.id) or ()) for p in passages}
    for passage_id, old in graph.hashes.items():
        if now.get(passage_id) != old:
            problem = "its triples have changed" if passage_id in now else "it is not searched"
            raise UserError(
                f"config.graph.folder={folder} contains the passage {passage_id!r}, but {problem}; "
                "use another folder, or remove it to build the graph again"
            )
    new = [passage for passage in passages if passage.id not in graph.hashes]
    if new or not (folder / MANIFEST).is_file():
        graph.add(new, triples)
        graph.save(folder)
    graph.arrange([passage.id for passage in passages])
    return graph


def _extended(
    vectors_ND: np.ndarray, texts: Sequence[str], encoder: Encoder, role: Any
) -> np.ndarray:
    return np.concatenate([vectors_ND, encoder.encode(texts, role)]) if texts else vectors_ND
