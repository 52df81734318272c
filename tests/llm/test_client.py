"""The OpenAI-compatible client, with a local server that fails in many ways."""

import asyncio
import dataclasses
import datetime
import email.utils
import json
import logging
import threading
from typing import Any

import httpx2
import pytest

from cirag_jax import server as server_lib
from cirag_jax.errors import UserError
from cirag_jax.llm.client import OpenAIBackend, OpenAIConfig
from cirag_jax.llm.types import Generate, Message, Score, Usage
from tests.llm.faulty_server import COMPLETION_TOKENS, PROMPT_TOKENS, completion, faulty_server

KEY = "key-of-the-tests/0123456789"  # does not match the pattern of OpenAI's keys


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with faulty_server() as running:
        yield running


class Waits(list):
    """Replaces asyncio.sleep, and records the waiting times."""

    async def __call__(self, seconds):
        self.append(seconds)


@pytest.fixture
def waits(monkeypatch):
    """The client's waiting times, with a fixed clock and fixed random numbers."""
    monkeypatch.setattr(server_lib.asyncio, "sleep", recorded := Waits())
    monkeypatch.setattr(server_lib.time, "time", lambda: 0.0)
    monkeypatch.setattr(server_lib.random, "random", lambda: 0.5)
    return recorded


@pytest.fixture
def backend_of(waits):
    def create(running, *, spent=None, **kw):
        config = OpenAIConfig(**{"model": "m", "base_url": running.url, "max_concurrency": 1, **kw})
        return OpenAIBackend(config, spent=spent), waits

    return create


def ask(text, **fields):
    return Generate((Message("user", text),), **{"max_tokens": 7, **fields})


def test_generate_in_order_with_usage(server, backend_of):
    backend, _ = backend_of(server, max_concurrency=4)
    progress = []
    requests = [ask(f"q{i}") for i in range(9)]
    responses = backend.generate(requests, lambda done, tokens: progress.append((done, tokens)))
    assert [r.text for r in responses] == [f"echo q{i}" for i in range(9)]
    assert all(r.finish_reason == "stop" and r.error is None for r in responses)
    usage = responses[0].usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (PROMPT_TOKENS, 4)
    assert usage.generated_tokens == COMPLETION_TOKENS
    assert backend.usage.generated_tokens == 9 * COMPLETION_TOKENS
    assert progress == [(i, 5 * i) for i in range(1, 10)]


def test_generate_bounds_concurrency(server, backend_of):
    server.gate = threading.Barrier(3)  # the test times out unless three are concurrent
    backend, _ = backend_of(server, max_concurrency=3)
    assert all(r.error is None for r in backend.generate([ask(f"q{i}") for i in range(9)]))
    assert server.most_under_way == 3


def test_more_requests_are_sent_while_others_wait(server, backend_of):
    """Later requests are sent and answered while one response is delayed."""
    backend, _ = backend_of(server, max_concurrency=2)
    assert backend.accepts_more
    waves, order = [[ask("b"), ask("c")], [ask("d")]], []

    def more():
        if not waves:
            server.closing.set()  # closes the slow connection, whose request is retried
        return waves.pop(0) if waves else []

    server.script["a"] = ["slow"]
    responses = backend.generate([ask("a")], done=lambda i, _: order.append(i), more=more)
    assert [r.text for r in responses] == [f"echo {text}" for text in "abcd"]
    assert order == [1, 2, 3, 0]


def test_more_extends_timeouts(server, backend_of):
    """A response that arrives during `more` must not time out, because a retry costs money."""
    backend, _ = backend_of(server)

    async def run():
        loop: Any = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now

        def more():
            nonlocal now
            now += 100
            return [ask("a")]

        async with backend._timeout() as timeout:
            before = timeout.when()
            requests = backend._call_more(more)
            after = timeout.when()
        del loop.time
        return requests, after - before

    assert asyncio.run(run()) == ([ask("a")], pytest.approx(100))


