"""The graph of entities and passages: construction, folder, links of queries, and walks."""

import collections
import json
import zlib

import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.retrieval import graph as graph_lib
from cirag_jax.retrieval import synonyms as synonyms_lib
from cirag_jax.retrieval.graph import GraphOptions, TripleGraph, WalkSeeds, open_graph
from cirag_jax.types import Passage, Triple
from configs import retrievers


class Letters:
    """An encoder of letter pairs: similar spellings have similar vectors."""

    dim = 64

    def __init__(self, name="letters"):
        self.identity = {"model": name}
        self.truncated = collections.Counter()
        self.texts: list[str] = []

    def encode(self, texts, kind="passage", progress=None):
        self.texts += texts
        vectors_ND = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            for pair in zip(f" {text}", f"{text} ", strict=True):
                vectors_ND[row, zlib.crc32("".join(pair).encode()) % self.dim] += 1
        return vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)


def corpus(facts):
    """Makes passages ``p0``, ``p1``, ... from lists of triples."""
    passages = [Passage(f"p{i}", f"Title {i}", f"Text {i}.") for i in range(len(facts))]
    triples = {
        f"p{i}": tuple(Triple(*parts, f"p{i}", 0) for parts in own) for i, own in enumerate(facts)
    }
    return passages, triples


FACTS = [
    [("Ada Moen", "born in", "Lund"), ("Ada Moen", "is", "potter")],
    [("Lund", "lies in", "Skane"), ("lund", "Lies in", "SKANE"), ("Lund", "near", "Lund")],
    [],
    [("Ada Moens", "lives in", "Skane"), ("", "x", "y"), ("Ada Moen", "born in", "Lund")],
]


def build(facts=FACTS, encoder=None, **options):
    graph = TripleGraph(encoder or Letters(), GraphOptions(**options))
    graph.add(*corpus(facts))
    return graph


def random_facts(number, seed=0, names=40):
    rng = np.random.default_rng(seed)
    return [
        [(f"name{a} x", f"r{r}", f"name{b} x") for a, b, r in rng.integers(0, names, (3, 3))]
        for _ in range(number)
    ]


def seeds_of(graph, triples, weights, rows=(), row_weights=(), num_entities=5):
    return WalkSeeds(
        tuple(triples), tuple(weights), num_entities, np.array(rows, int), np.array(row_weights)
    )


def arrays_of(graph):
    return (
        *(graph._ends_F2, graph._start_P, graph._fact_O, graph._entity_ED, graph._fact_FD),
        *graph._synonyms,
    )


def assert_equal(one, other):
    assert one.hashes == other.hashes and one._triples == other._triples
    assert list(one._entities) == list(other._entities)
    for mine, theirs in zip(arrays_of(one), arrays_of(other), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-7)


def dense_rank(edges, size, seed, restart):
    """Solves the equations of the walk: p = restart * s + (1 - restart) * (stuck * s + S^T p)."""
    weight_NN = np.zeros((size, size))
    for (a, b), weight in edges.items():
        weight_NN[a, b] += weight
        weight_NN[b, a] += weight
    total_N = weight_NN.sum(1)
    step_NN = np.divide(
        weight_NN, total_N[:, None], out=np.zeros_like(weight_NN), where=total_N[:, None] > 0
    )
    seed = seed / seed.sum()
    step_NN[total_N == 0] = seed  # A walk without an edge to follow restarts.
    return np.linalg.solve(np.eye(size) - (1 - restart) * step_NN.T, restart * seed)


# --------------------------------------------------------------------------------- construction


def test_graph_equal_triples_and_entities_are_merged():
    graph = build()
    assert graph.statistics() == {"passages": 4, "entities": 5, "triples": 5, "synonyms": 1}
    assert list(graph._entities) == ["ada moen", "lund", "potter", "skane", "ada moens"]


