"""Handlers with real searches, triples and rankers, and with a tiny language model."""

import collections
from typing import Any, cast

import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.llm.client import OpenAIBackend, OpenAIConfig
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Message, Usage
from cirag_jax.retrieval.graph import GraphOptions, TripleGraph
from cirag_jax.retrieval.index import PassageIndex
from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.runtime.handlers import (
    AnchorHandler,
    DemonstrateHandler,
    ExtractHandler,
    FetchHandler,
    FollowHandler,
    GenerateHandler,
    LinkHandler,
    RankHandler,
    RetrieveHandler,
    WalkHandler,
    relative,
)
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.requests import (
    Anchor,
    Anchored,
    Demonstrate,
    Extract,
    Fetch,
    Follow,
    Generate,
    Generated,
    Link,
    Rank,
    RequestError,
    Retrieve,
    Score,
    Walk,
)
from cirag_jax.runtime.scheduler import Call, Job, Scheduler
from cirag_jax.runtime.store import Journal, ResponseCache
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.types import Passage, Question, Triple
from tests import tiny_decoder
from tests.llm.faulty_server import faulty_server
from tests.runtime.recording import passage, say


def ask(handler, *requests, programs=None):
    """Returns the responses of a handler; checks that each call gets one response."""
    names = programs or [f"p{i}" for i in range(len(requests))]
    responses = {}

    def done(index, response):
        assert index not in responses
        responses[index] = response

    handler([Call(RequestKey(n, 0), r) for n, r in zip(names, requests, strict=True)], done)
    assert set(responses) == set(range(len(requests)))
    return [responses[index] for index in range(len(requests))]


TOWNS = [
    Passage("lund", "Lund", "Lund has a cathedral and a university."),
    Passage("kiruna", "Kiruna", "Kiruna has a mine."),
    Passage("visby", "Visby", "Visby has a wall and a cathedral."),
    Passage("umea", "Umea", "Birches grow there."),
]


class Counting:
    """A search that records its calls."""

    def __init__(self):
        self.index = PassageIndex.in_memory(TOWNS, None, "bm25")
        self.calls = []

    def __call__(self, queries, k, allowed, feedback):
        self.calls.append((list(queries), k))
        return self.index.search(queries, k, allowed, feedback)


def test_follow_returns_only_allowed_rows():
    texts = ("from Visby to Lund", "Lund, not Kiruna", "a lund")
    handler = FollowHandler(TitleIndex(TOWNS), TOWNS)
    response, first = ask(handler, Follow(texts, 9), Follow(texts, 1))
    assert [p.id for p in response.passages] == ["visby", "lund", "kiruna"]
    assert response.scores == (1.0, 2.0, 1.0)
    assert [p.id for p in first.passages] == ["visby"]
    handler = FollowHandler(TitleIndex(TOWNS), TOWNS, {"p": np.array([0, 3])})
    (response,) = ask(handler, Follow(texts, 1), programs=["p"])
    assert [p.id for p in response.passages] == ["lund"]


def test_retrieve_searches_once_per_k():
    search = Counting()
    handler = RetrieveHandler(search, TOWNS)
    responses = ask(
        handler,
        Retrieve("cathedral wall", 2),
        Retrieve("mine", 1),
        Retrieve("cathedral university", 2),
    )
    assert search.calls == [(["cathedral wall", "cathedral university"], 2), (["mine"], 1)]
    assert [p.id for p in responses[0].passages] == ["visby", "lund"]
    assert [p.id for p in responses[1].passages] == ["kiruna"]
    assert [p.id for p in responses[2].passages] == ["lund", "visby"]
    assert all(type(score) is float for score in responses[0].scores)
    assert responses[0].scores[0] > responses[0].scores[1] > 0


def test_retrieve_returns_only_allowed_rows():
    rows = {"a": np.array([1, 2], np.int32), "b": np.array([0, 1], np.int32)}
    handler = RetrieveHandler(Counting(), TOWNS, rows)
    request = Retrieve("cathedral wall", 4)
    responses = ask(handler, request, request, programs=["a", "b"])
    assert [p.id for p in responses[0].passages][0] == "visby"
    assert {p.id for p in responses[0].passages} <= {"kiruna", "visby"}
    assert [p.id for p in responses[1].passages][0] == "lund"
    assert {p.id for p in responses[1].passages} <= {"lund", "kiruna"}