@pytest.mark.parametrize(
    "fault", [408, 409, 429, 500, 502, 503, "half", "cut", "nothing", b"", b"<html>", b'{"a": 1}']
)
def test_temporary_fault_is_retried(server, fault, backend_of):
    server.script["q"] = [fault, fault]
    backend, waits = backend_of(server)
    response, other = backend.generate([ask("q"), ask("other")])
    assert (response.text, response.error) == ("echo q", None)
    assert other.text == "echo other"
    assert waits == [0.5, 1.0]  # the random number 0.5 times 1 s and 2 s


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (500, "500"),
        (429, "429"),
        ("half", "connection failed"),
        ("nothing", "connection failed"),
        (b"", "empty answer"),
        (b"{{", "not JSON"),
        (b'{"choices": []}', "not a chat completion"),
        (b'{"choices": [{"message": {"content": 3}}]}', "not a chat completion"),
        (b"[1]", "not a chat completion"),
    ],
)
def test_permanent_fault_fails_only_its_request(server, fault, words, backend_of):
    server.script["q"] = [fault] * 3
    backend, waits = backend_of(server, max_retries=2)
    first, response, last = backend.generate([ask("a"), ask("q"), ask("b")])
    assert response.finish_reason == "error"
    assert "3 attempts" in str(response.error) and words in str(response.error)
    assert (first.text, last.text) == ("echo a", "echo b")
    assert len(waits) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_client_error_is_not_retried(server, status, backend_of):
    server.script["q"] = [status]
    backend, waits = backend_of(server)
    response, other = backend.generate([ask("q"), ask("other")])
    assert f"answered {status}: told to fail" in str(response.error)
    assert other.text == "echo other"
    assert waits == [] and server.texts() == ["q", "other"]


def test_exhausted_quota_is_not_retried(server, backend_of):
    server.script["q"] = [(429, {}, "insufficient_quota: pay first")]
    backend, waits = backend_of(server)
    assert "pay first" in str(backend.generate([ask("q")])[0].error)
    assert waits == []


def test_retry_after_seconds_and_date(server, backend_of, monkeypatch):
    date = datetime.datetime(2026, 1, 1, 0, 0, 42, tzinfo=datetime.UTC)
    server.script["q"] = [
        (429, {"Retry-After": "7"}),
        (503, {"Retry-After": email.utils.format_datetime(date, usegmt=True)}),
        (429, {"Retry-After": "soon"}),
    ]
    now = date.timestamp() - 12
    monkeypatch.setattr(server_lib.time, "time", lambda: now)
    backend, waits = backend_of(server)
    assert backend.generate([ask("q")])[0].text == "echo q"
    # The server's wait plus jitter; an unreadable header is ignored.
    assert waits == [7 + 0.5, 12 + 1.0, 2.0]


def test_retry_after_too_long_fails(server, backend_of):
    server.script["q"] = [(429, {"Retry-After": "601"})]
    backend, waits = backend_of(server)
    assert "601 s" in str(backend.generate([ask("q")])[0].error)
    assert waits == []


def test_backoff_doubles_up_to_maximum_with_jitter(server, backend_of, monkeypatch):
    server.script["q"] = [500] * 5
    monkeypatch.setattr(server_lib.random, "random", iter([1, 1, 0, 1, 1]).__next__)
    backend, waits = backend_of(server, max_backoff=5)
    assert backend.generate([ask("q")])[0].text == "echo q"
    assert waits == [1, 2, 0, 5, 5]


@pytest.mark.parametrize("fault", ["slow", "trickle"])
def test_slow_response_times_out(server, fault, backend_of):
    server.script["q"] = [fault]
    backend, _ = backend_of(server, timeout=0.3, max_retries=0)
    response, other = backend.generate([ask("q"), ask("other")])
    assert "no answer within 0.3 s" in str(response.error)
    assert other.text == "echo other"


def test_no_server_fails(monkeypatch, waits):
    with faulty_server() as stopped:
        url = stopped.url
    config = OpenAIConfig("m", url, server="vllm", max_retries=1)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    response = OpenAIBackend(config).generate([ask("q")])[0]
    assert "connection failed" in str(response.error) and len(waits) == 1


