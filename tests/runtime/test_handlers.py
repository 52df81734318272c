"""What answers requests: searches, triples, ranking, and a real (tiny) language model."""

from typing import Any, cast

import numpy as np
import pytest

from cirag_jax.errors import UserError
from cirag_jax.llm.client import OpenAIBackend, OpenAIConfig
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Message
from cirag_jax.retrieval.index import PassageIndex
from cirag_jax.retrieval.links import TitleIndex
from cirag_jax.runtime.handlers import (
    AnchorHandler,
    DemonstrateHandler,
    ExtractHandler,
    FetchHandler,
    FollowHandler,
    GenerateHandler,
    RankHandler,
    RetrieveHandler,
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
    Rank,
    RequestError,
    Retrieve,
    Score,
)
from cirag_jax.runtime.scheduler import Call, Job, Scheduler
from cirag_jax.runtime.store import Journal, ResponseCache
from cirag_jax.triples.entity_index import EntityIndex
from cirag_jax.types import Passage, Question, Triple
from tests import tiny_decoder
from tests.llm.faulty_server import faulty_server
from tests.runtime.recording import passage, say


def ask(handler, *requests, programs=None):
    """The responses of a handler, each of which it must give once."""
    names = programs or [f"p{i}" for i in range(len(requests))]
    found = {}

    def done(index, response):
        assert index not in found
        found[index] = response

    handler([Call(RequestKey(n, 0), r) for n, r in zip(names, requests, strict=True)], done)
    assert set(found) == set(range(len(requests)))
    return [found[index] for index in range(len(requests))]


# --------------------------------------------------------------------------------------- retrieval

TOWNS = [
    Passage("lund", "Lund", "Lund has a cathedral and a university."),
    Passage("kiruna", "Kiruna", "Kiruna has a mine."),
    Passage("visby", "Visby", "Visby has a wall and a cathedral."),
    Passage("umea", "Umea", "Birches grow there."),
]


class Counting:
    """A search that remembers how it was called."""

    def __init__(self):
        self.index = PassageIndex.in_memory(TOWNS, None, "bm25")
        self.calls = []

    def __call__(self, queries, k, allowed, feedback):
        self.calls.append((list(queries), k))
        return self.index.search(queries, k, allowed, feedback)


def test_links_are_followed_within_what_a_program_may_find():
    texts = ("from Visby to Lund", "Lund, not Kiruna", "a lund")
    handler = FollowHandler(TitleIndex(TOWNS), TOWNS)
    found, first = ask(handler, Follow(texts, 9), Follow(texts, 1))
    assert [p.id for p in found.passages] == ["visby", "lund", "kiruna"]
    assert found.scores == (1.0, 2.0, 1.0)
    assert [p.id for p in first.passages] == ["visby"]
    handler = FollowHandler(TitleIndex(TOWNS), TOWNS, {"p": np.array([0, 3])})
    (found,) = ask(handler, Follow(texts, 1), programs=["p"])
    assert [p.id for p in found.passages] == ["lund"]


def test_retrieval_is_one_search_for_each_k():
    search = Counting()
    handler = RetrieveHandler(search, TOWNS)
    found = ask(
        handler,
        Retrieve("cathedral wall", 2),
        Retrieve("mine", 1),
        Retrieve("cathedral university", 2),
    )
    assert search.calls == [(["cathedral wall", "cathedral university"], 2), (["mine"], 1)]
    assert [p.id for p in found[0].passages] == ["visby", "lund"]
    assert [p.id for p in found[1].passages] == ["kiruna"]
    assert [p.id for p in found[2].passages] == ["lund", "visby"]
    assert all(type(score) is float for score in found[0].scores)
    assert found[0].scores[0] > found[0].scores[1] > 0


def test_retrieval_finds_what_the_question_may_find():
    rows = {"a": np.array([1, 2], np.int32), "b": np.array([0, 1], np.int32)}
    handler = RetrieveHandler(Counting(), TOWNS, rows)
    asked = Retrieve("cathedral wall", 4)
    found = ask(handler, asked, asked, programs=["a", "b"])
    assert [p.id for p in found[0].passages][0] == "visby"
    assert {p.id for p in found[0].passages} <= {"kiruna", "visby"}
    assert [p.id for p in found[1].passages][0] == "lund"
    assert {p.id for p in found[1].passages} <= {"lund", "kiruna"}