def test_retrieve_skips_missing_rows():
    def search(queries, k, allowed, feedback):
        return np.array([[2, -1, -1]] * len(queries)), np.zeros((len(queries), 3), np.float32)

    response = ask(RetrieveHandler(search, TOWNS), Retrieve("x", 3))[0]
    assert [p.id for p in response.passages] == ["visby"] and response.scores == (0.0,)


def test_fetch_by_ids():
    handler = FetchHandler(TOWNS)
    response, missing = ask(handler, Fetch(("visby", "lund")), Fetch(("lund", "osk")))
    assert [p.id for p in response.passages] == ["visby", "lund"] and response.scores == (1.0, 1.0)
    assert isinstance(missing, RequestError) and "no passage 'osk'" in str(missing)


class Letters:
    """An encoder that counts the letters of a text."""

    dim = 26

    truncated = collections.Counter()

    def encode(self, texts, kind="passage", progress=None):
        counts = np.array([[t.lower().count(chr(97 + i)) for i in range(26)] for t in texts], float)
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


def test_demonstrate_most_similar_questions():
    texts = ("Who sang it?", "Where is the mine?", "Where was the mine dug?")
    pool = [Question(f"t{i}", text, ("x",)) for i, text in enumerate(texts)]
    handler = DemonstrateHandler(pool, Letters())
    requests = (
        Demonstrate("where is that mine?", 2),
        Demonstrate("who sang?", 1),
        Demonstrate("a", 9),
    )
    responses = ask(handler, *requests)
    assert [[q.id for q in f.questions] for f in responses[:2]] == [["t1", "t2"], ["t0"]]
    assert len(responses[2].questions) == 3 and responses[0].questions[0] is pool[1]


def test_extract_looks_up_each_passage_once():
    lookups = []
    triple = Triple("a", "is", "b", "p")

    def source(ids):
        lookups.append(list(ids))
        return {"p": (triple,), "q": None, "r": ()}

    p, q, r, s = (passage(name) for name in "pqrs")
    responses = ask(ExtractHandler(source), Extract((q, p)), Extract((p, r, s)), Extract(()))
    assert lookups == [["q", "p", "r", "s"]]
    assert [f.triples for f in responses] == [(None, (triple,)), ((triple,), (), None), ()]


def test_anchor_returns_entities_and_triples():
    lives = Triple("Ada Moen", "lives in", "Lund", "lund", 0)
    dug = Triple("Kiruna", "known for", "iron", "kiruna", 0)
    handler = AnchorHandler(EntityIndex([lives, dug]))
    responses = ask(handler, Anchor("moen", 3), Anchor("Paris", 3), Anchor("iron ore", 1, "ratio"))
    assert responses == [
        Anchored(("Ada Moen",), (lives,)), Anchored((), ()), Anchored(("iron",), (dug,))
    ]  # fmt: skip


def graph_of_facts():
    """A graph of two passages with a triple each, and of one without."""
    passages = [passage(name) for name in "pqr"]
    triples = {
        "p": (Triple("ada", "lives in", "lund", "p", 0),),
        "q": (Triple("lund", "lies in", "skane", "q", 0),),
    }
    graph = TripleGraph(cast(Any, Letters()), GraphOptions(max_synonyms=0))
    graph.add(passages, triples)
    return graph, passages, triples["p"] + triples["q"]


def test_link_returns_the_nearest_triples_of_allowed_passages():
    graph, _, (lives, lies) = graph_of_facts()
    query = repr(("ada", "lives in", "lund"))
    both, one = ask(LinkHandler(graph), Link(query, 5), Link(query, 1))
    assert both.triples == (lives, lies) and one.triples == (lives,)
    assert both.lowest == one.lowest == pytest.approx(both.scores[1], abs=1e-6)
    handler = LinkHandler(graph, {"a": np.array([1, 2]), "b": np.array([2])})
    responses = ask(handler, Link(query, 5), Link(query, 5), programs=["a", "b"])
    assert [r.triples for r in responses] == [(lies,), ()]