def test_request_body(server, backend_of):
    backend, _ = backend_of(server, server="vllm", extra_body={"min_p": 0.1}, omit=("seed",))
    turns = (Message("system", "s"), Message("user", "u", " o"), Message("assistant", "I think"))
    request = Generate(
        turns, "", 7, temperature=0.5, top_p=0.9, seed=3, stop=("\n",), continue_final=True
    )
    backend.generate([request])
    assert server.bodies == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u o"},
                {"role": "assistant", "content": "I think"},
            ],
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["\n"],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "min_p": 0.1,
        }
    ]
    backend, _ = backend_of(server)
    backend.generate([ask("greedy"), ask("sampled", temperature=1.0, seed=3)])
    greedy, sampled = server.bodies[1:]
    assert "seed" not in greedy and greedy["max_completion_tokens"] == 7
    assert sampled["seed"] == 3 and server.headers[1]["authorization"] == f"Bearer {KEY}"


def test_json_schema_and_logprobs(server, backend_of):
    content = [
        {
            "token": "{",
            "logprob": -0.25,
            "top_logprobs": [{"token": "{", "logprob": -0.25}, {"token": "[", "logprob": -2.0}],
        }
    ]
    server.script["q"] = [completion('{"a": 1}', logprobs={"content": content})]
    server.script["prose"] = [completion("Sure! Here")]
    server.script["bare"] = [completion("x")]
    schema = {"type": "object"}
    backend, _ = backend_of(server)
    response, prose, bare = backend.generate(
        [
            ask("q", json_schema=schema, top_logprobs=2),
            ask("prose", json_schema=schema),
            ask("bare", logprobs=True),
        ]
    )
    assert response.text == '{"a": 1}'
    assert response.tokens is not None and len(response.tokens) == 1
    token = response.tokens[0]
    assert (token.text, token.id, token.logprob) == ("{", -1, -0.25)
    assert token.top == (("{", -1, -0.25), ("[", -1, -2.0))
    assert token.offset == 0
    assert server.bodies[0]["response_format"]["json_schema"]["schema"] == schema
    assert server.bodies[0]["logprobs"] is True and server.bodies[0]["top_logprobs"] == 2
    assert "ignored json_schema" in str(prose.error)
    assert "no log-probabilities" in str(bare.error)


def test_token_offsets(server, backend_of):
    pieces = [("A", None), ("\\xc3", [0xC3]), ("\\xb8", [0xB8]), (" b", [32, 98]), ("", None)]
    content = [{"token": text, "bytes": raw, "logprob": -1.0} for text, raw in pieces]
    server.script["q"] = [completion("Aø b", logprobs={"content": content})]
    server.script["bad"] = [
        completion("A", logprobs={"content": [{**content[0], "bytes": 1 << 40}]})
    ]
    backend, _ = backend_of(server, max_retries=0)
    response, bad = backend.generate([ask("q", logprobs=True), ask("bad", logprobs=True)])
    assert response.tokens is not None
    assert [token.offset for token in response.tokens] == [0, 1, 1, 2, 4]
    assert "not a chat completion" in str(bad.error)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("openai", {"continue_final": True}, "continue_final"),
        ("transformers", {"continue_final": True}, "continue_final"),
        ("transformers", {"json_schema": {}}, "json_schema"),
        ("transformers", {"logprobs": True}, "log-probabilities"),
        ("vllm", {"entropy": True}, "entropy"),
        ("vllm", {"attention": True}, "attention"),
    ],
)
def test_unsupported_feature_fails_without_request(server, kind, fields, words, backend_of):
    backend, _ = backend_of(server, server=kind)
    turns = (Message("user", "q"), Message("assistant", "so"))
    response, other = backend.generate([Generate(turns, **fields), ask("other")])
    assert words in str(response.error) and response.finish_reason == "error"
    assert other.text == "echo other" and server.texts() == ["other"]


def test_completions_without_text(server, backend_of):
    server.script["filter"] = [completion("x", "content_filter")]
    server.script["long"] = [completion(None, "length")]
    server.script["stop"] = [completion("one\ntwo")]
    server.script["overlap"] = [completion("one, two;three")]
    refusal = completion(None)
    refusal["choices"][0]["message"]["refusal"] = "I will not"
    server.script["refusal"] = [refusal]
    backend, waits = backend_of(server)
    names = ("filter", "long", "stop", "refusal")
    filtered, long, stop, refused = backend.generate([ask(n, stop=("\n",)) for n in names])
    assert "content filter" in str(filtered.error)
    assert (long.text, long.finish_reason, long.error) == ("", "length", None)
    assert stop.text == "one"
    (overlap,) = backend.generate([ask("overlap", stop=("two;three", ", two;"))])
    assert overlap.text == "one"  # both stop strings start within the text; the first one counts
    assert "I will not" in str(refused.error)
    assert waits == []