def test_graph_edges_have_the_weights_of_the_code():
    ada, lund, potter, skane, moens, p0, p1, p2, p3 = range(9)
    (score,) = {float(s) for s in build()._synonyms[1].reshape(-1) if np.isfinite(s)}
    edges = {
        (ada, lund): 4, (ada, potter): 2, (lund, skane): 2, (moens, skane): 2,
        (p0, ada): 1, (p0, lund): 1, (p0, potter): 1, (p1, lund): 1, (p1, skane): 1,
        (p3, moens): 1, (p3, skane): 1, (p3, ada): 1, (p3, lund): 1, (ada, moens): 2 * score,
    }  # fmt: skip
    scope = build()._whole
    weight_NN = np.zeros((9, 9))
    for (a, b), weight in edges.items():
        weight_NN[a, b] = weight_NN[b, a] = weight
    expected = weight_NN / np.maximum(weight_NN.sum(1, keepdims=True), 1e-12)
    np.testing.assert_allclose(scope.step_NN.toarray(), expected, atol=2e-7)
    assert scope.counts.tolist() == [2, 3, 1, 2, 1] and p2 not in scope.entities


@pytest.mark.parametrize("options", [{"max_synonyms": 0}, {"synonym_score": 1.0}])
def test_graph_options_limit_synonyms(options):
    assert build(**options).statistics()["synonyms"] == 0


def test_graph_short_names_have_no_synonyms():
    facts = [[("ab", "is", "a b"), ("abc", "is", "a b c")]]
    graph = build(facts, synonym_score=0.0)
    assert graph._synonyms[0][:2].max() == -1 and graph._synonyms[0][2, 0] == 3


@pytest.mark.parametrize("level", [6, 1])  # One cell, and many cells.
def test_graph_added_passages_equal_a_new_graph(level, monkeypatch):
    monkeypatch.setattr(synonyms_lib, "_EXACT_LEVEL", level)
    monkeypatch.setattr(synonyms_lib, "_PROBES", 3)
    facts = random_facts(60, names=200)
    passages, triples = corpus(facts)
    whole = build(facts, max_synonyms=5)
    encoder = Letters()
    grown = TripleGraph(encoder, GraphOptions(max_synonyms=5))
    for start in (0, 7, 8, 40):
        end = {0: 7, 7: 8, 8: 40, 40: 60}[start]
        grown.add(passages[start:end], triples)
        assert len(grown._whole.step_NN.toarray()) == len(grown) + len(grown._entities)
    assert_equal(grown, whole)
    np.testing.assert_allclose(
        grown._whole.step_NN.toarray(), whole._whole.step_NN.toarray(), atol=2e-7
    )
    assert len(encoder.texts) == len(set(encoder.texts))  # Nothing is embedded again.


def test_graph_added_passage_compares_only_new_entities(monkeypatch):
    compared, add = [], synonyms_lib._add_nearest

    def counting(near, score, vectors, rows, others, min_score):
        compared.append(len(rows) * len(others))
        add(near, score, vectors, rows, others, min_score)

    graph = build(random_facts(20))
    monkeypatch.setattr(synonyms_lib, "_add_nearest", counting)
    triples = {"new": (Triple("first new", "is", "second new", "new", 0),)}
    graph.add([Passage("new", "Title", "Text.")], triples)
    assert 0 < sum(compared) < 4 * len(graph._entities)  # Each of two with all, and all with them.


def test_graph_passage_with_a_known_id_is_rejected():
    graph = build()
    with pytest.raises(ValueError, match="'p0'"):
        graph.add(*corpus(FACTS[:1]))


def test_graph_arrange_reorders_passages():
    passages, triples = corpus(FACTS)
    graph, other = build(), TripleGraph(Letters())
    other.add(passages[::-1], triples)
    other.arrange([passage.id for passage in passages])
    assert list(other.hashes) == list(graph.hashes)
    for rows in ([0], [1, 3]):
        one, two = (g._fact_O[g._occurrences(np.array(rows))] for g in (graph, other))
        assert {graph._triples[f][:3] for f in one} == {other._triples[f][:3] for f in two}
    with pytest.raises(ValueError, match="all passages"):
        graph.arrange(["p0"])


# ----------------------------------------------------------------------------- links and walks


def test_link_returns_the_nearest_triples_and_the_lowest_score():
    graph = build()
    (linked,) = graph.link(["('ada moen', 'is', 'potter')"], 2)
    assert linked.triples[0][:3] == ("Ada Moen", "is", "potter")
    vectors_FD = Letters().encode([graph._write(t) for t in graph._triples])
    scores = np.sort(vectors_FD @ Letters().encode(["('ada moen', 'is', 'potter')"])[0])
    np.testing.assert_allclose(linked.scores, scores[::-1][:2], atol=5e-7)
    assert linked.lowest == pytest.approx(scores[0], abs=5e-7)