def test_rows_that_were_not_found_are_left_out():
    def search(queries, k, allowed, feedback):
        return np.array([[2, -1, -1]] * len(queries)), np.zeros((len(queries), 3), np.float32)

    found = ask(RetrieveHandler(search, TOWNS), Retrieve("x", 3))[0]
    assert [p.id for p in found.passages] == ["visby"] and found.scores == (0.0,)


def test_passages_are_fetched_by_their_ids():
    handler = FetchHandler(TOWNS)
    found, missing = ask(handler, Fetch(("visby", "lund")), Fetch(("lund", "osk")))
    assert [p.id for p in found.passages] == ["visby", "lund"] and found.scores == (1.0, 1.0)
    assert isinstance(missing, RequestError) and "no passage 'osk'" in str(missing)


class Letters:
    """An encoder of a text's letters."""

    dim = 26

    def encode(self, texts, kind="passage", progress=None):
        found = np.array([[t.lower().count(chr(97 + i)) for i in range(26)] for t in texts], float)
        return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def test_the_most_similar_questions_are_demonstrated():
    texts = ("Who sang it?", "Where is the mine?", "Where was the mine dug?")
    pool = [Question(f"t{i}", text, ("x",)) for i, text in enumerate(texts)]
    handler = DemonstrateHandler(pool, Letters())
    asked = (
        Demonstrate("where is that mine?", 2),
        Demonstrate("who sang?", 1),
        Demonstrate("a", 9),
    )
    found = ask(handler, *asked)
    assert [[q.id for q in f.questions] for f in found[:2]] == [["t1", "t2"], ["t0"]]
    assert len(found[2].questions) == 3 and found[0].questions[0] is pool[1]


# ----------------------------------------------------------------------------------------- triples


def test_every_passage_is_looked_up_once():
    asked = []
    triple = Triple("a", "is", "b", "p")

    def source(ids):
        asked.append(list(ids))
        return {"p": (triple,), "q": None, "r": ()}

    p, q, r, s = (passage(name) for name in "pqrs")
    found = ask(ExtractHandler(source), Extract((q, p)), Extract((p, r, s)), Extract(()))
    assert asked == [["q", "p", "r", "s"]]
    assert [f.triples for f in found] == [(None, (triple,)), ((triple,), (), None), ()]


def test_entities_come_with_their_triples_and_passages_by_their_ids():
    lives = Triple("Ada Moen", "lives in", "Lund", "lund", 0)
    dug = Triple("Kiruna", "known for", "iron", "kiruna", 0)
    handler = AnchorHandler(EntityIndex([lives, dug]))
    found = ask(handler, Anchor("moen", 3), Anchor("Paris", 3), Anchor("iron ore", 1, "ratio"))
    assert found == [
        Anchored(("Ada Moen",), (lives,)), Anchored((), ()), Anchored(("iron",), (dug,))
    ]  # fmt: skip


class Scores:
    """A ranker with scores by name."""

    def __init__(self, table):
        self.table, self.texts = table, []

    def score(self, queries, texts):
        self.texts.append(texts)
        return [np.array([self.table[t.head] for t in group], np.float32) for group in texts]


A, B, C = (Triple(name, "Is", "X!", "p") for name in "ABC")


def test_ranking_is_one_call_and_ties_keep_their_order():
    ranker = Scores({"A": 0.5, "B": 0.75, "C": 0.5})
    handler = RankHandler(ranker)
    found = ask(
        handler,
        Rank("q", (C, A, B), 0, "r"),
        Rank("q", (A, B, C), 2, "r"),
        Rank("q", (A,), 5, "r"),
    )
    assert [f.texts for f in found] == [(B, C, A), (B, A), (A,)]
    assert [f.scores for f in found] == [(0.75, 0.5, 0.5), (0.75, 0.5), (0.5,)]
    assert len(ranker.texts) == 1
    # Short lists are sorted by insertion, which is stable whatever is asked for.
    many = tuple(Triple("A", "Is", "X!", f"p{i}") for i in range(60))
    assert ask(handler, Rank("q", (*many, B), 0, "r"))[0].texts == (B, *many)


# ------------------------------------------------------------------------------- the language model