@pytest.mark.parametrize(
    ("content", "reason", "text", "finish"),
    [
        ("Lund", "eos", "Lund", "stop"),
        ("Lund", "end_turn", "Lund", "stop"),
        ("Lund", None, "Lund", "stop"),
        ("Lund", "stop_sequence", "Lund", "stop"),
        ("Lu", "max_tokens", "Lu", "length"),
        ("Lu", "MAX_TOKENS", "Lu", "length"),
        (None, "stop", "", "stop"),
        ([{"type": "text", "text": "Lu"}, {"type": "text", "text": "nd"}], "stop", "Lund", "stop"),
        (
            [{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "Lund"}],
            "stop",
            "Lund",
            "stop",
        ),
        ("a\ud800b", "stop", "a\ufffdb", "stop"),
    ],
)
def test_completion_of_other_servers_is_accepted(server, backend_of, content, reason, text, finish):
    server.script["q"] = [completion(content, reason)]
    backend, waits = backend_of(server)
    (response,) = backend.generate([ask("q", max_tokens=99)])
    assert (response.text, response.finish_reason, response.error) == (text, finish, None)
    assert waits == [] and len(server.bodies) == 1


def test_completion_unknown_reason_at_the_limit_is_length(server, backend_of):
    server.script["q"] = [completion("Lu", "eos")]
    backend, _ = backend_of(server)
    (response,) = backend.generate([ask("q", max_tokens=COMPLETION_TOKENS)])
    assert response.finish_reason == "length"


@pytest.mark.parametrize("count", [None, -1, 7.0, "7", True, 10**400])
def test_completion_with_an_odd_token_count_is_accepted(server, backend_of, count):
    server.script["q"] = [{**completion("Lund"), "usage": {"completion_tokens": count}}]
    backend, waits = backend_of(server)
    (response,) = backend.generate([ask("q")])
    assert response.text == "Lund" and waits == []
    assert response.usage.generated_tokens == (7 if count == 7 else 2)  # else estimated


def test_completion_thoughts_in_a_field_of_their_own_are_kept_apart(server, backend_of):
    for name in ("reasoning_content", "reasoning"):
        body = completion("Lund")
        body["choices"][0]["message"][name] = "Malmo?"
        server.script["q"] = [body]
        (response,) = backend_of(server)[0].generate([ask("q")])
        assert (response.text, response.thoughts) == ("Lund", "Malmo?")


def test_completion_stop_string_within_thoughts_does_not_cut_the_answer(server, backend_of):
    server.script["q"] = [completion("<think>a\nb</think>Lund\nMalmo")]
    backend, _ = backend_of(server)
    (response,) = backend.generate([ask("q", stop=("\n",))])
    assert response.text == "<think>a\nb</think>Lund"


def test_completion_json_after_thoughts_satisfies_the_schema(server, backend_of):
    server.script["q"] = [completion('<think>{?</think>{"a": 1}')]
    backend, _ = backend_of(server)
    (response,) = backend.generate([ask("q", json_schema={"type": "object"})])
    assert response.error is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"choices": []}, "choices is []"),
        ({"error": "x"}, "choices is null"),
        ({"choices": [{"text": "Lund"}]}, "choices[0].message is null"),
        ({"choices": [{"message": {"content": 3}}]}, "choices[0].message.content is 3"),
        ([1], "the answer is [1]"),
    ],
)
def test_completion_of_another_api_names_the_field(server, backend_of, body, words):
    server.script["q"] = [json.dumps(body).encode()]
    backend, _ = backend_of(server, max_retries=0)
    (response,) = backend.generate([ask("q")])
    assert words in str(response.error) and "base_url" in str(response.error)