def test_walk_ranks_passages_in_one_search_per_setting():
    graph, passages, (lives, lies) = graph_of_facts()
    searches = []

    def search(queries, k, allowed, feedback):
        searches.append((list(queries), k))
        rows = np.array([[2, 0, -1]] * len(queries))
        return rows, np.array([[0.9, 0.5, -np.inf]] * len(queries))

    def walk(triple, **fields):
        settings = {"k": 2, "num_entities": 5, "num_seeds": 0, "passage_weight": 0.1}
        return Walk("x", (triple,), (1.0,), **{**settings, "restart": 0.5, **fields})

    handler = WalkHandler(graph, search, passages)
    p, q, r = passages
    first, second, third = ask(handler, walk(lives), walk(lies, num_seeds=2), walk(lies))
    assert searches == [(["x", "x"], 3), (["x"], 2)]
    assert first.passages == (p, q) and second.passages == third.passages == (q, p)
    assert list(first.scores) == sorted(first.scores, reverse=True)
    (heavy,) = ask(handler, walk(lives, passage_weight=9.0, k=1))
    assert heavy.passages == (r,)  # The walk starts at the best passage, which has no edges.


def test_walk_seeds_have_relative_scores_and_allowed_passages(monkeypatch):
    graph, passages, (lives, _) = graph_of_facts()
    walked, walk = [], graph.walk
    monkeypatch.setattr(graph, "walk", lambda *args: walked.append(args) or walk(*args))
    found = np.array([[2, 1]]), np.array([[0.9, 0.5]])
    allowed = {"a": np.array([1, 2])}
    handler = WalkHandler(graph, lambda *_: found, passages, allowed)
    ask(handler, Walk("x", (lives,), (1.0,), 2, 5, 0, 0.1, 0.5), programs=["a"])
    (((seeds,), _, _, (rows,)),) = walked
    assert seeds.rows.tolist() == [2, 1] and seeds.row_weights.tolist() == [0.1, 0.0]
    assert rows.tolist() == [1, 2]


def test_relative_scores_lie_between_0_and_1():
    assert relative(np.array([3.0, 1.0, 2.0])).tolist() == [1.0, 0.0, 0.5]
    assert relative(np.array([2.0, 2.0])).tolist() == [1.0, 1.0]
    assert relative(np.zeros(0)).tolist() == []


class Scores:
    """A ranker with a fixed score for each name."""

    def __init__(self, table):
        self.table, self.texts = table, []

    def score(self, queries, texts):
        self.texts.append(texts)
        return [np.array([self.table[t.head] for t in group], np.float32) for group in texts]


A, B, C = (Triple(name, "Is", "X!", "p") for name in "ABC")


def test_rank_calls_once_and_ties_keep_order():
    ranker = Scores({"A": 0.5, "B": 0.75, "C": 0.5})
    handler = RankHandler(ranker)
    responses = ask(
        handler, Rank("q", (C, A, B), 0, "r"), Rank("q", (A, B, C), 2, "r"), Rank("q", (A,), 5, "r")
    )
    assert [f.texts for f in responses] == [(B, C, A), (B, A), (A,)]
    assert [f.scores for f in responses] == [(0.75, 0.5, 0.5), (0.75, 0.5), (0.5,)]
    assert len(ranker.texts) == 1
    # Short lists use insertion sort, which is always stable.
    many = tuple(Triple("A", "Is", "X!", f"p{i}") for i in range(60))
    assert ask(handler, Rank("q", (*many, B), 0, "r"))[0].texts == (B, *many)