def test_link_allowed_passages_limit_the_triples():
    graph = build()
    query = "('lund', 'near', 'lund')"
    linked = graph.link([query] * 2, 9, [np.array([1, 2]), np.array([2])])
    assert linked[0].lowest == pytest.approx(linked[0].scores[-1], abs=5e-7)
    assert {t[:3] for t in linked[0].triples} == {("Lund", "lies in", "Skane"), ("Lund", "near", "Lund")}  # fmt: skip  # noqa: E501
    assert linked[1] == ((), (), 0.0)


def test_graph_without_triples_links_nothing_and_ranks_by_seeds():
    graph = build([[], []])
    assert graph.link(["Ada"], 3) == [((), (), 0.0)]
    ((rows, ranks),) = graph.walk([seeds_of(graph, (), (), [0, 1], [0.1, 0.3])], 2)
    assert rows.tolist() == [1, 0] and ranks == pytest.approx([0.75, 0.25])
    ((rows, _),) = graph.walk([seeds_of(graph, (), (), [1, 0], [0.2, 0.2])], 2)
    assert rows.tolist() == [1, 0]  # Ties keep the order of the seeds.
    ((rows, _),) = graph.walk([seeds_of(graph, (), ())], 2)
    assert rows.tolist() == []


@pytest.mark.parametrize("restart", [0.2, 0.5])
def test_walk_equals_the_dense_solution(restart):
    graph = build(random_facts(30))
    scope = graph._whole
    edges = collections.Counter()
    for row, own in enumerate(random_facts(30)):
        for a, _, b in {tuple(parts) for parts in own}:
            head, tail = graph._entities[a], graph._entities[b]
            if head != tail:
                edges[head, tail] += 2
        for name in {name for a, _, b in own for name in (a, b)}:
            edges[len(scope.entities) + row, graph._entities[name]] += 1
    for entity, (near, scores) in enumerate(zip(*graph._synonyms, strict=True)):
        for other, score in zip(near, scores, strict=True):
            if other >= 0:
                edges[entity, int(other)] += float(score)
    triple = graph._triples[4]
    seed = np.zeros(len(scope.entities) + 30)
    for end in graph._ends_F2[4]:
        seed[end] = 0.7 / scope.counts[end]
    seed[len(scope.entities) + np.array([3, 5])] = 0.05, 0.01
    expected = dense_rank(edges, len(seed), seed, restart)[len(scope.entities) :]
    seeds = seeds_of(graph, [triple], [0.7], [3, 5], [0.05, 0.01])
    ((rows, ranks),) = graph.walk([seeds], 30, restart)
    np.testing.assert_allclose(ranks, expected[rows], atol=2e-7)
    assert rows[:10].tolist() == np.argsort(-expected, kind="stable")[:10].tolist()


def test_walk_blocks_equal_single_walks(monkeypatch):
    graph = build(random_facts(12))
    seeds = [seeds_of(graph, graph._triples[i : i + 1], [1.0]) for i in range(5)]
    single = [graph.walk([one], 9)[0] for one in seeds]
    monkeypatch.setattr(graph_lib, "_BLOCK", 2 * graph._whole.num_nodes)  # Two walks per block.
    for (rows, ranks), (own, own_ranks) in zip(graph.walk(seeds, 9), single, strict=True):
        assert rows.tolist() == own.tolist()
        np.testing.assert_allclose(ranks, own_ranks, atol=2e-7)


def test_walk_allowed_passages_have_their_own_graph():
    facts = random_facts(12)
    graph, allowed = build(facts), np.array([2, 5, 9])
    alone = build([facts[row] for row in allowed])
    triple = graph._triples[graph._fact_O[graph._start_P[5]]]
    ((rows, ranks),) = graph.walk(
        [seeds_of(graph, [triple], [1.0], [9], [0.05])], 9, allowed=[allowed[::-1]]
    )
    ((own, own_ranks),) = alone.walk([seeds_of(alone, [triple], [1.0], [2], [0.05])], 9)
    assert rows.tolist() == allowed[own].tolist()
    np.testing.assert_allclose(ranks, own_ranks, atol=2e-7)