def test_rejected_field_names_the_way_out(server, backend_of):
    server.script["q"] = [(400, {}, "Unsupported parameter: 'temperature'")]
    backend, _ = backend_of(server)
    (response,) = backend.generate([ask("q")])
    assert "add 'temperature' to `omit`" in str(response.error)


def test_too_long_prompt_shortens_observations(server, backend_of):
    too_long = (400, {}, "This model's maximum context length is 9 tokens")
    old, new = " ".join(["old"] * 160), " ".join(["new"] * 40)
    turns = (Message("user", "a ", old), Message("assistant", "b"), Message("user", "c ", new))
    server.script[f"c {new}"] = [too_long, too_long]
    backend, waits = backend_of(server, overflow="truncate")
    (response,) = backend.generate([Generate(turns)])
    assert response.usage.truncated == 1
    sent = [[m["content"] for m in body["messages"]] for body in server.bodies]
    assert [turn[1:] for turn in sent] == [["b", f"c {new}"]] * 3  # the oldest is shortened first
    lengths = [len(turn[0].removesuffix(" [omitted]")) for turn in sent]
    assert lengths[0] > lengths[1] > lengths[2] > 0
    assert all(f"a {old}".startswith(turn[0].removesuffix(" [omitted]")) for turn in sent)


def test_too_long_prompt_uses_the_lengths_that_a_server_names(server, backend_of):
    names = (
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
        "(4500 in the messages, 500 in the completion)."
    )
    turn = Message("user", "c ", " ".join(["word"] * 1000))
    server.script[turn.text] = [(400, {}, names)]
    backend, _ = backend_of(server, overflow="truncate")
    (response,) = backend.generate([Generate((turn,))])
    assert response.error is None and len(server.bodies) == 2
    share = len(server.bodies[1]["messages"][0]["content"]) / len(turn.text)
    assert 0.75 < share < 4096 / 5000


@pytest.mark.parametrize(
    ("body", "excess"),
    [
        ("maximum context length is 4096 tokens, your request has 8192 input tokens", 0.52),
        ("request (8192 tokens) exceeds the available context size (4096 tokens)", 0.52),
        ("maximum context length is 4096 tokens (request 1234567890)", 1 / 3),  # not a size
        ("maximum context length is 4096 tokens; you sent 99999999 tokens", 0.9),
        ("the prompt is too long", 1 / 3),
    ],
)
def test_excess_follows_the_sizes_that_a_server_states(body, excess):
    assert server_lib.excess(body) == pytest.approx(excess)


def test_too_long_prompt_without_truncation_fails(server, backend_of):
    too_long = (400, {}, "This model's maximum context length is 9 tokens")
    turns = (Message("user", "a", " old"), Message("assistant", "b"), Message("user", "c", " new"))
    server.script["c new"] = [too_long] * 4
    backend, waits = backend_of(server)
    (response,) = backend.generate([Generate(turns)])
    assert "maximum context length" in str(response.error) and waits == []


def test_budget_exhausted_stops_sending(server, backend_of):
    # A request reserves 3 + 6 + 1 prompt tokens (estimated) and 20 new ones; it uses 15.
    backend, _ = backend_of(server, budget_tokens=65)
    responses = backend.generate([ask(f"q{i}", max_tokens=20) for i in range(6)])
    assert [r.error is None for r in responses] == [True] * 3 + [False] * 3
    assert "not sent: the budget of 65 tokens would be exceeded (45 spent" in str(
        responses[3].error
    )
    assert server.texts() == ["q0", "q1", "q2"] and backend.budget_exhausted
    assert backend.generate([ask("later", max_tokens=1)])[0].finish_reason == "error"


def test_budget_counts_reserved_and_spent_tokens(server, backend_of):
    server.gate = threading.Barrier(2)
    spent = Usage(prompt_tokens=7, generated_tokens=3)
    backend, _ = backend_of(server, budget_tokens=95, max_concurrency=4, spent=spent)
    responses = backend.generate([ask(f"q{i}", max_tokens=20) for i in range(4)])
    # 10 spent and twice 30 reserved tokens leave no room for a third request.
    assert [r.error is None for r in responses] == [True, True, False, False]
    assert len(server.texts()) == 2