SIZES = {
    "batch_size": 3,
    "prefill_chunks": (64, 16),
    "decode_chunk": 8,
    "prefix_tokens": 0,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_decoder.folder(tmp_path_factory.mktemp("m"), max_position_embeddings=256)
    return Engine.open(str(folder), options=EngineConfig(**SIZES))


@pytest.fixture
def handler(engine):
    return GenerateHandler(engine, {"reader": 6, "integrator": 9})


WORDS = ("where was the weaver born?", "the sailor", "who is the patron saint of the town?")


def test_a_batch_gives_what_the_model_gives(engine, handler):
    requests = [say(text) for text in WORDS] + [say(WORDS[0], "integrator")]
    found = ask(handler, *requests)
    direct = engine.generate(
        [handler.request(Call(RequestKey(f"x{i}", 0), r)) for i, r in enumerate(requests)]
    )
    assert [f.text for f in found] == [r.text for r in direct]
    assert [f.usage.generated_tokens for f in found] == [6, 6, 6, 9]  # the role's limit
    assert all(isinstance(f, Generated) and f.finish_reason == "length" for f in found)
    assert found[3].text.startswith(found[0].text)


def test_fields_of_a_request_reach_the_model(handler):
    turns, schema = (Message("user", "a", "b", "c"),), {"type": "object"}
    asked = Generate(turns, "reader", 3, 0.5, 0.9, 7, ("x",), True, schema)
    request = handler.request(Call(RequestKey("p", 2, 1), asked))
    assert request.messages == asked.messages
    assert request == asked
    assert request.continue_final and request.json_schema == {"type": "object"}
    # Greedy requests have no seed, so that they share one entry of the cache.
    assert handler.request(Call(RequestKey("p", 2), say("x"))).seed == 0


def test_samples_depend_on_the_seed_and_the_place_alone(engine):
    def texts(seed, programs):
        handler = GenerateHandler(engine, {"reader": 6}, seed=seed)
        asked = [say("the town", temperature=2.0)] * len(programs)
        return [f.text for f in ask(handler, *asked, programs=programs)]

    three = texts(0, ["a", "b", "c"])
    assert len(set(three)) == 3
    assert texts(0, ["c", "a"]) == [three[2], three[0]]
    assert texts(1, ["a", "b", "c"]) != three


def test_a_prompt_that_does_not_fit_fails_alone(handler):
    found = ask(handler, say(WORDS[0]), say("town " * 500), say(WORDS[1]))
    assert isinstance(found[1], RequestError) and "only 255 fit" in str(found[1])
    assert isinstance(found[0], Generated) and isinstance(found[2], Generated)


def test_responses_are_handed_on_one_by_one(engine, handler, tmp_path):
    """What the journal has when the machine dies in the middle of a batch."""
    requests = [say(text, max_tokens=2 + 12 * i) for i, text in enumerate(WORDS)]
    seen, before = [], engine.usage.generated_tokens

    class Died(Exception):
        pass

    def done(index, response):
        seen.append(index)
        if len(seen) == 2:
            raise Died

    with pytest.raises(Died):
        handler([Call(RequestKey(f"p{i}", 0), r) for i, r in enumerate(requests)], done)
    assert seen == [0, 1]
    assert engine.usage.generated_tokens - before == 2 + 14  # the third was still being written
    assert len(engine._store.allocator.pool) == engine._store.count  # nobody's row holds a page now


def test_what_is_cached_is_not_asked_again(engine, tmp_path):
    cache = ResponseCache(tmp_path / "cache")
    requests = [say(text) for text in WORDS[:2]]

    def run(identity, asked):
        handler = GenerateHandler(engine, {"reader": 6}, cache=cache, identity=identity)
        before = engine.usage.generated_tokens
        found = ask(handler, *asked)
        return found, engine.usage.generated_tokens - before

    first, tokens = run("m", requests)
    assert tokens == 12
    again, tokens = run("m", [*requests, say(WORDS[2])])
    assert tokens == 6
    assert [f.text for f in again[:2]] == [f.text for f in first]
    assert again[0].usage.cached_tokens == again[0].usage.prompt_tokens
    assert run("other", requests)[1] == 12
    assert run("m", requests)[1] == 0
    cache.close()


def test_calls_that_come_while_others_are_answered(engine, tmp_path):
    """Cached ones and scores among them; each is answered in its own place."""
    cache = ResponseCache(tmp_path / "cache")
    handler = GenerateHandler(engine, {"reader": 6}, cache=cache)
    assert handler.accepts_more
    known = ask(handler, say(WORDS[1]))[0]
    turns = (Message("user", WORDS[0]),)
    waves = [
        [say(WORDS[0]), Score(turns, ("a", "b"), "reader")],
        [say(WORDS[1])],  # cached: the next wave comes at once
        [say("town " * 500), say(WORDS[2])],
    ]
    calls, found = [], {}

    def more():
        new = [Call(RequestKey(f"p{len(calls) + i}", 0), r) for i, r in enumerate(waves.pop(0))]
        calls.extend(new)
        return new

    handler(more(), found.__setitem__, lambda: more() if waves else [])
    cache.close()
    direct = GenerateHandler(engine, {"reader": 6})
    expected = ask(direct, *(call.request for call in calls))
    assert sorted(found) == list(range(5))
    assert isinstance(found[3], RequestError) and str(found[3]) == str(expected[3])
    assert found[1].logprobs == expected[1].logprobs and found[2].text == known.text
    assert [found[i].text for i in (0, 4)] == [expected[i].text for i in (0, 4)]


def test_calls_that_are_all_cached_are_no_end(engine, tmp_path):
    """A backend that has nothing left asks once more, and then stops: it must hear of the next."""
    cache = ResponseCache(tmp_path / "cache")
    known, other = say(WORDS[1]), say(WORDS[2])
    ask(GenerateHandler(engine, {"reader": 6}, cache=cache), known)
    waves, came = [[known], [known], [other]], []

    class Backend:
        accepts_more = True

        def generate(self, requests, progress, done, more):
            came.extend(more())
            return engine.generate([*requests, *came], progress, done)

    handler = GenerateHandler(cast(Any, Backend()), {"reader": 6}, cache=cache)
    calls, found = [Call(RequestKey("p", 0), say(WORDS[0]))], {}

    def more():
        new = [Call(RequestKey(f"p{len(waves)}", 0), request) for request in waves.pop(0)]
        calls.extend(new)
        return new

    handler(calls[:], found.__setitem__, lambda: more() if waves else [])
    cache.close()
    assert [request.messages for request in came] == [other.messages]
    assert sorted(found) == list(range(4))


def test_errors_are_not_cached(engine, tmp_path):
    cache = ResponseCache(tmp_path / "cache")
    handler = GenerateHandler(engine, {"reader": 6}, cache=cache)
    for _ in range(2):
        assert isinstance(ask(handler, say("town " * 500))[0], RequestError)
    cache.close()


# ----------------------------------------------------------------------------------------- a server


@pytest.fixture
def server():
    with faulty_server() as running:
        yield running


def served(server, **fields):
    settings = {"model": "m", "base_url": server.url, "max_retries": 0, "max_concurrency": 2}
    return GenerateHandler(OpenAIBackend(OpenAIConfig(**{**settings, **fields})), {"reader": 5})


def asks(name):
    found = yield say(name)
    return found.text


def jobs(count):
    return [Job(f"q{i}", i, lambda i=i: asks(f"q{i}")) for i in range(count)]


def test_a_budget_that_ends_leaves_the_rest_for_another_run(server, tmp_path):
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


def test_a_request_the_server_refuses_fails_alone(server, tmp_path):
    server.script["q1"] = [400]
    with Journal(tmp_path / "j", {}) as book:
        assert Scheduler({"reader": served(server)}, book).run(jobs(3))
        records = {record.id: record for record in book.records()}
    assert "400" in str(records["q1"].error) and records["q1"].outcome is None
    assert records["q0"].outcome == "echo q0" and records["q2"].outcome == "echo q2"


def test_a_full_disk_beneath_a_servers_tasks_stays_one_sentence(server, tmp_path):
    long = "x" * 100_000
    with Journal(tmp_path / "j", {}) as book:
        book.open_program("warm", 0, None)
        pages = book._db.execute("PRAGMA page_count").fetchone()[0] + 1
        book._db.execute(f"PRAGMA max_page_count = {pages}")
        run = Scheduler({"reader": served(server)}, book)
        with pytest.raises(UserError, match="the disk is full"):
            run.run([Job("q", 0, lambda: asks(long))])