def test_seed_weights_are_means_divided_by_passages():
    graph = build()
    scope, by_parts = graph._whole, {t[:3]: t for t in graph._triples}
    born, potter = (by_parts["Ada Moen", "born in", "Lund"], by_parts["Ada Moen", "is", "potter"])
    unknown = Triple("No", "such", "triple")
    seeds = seeds_of(graph, [born, potter, unknown], [0.8, 0.4, 0.9])
    weights = graph._seed_weights(seeds, scope)
    assert weights[:5] == pytest.approx([(0.4 + 0.2) / 2, 0.8 / 3, 0.4, 0, 0])
    seeds = seeds_of(graph, [born, potter], [0.8, 0.4], num_entities=1)
    assert np.flatnonzero(graph._seed_weights(seeds, scope)).tolist() == [2]


# --------------------------------------------------------------------------------------- folder


def block(folder, **fields):
    config = retrievers.graph()
    config.folder = str(folder)
    config.update(fields)
    return config


def test_graph_options_equal_the_config():
    assert GraphOptions.of(retrievers.graph()) == GraphOptions()
    with pytest.raises(UserError, match=r"config\.graph\.synonym_score=2"):
        GraphOptions.of(block("x", synonym_score=2.0))


def test_open_graph_stored_graph_is_read_and_extended(tmp_path):
    passages, triples = corpus(FACTS)
    config, whole = block(tmp_path / "new" / "graph"), build()
    first = open_graph(config, passages[:2], triples, Letters())
    assert first.statistics()["passages"] == 2
    encoder = Letters()
    grown = open_graph(config, passages, triples, encoder)
    assert_equal(grown, whole)
    assert "ada moen" not in encoder.texts and "ada moens" in encoder.texts
    encoder = Letters()
    again = open_graph(config, passages[::-1], triples, encoder)
    assert encoder.texts == [] and list(again.hashes) == ["p3", "p2", "p1", "p0"]
    again.arrange(["p0", "p1", "p2", "p3"])
    assert_equal(again, whole)


def test_open_graph_without_folder_stores_nothing(tmp_path):
    config = retrievers.graph()
    assert_equal(open_graph(config, *corpus(FACTS), Letters()), build())
    assert list(tmp_path.iterdir()) == []


def test_open_graph_other_corpus_is_refused(tmp_path):
    passages, triples = corpus(FACTS)
    config = block(tmp_path / "graph")
    open_graph(config, passages, triples, Letters())
    with pytest.raises(UserError, match="contains the passage 'p3', but it is not searched"):
        open_graph(config, passages[:3], triples, Letters())
    with pytest.raises(UserError, match="'p0', but its triples have changed"):
        open_graph(config, passages, {**triples, "p0": ()}, Letters())


def test_open_graph_other_encoder_or_options_are_refused(tmp_path):
    passages, triples = corpus(FACTS)
    config = block(tmp_path / "graph")
    open_graph(config, passages, triples, Letters())
    with pytest.raises(
        UserError, match="options.max_synonyms=100, not 3; use another config.graph"
    ):
        open_graph(block(tmp_path / "graph", max_synonyms=3), passages, triples, Letters())
    other = Letters()
    other.identity = {"model": "letters", "dimension": 3}
    with pytest.raises(UserError, match="encoder.dimension"):
        open_graph(config, passages, triples, other)


@pytest.mark.parametrize(
    "damage",
    ["entity_vectors.npy", "texts.json", "passages", "facts.npy", "starts.npy", "rows", "nan"],
)
def test_open_graph_damaged_folder_is_refused(damage, tmp_path):
    passages, triples = corpus(FACTS)
    config = block(tmp_path / "graph")
    open_graph(config, passages, triples, Letters())
    files = {"passages": "texts.json", "rows": "entity_vectors.npy", "nan": "entity_vectors.npy"}
    file = tmp_path / "graph" / files.get(damage, damage)
    if damage == "rows":
        np.save(file, np.load(file)[:-1])
    elif damage == "nan":
        np.save(file, np.load(file) * np.nan)
    elif damage == "passages":
        file.write_text(json.dumps({"passages": [], "triples": []}))
    elif damage == "texts.json":
        file.write_text(json.dumps({"passages": {}, "triples": [["a", "b"]]}))
    elif damage == "facts.npy":
        np.save(file, np.full_like(np.load(file), 99))
    elif damage == "starts.npy":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="is damaged; remove it"):
        open_graph(config, passages, triples, Letters())


def test_open_graph_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a graph"):
        open_graph(block(tmp_path), *corpus(FACTS), Letters())
    assert (tmp_path / "notes.txt").read_text() == "mine"