def test_budget_counts_lost_responses(server, backend_of):
    server.script["q"] = [b"garbage"] * 9
    backend, _ = backend_of(server, budget_tokens=65)  # two attempts of 30
    assert "not sent" in str(backend.generate([ask("q", max_tokens=20)])[0].error)
    assert server.texts() == ["q", "q"]


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [(httpx2.ConnectError, 4), (httpx2.ConnectTimeout, 4), (httpx2.PoolTimeout, 4),
     (httpx2.ReadTimeout, 2), (httpx2.ReadError, 2)],
)  # fmt: skip
def test_budget_ignores_failed_connections(server, monkeypatch, fault, attempts, backend_of):
    attempts_made = []

    async def fail(transport, request):
        attempts_made.append(request)
        raise fault("told to fail", request=request)

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", fail)
    backend, _ = backend_of(server, budget_tokens=65, max_retries=3)  # two attempts of 30
    backend.generate([ask("q", max_tokens=20)])
    assert len(attempts_made) == attempts and backend.budget_exhausted == (attempts == 2)


def test_connection_timeout_is_shorter_than_attempt(server, monkeypatch, backend_of):
    timeouts = []

    async def send(transport, request):
        timeouts.append(request.extensions["timeout"])
        raise httpx2.ConnectTimeout("told to fail", request=request)

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", send)
    backend, _ = backend_of(server, timeout=10, max_retries=0)
    backend.generate([ask("q")])
    assert timeouts[0] == {"connect": 9, "read": None, "write": None, "pool": 9}


def test_estimate(server, backend_of):
    backend, _ = backend_of(server)
    estimate = backend.estimate([ask("abcdef"), ask("abc")])
    assert estimate == "2 requests: at most about 21 prompt tokens and 14 generated tokens"


def test_key_is_scrubbed_everywhere(server, caplog, capfd, backend_of):
    echo_key = f"Incorrect API key provided: {KEY}, also sk-abcd****wxyz"
    server.script["q"] = [(401, {}, echo_key)]
    server.script["r"] = [(500, {}, echo_key)] * 2
    caplog.set_level(logging.DEBUG)
    backend, _ = backend_of(server, max_retries=1)
    responses = backend.generate([ask("q"), ask("r"), ask("s")])
    assert "Incorrect API key provided: [key], also [key]" in str(responses[0].error)
    output = "".join(capfd.readouterr())
    for text in (
        caplog.text,
        output,
        repr(responses),
        repr(backend.config),
        repr(vars(backend.config)),
    ):
        assert KEY not in text and "wxyz" not in text


def test_generate_inside_event_loop(server, backend_of):
    backend, _ = backend_of(server)

    async def notebook():
        return backend.generate([ask("q")])

    assert asyncio.run(notebook())[0].text == "echo q"


def test_done_receives_every_response(server, backend_of):
    responses_by_index = {}
    server.script["b"] = [400]
    backend, _ = backend_of(server)
    responses = backend.generate([ask("a"), ask("b")], done=responses_by_index.__setitem__)
    assert responses_by_index == dict(enumerate(responses))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"api_key_env": KEY}, "not a key"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY must contain"),
        ({"server": "sglang"}, "is not one of openai"),
        ({"base_url": "http://user:secret@host/v1"}, "must not contain credentials"),
        ({"base_url": "localhost:8000"}, "must be a URL such as"),
        ({"max_concurrency": 0}, "max_concurrency=0 must be at least 1"),
        ({"timeout": 0.0}, "timeout=0.0 must be above 0"),
        ({"max_retries": -1}, "max_retries=-1 must not be negative"),
        ({"budget_tokens": -5}, "budget_tokens=-5 must not be negative"),
    ],
)
def test_bad_settings_are_rejected(monkeypatch, fields, words):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(UserError, match=words) as caught:
        OpenAIBackend(dataclasses.replace(OpenAIConfig("m"), **fields))
    assert KEY not in str(caught.value) and "secret" not in str(caught.value)


def test_score_is_rejected(server, backend_of):
    backend, _ = backend_of(server)
    with pytest.raises(UserError, match="backend=jax"):
        backend.score([Score((Message("user", "q"),), ("a",))])