SIZES = {"batch_size": 3, "prefill_chunks": (64, 16), "decode_chunk": 8, "prefix_tokens": 0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_decoder.folder(tmp_path_factory.mktemp("m"), max_position_embeddings=256)
    return Engine.open(str(folder), options=EngineConfig(**SIZES))


@pytest.fixture
def handler(engine):
    return GenerateHandler(engine, {"reader": 6, "integrator": 9})


WORDS = ("where was the weaver born?", "the sailor", "who is the patron saint of the town?")


def test_generate_batch_equals_model(engine, handler):
    requests = [say(text) for text in WORDS] + [say(WORDS[0], "integrator")]
    responses = ask(handler, *requests)
    direct = engine.generate(
        [handler.request(Call(RequestKey(f"x{i}", 0), r)) for i, r in enumerate(requests)]
    )
    assert [f.text for f in responses] == [r.text for r in direct]
    assert [f.usage.generated_tokens for f in responses] == [6, 6, 6, 9]  # the role's limit
    assert all(isinstance(f, Generated) and f.finish_reason == "length" for f in responses)
    assert responses[3].text.startswith(responses[0].text)


def test_request_keeps_its_fields(handler):
    turns, schema = (Message("user", "a", "b", "c"),), {"type": "object"}
    request = Generate(turns, "reader", 3, 0.5, 0.9, 7, ("x",), True, schema)
    completed = handler.request(Call(RequestKey("p", 2, 1), request))
    assert completed.messages == request.messages
    assert completed == request
    assert completed.continue_final and completed.json_schema == {"type": "object"}
    # Greedy requests have no seed, so that they share one entry of the cache.
    assert handler.request(Call(RequestKey("p", 2), say("x"))).seed == 0


def test_samples_depend_only_on_seed_and_position(engine):
    def texts(seed, programs):
        handler = GenerateHandler(engine, {"reader": 6}, seed=seed)
        requests = [say("the town", temperature=2.0)] * len(programs)
        return [f.text for f in ask(handler, *requests, programs=programs)]

    three = texts(0, ["a", "b", "c"])
    assert len(set(three)) == 3
    assert texts(0, ["c", "a"]) == [three[2], three[0]]
    assert texts(1, ["a", "b", "c"]) != three


def test_long_prompt_does_not_affect_others(handler):
    responses = ask(handler, say(WORDS[0]), say("town " * 500), say(WORDS[1]))
    assert isinstance(responses[1], RequestError) and "only 255 fit" in str(responses[1])
    assert isinstance(responses[0], Generated) and isinstance(responses[2], Generated)


def test_responses_are_reported_one_by_one(engine, handler, tmp_path):
    """The journal has the first responses of a batch if the process dies during the batch."""
    requests = [say(text, max_tokens=2 + 12 * i) for i, text in enumerate(WORDS)]
    received, before = [], engine.usage.generated_tokens

    class Died(Exception):
        pass

    def done(index, response):
        received.append(index)
        if len(received) == 2:
            raise Died

    with pytest.raises(Died):
        handler([Call(RequestKey(f"p{i}", 0), r) for i, r in enumerate(requests)], done)
    assert received == [0, 1]
    assert engine.usage.generated_tokens - before == 2 + 14  # the third was incomplete
    store = engine._model.store
    assert len(store.allocator.pool) == store.count  # all pages are free


def test_cached_request_is_not_generated_again(engine, tmp_path):
    cache = ResponseCache(tmp_path / "cache")
    requests = [say(text) for text in WORDS[:2]]

    def run(identity, batch):
        handler = GenerateHandler(engine, {"reader": 6}, cache=cache, identity=identity)
        before = engine.usage.generated_tokens
        responses = ask(handler, *batch)
        return responses, engine.usage.generated_tokens - before

    first, tokens = run("m", requests)
    assert tokens == 12
    second, tokens = run("m", [*requests, say(WORDS[2])])
    assert tokens == 6
    assert [f.text for f in second[:2]] == [f.text for f in first]
    assert second[0].usage.cached_tokens == second[0].usage.prompt_tokens
    assert run("other", requests)[1] == 12
    assert run("m", requests)[1] == 0
    cache.close()


def test_more_calls_cached_and_scores_keep_their_index(engine, tmp_path):
    """Responses to cached requests and to scores have the index of their call."""
    cache = ResponseCache(tmp_path / "cache")
    handler = GenerateHandler(engine, {"reader": 6}, cache=cache)
    assert handler.accepts_more
    cached = ask(handler, say(WORDS[1]))[0]
    turns = (Message("user", WORDS[0]),)
    waves = [
        [say(WORDS[0]), Score(turns, ("a", "b"), "reader")],
        [say(WORDS[1])],  # cached, so the next wave is requested at once
        [say("town " * 500), say(WORDS[2])],
    ]
    calls, responses = [], {}

    def more():
        new = [Call(RequestKey(f"p{len(calls) + i}", 0), r) for i, r in enumerate(waves.pop(0))]
        calls.extend(new)
        return new

    handler(more(), responses.__setitem__, lambda: more() if waves else [])
    cache.close()
    direct = GenerateHandler(engine, {"reader": 6})
    expected = ask(direct, *(call.request for call in calls))
    assert sorted(responses) == list(range(5))
    assert isinstance(responses[3], RequestError) and str(responses[3]) == str(expected[3])
    assert responses[1].logprobs == expected[1].logprobs and responses[2].text == cached.text
    assert [responses[i].text for i in (0, 4)] == [expected[i].text for i in (0, 4)]


def test_more_calls_all_cached_fetches_more(engine, tmp_path):
    """A backend fetches more calls only once, so the handler fetches until one is not cached."""
    cache = ResponseCache(tmp_path / "cache")
    cached, other = say(WORDS[1]), say(WORDS[2])
    ask(GenerateHandler(engine, {"reader": 6}, cache=cache), cached)
    waves, later = [[cached], [cached], [other]], []

    class Backend:
        accepts_more = True

        def generate(self, requests, progress, done, more):
            later.extend(more())
            return engine.generate([*requests, *later], progress, done)

    handler = GenerateHandler(cast(Any, Backend()), {"reader": 6}, cache=cache)
    calls, responses = [Call(RequestKey("p", 0), say(WORDS[0]))], {}

    def more():
        new = [Call(RequestKey(f"p{len(waves)}", 0), request) for request in waves.pop(0)]
        calls.extend(new)
        return new

    handler(calls[:], responses.__setitem__, lambda: more() if waves else [])
    cache.close()
    assert [request.messages for request in later] == [other.messages]
    assert sorted(responses) == list(range(4))


def test_errors_are_not_cached(engine, tmp_path):
    cache = ResponseCache(tmp_path / "cache")
    handler = GenerateHandler(engine, {"reader": 6}, cache=cache)
    for _ in range(2):
        assert isinstance(ask(handler, say("town " * 500))[0], RequestError)
    cache.close()


@pytest.fixture
def server():
    with faulty_server() as running:
        yield running


def served(server, **fields):
    settings = {"model": "m", "base_url": server.url, "max_retries": 0, "max_concurrency": 2}
    return GenerateHandler(OpenAIBackend(OpenAIConfig(**{**settings, **fields})), {"reader": 5})


def asks(name):
    response = yield say(name)
    return response.text


def jobs(count):
    return [Job(f"q{i}", i, lambda i=i: asks(f"q{i}")) for i in range(count)]


def test_budget_exhausted_next_run_finishes(server, tmp_path):
    with Journal(tmp_path / "j", {}) as book:
        handler = served(server, budget_tokens=60)
        assert Scheduler({"reader": handler}, book).run(jobs(8)) is False
        assert handler.is_exhausted
        answered = set(book.outcomes())
        assert 0 < len(answered) < 8
        assert not any(record.error for record in book.records())
    sent = len(server.bodies)
    assert sent == len(answered)
    with Journal(tmp_path / "j", {}) as book:
        assert Scheduler({"reader": served(server)}, book).run(jobs(8)) is True
        assert len(book.outcomes()) == 8
    assert sorted(server.texts()) == [f"q{i}" for i in range(8)]


def test_rejected_request_does_not_affect_others(server, tmp_path):
    server.script["q1"] = [400]
    with Journal(tmp_path / "j", {}) as book:
        assert Scheduler({"reader": served(server)}, book).run(jobs(3))
        records = {record.id: record for record in book.records()}
    assert "400" in str(records["q1"].error) and records["q1"].outcome is None
    assert records["q0"].outcome == "echo q0" and records["q2"].outcome == "echo q2"


def test_full_disk_in_server_tasks_is_a_user_error(server, tmp_path):
    long = "x" * 100_000
    with Journal(tmp_path / "j", {}) as book:
        book.open_program("warm", 0, None)
        pages = book._db.execute("PRAGMA page_count").fetchone()[0] + 1
        book._db.execute(f"PRAGMA max_page_count = {pages}")
        run = Scheduler({"reader": served(server)}, book)
        with pytest.raises(UserError, match="the disk is full"):
            run.run([Job("q", 0, lambda: asks(long))])


def test_generate_handler_removes_thoughts_for_every_backend_and_role(tmp_path):
    class Thinking:
        calls = 0

        def generate(self, requests, progress, done):
            for index, request in enumerate(requests):
                self.calls += 1
                text = f"<think>Is it {request.role}?</think>\n\nLund"
                done(index, Generated(text, "stop", Usage(3, 0, 2)))

    backend = Thinking()
    limits = {"reader": 9, "integrator": 9}
    with ResponseCache(tmp_path / "cache.sqlite") as cache:
        handler = GenerateHandler(cast(Any, backend), limits, cache=cache, identity="m")
        for _ in range(2):  # the second time from the cache
            requests = [say("x", role=role) for role in limits]
            for response in ask(handler, *requests):
                assert response.text == "Lund" and response.usage.thoughts == 1
                assert response.thoughts.startswith("<think>Is it ")
    assert backend.calls == 2
