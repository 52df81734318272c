"""The server of launch/serve.py, with an engine that has no model."""

import concurrent.futures
import json
import logging
import pathlib
import socket
import struct
import time

import openai
import pytest

from cirag_jax import config_files
from cirag_jax.commands import serve, serve_http
from cirag_jax.errors import UserError
from cirag_jax.llm import api_format
from cirag_jax.llm.api_format import ApiError
from tests.attacks.served import http_request, status_of
from tests.commands.fake_engine import TEXT, FakeEncoder, FakeEngine, Row, serving

_CONFIG = pathlib.Path(__file__).resolve().parents[2] / "configs" / "serve.py"
USER = [{"role": "user", "content": "who?"}]


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine, FakeEncoder()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def _send(server, data: bytes) -> bytes:
    with socket.create_connection(server.server_address[:2], timeout=60) as connection:
        connection.sendall(data)
        response = b""
        while part := connection.recv(1 << 16):
            response += part
    return response


def _wait_for(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the condition did not become true")


_FIELDS = [
    {},
    {"stop": ["born in the"], "max_tokens": 30},  # the text only begins like it
    {"stop": "harbour"},
    {"stop": ["港 — and"], "logprobs": True, "top_logprobs": 1},
    {"logprobs": True, "n": 2, "max_tokens": 11},
]


@pytest.mark.parametrize("fields", _FIELDS)
def test_stream_of_every_token_never_takes_text_back(engine, fields):
    job = api_format.parse_chat({"model": "m", "messages": USER, "stream": True, **fields}, 50)
    stream, row = api_format.Stream(job), Row(engine, job.requests[0])
    events, read = list(stream.start()), 0
    while not row.is_done:
        response = row.part(read)
        read += len(response.tokens or ())
        events += stream.update(0, response, False)
        row.step()
    events += stream.update(0, row.part(read), True)
    choices = [event["choices"][0] for event in events]
    texts = [choice["delta"].get("content", "") for choice in choices]
    assert "".join(texts) == row.part(0).text and "\ufffd" not in "".join(texts)
    assert sum(map(bool, texts)) > 3
    tokens = [t["id"] for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
    assert tokens == [token.id for token in row.part(0).tokens or ()]
    stop = fields.get("stop")
    if isinstance(stop, str):
        assert row.part(0).text == TEXT.partition(stop)[0]


@pytest.mark.parametrize("fields", _FIELDS)
def test_stream_joins_to_response(client, fields):
    request = {"model": "m", "messages": USER, **fields}
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
        tokens = [t for part in parts if part.logprobs for t in part.logprobs.content]
        assert tokens == (choice.logprobs.content if choice.logprobs else [])


def test_completion_stream_joins_to_response(client):
    request = {"model": "m", "prompt": [[5, 6], [7]], "max_tokens": 30, "logprobs": 1}
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [v for p in parts if p.logprobs for v in getattr(p.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)


def test_completion_echo_repeats_prompt(client, engine):
    text = "the weaver <|im_end|>"
    ids = engine.tokenizer.encode_document(text)
    assert len(ids) < len(engine.tokenizer.encode(text))  # a special token is one token
    for prompt in (text, ids):
        request = {"model": "m", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2}
        (choice,) = client.completions.create(**request).choices
        answer = engine.tokenizer.decode(engine.ids[:2])
        assert choice.text == text + answer
        pieces = [engine.tokenizer.piece(i) for i in [*ids, *engine.ids[:2]]]
        assert choice.logprobs.tokens == pieces
        assert choice.logprobs.token_logprobs == [-1.0] * len(ids) + [0.0, -0.5]
        assert choice.logprobs.text_offset[-1] == len("".join(pieces[:-1]))


def test_concurrent_requests_share_batches(engine, server, client):
    engine.gate.clear()
    engine.most = 0
    with concurrent.futures.ThreadPoolExecutor(8) as pool:

        def ask(_):
            return client.chat.completions.create(model="m", messages=USER)

        futures = [pool.submit(ask, i) for i in range(8)]
        batcher = server.models._batcher
        _wait_for(lambda: sum(map(len, batcher._waiting.values())) == 8)
        engine.gate.set()
        assert {f.result().choices[0].message.content for f in futures} == {TEXT}
    assert engine.most == 4


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_dropped_connection_cancels_request(engine, server, streams, reset):
    before, body = engine.cancelled, {"model": "m", "messages": [{"role": "user", "content": ""}]}
    body["messages"][0]["content"], body["stream"] = "forever", streams
    data = http_request("/v1/chat/completions", json.dumps(body).encode())
    batcher = server.models._batcher
    with socket.create_connection(server.server_address[:2]) as connection:
        connection.sendall(data)
        _wait_for(lambda: batcher._running)
        if streams:
            assert connection.recv(1)
        if reset:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    _wait_for(lambda: engine.cancelled == before + 1)
    _wait_for(lambda: not batcher._running and not server._work)


def test_batch_with_bug_fails_and_next_succeeds(client, caplog):
    with caplog.at_level(logging.CRITICAL), pytest.raises(openai.InternalServerError) as error:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "boom"}])
    assert "a bug" not in str(error.value)
    assert client.chat.completions.create(model="m", messages=USER).choices
    with pytest.raises(openai.BadRequestError, match="the numbers are bad"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "nan"}])


def test_embeddings_of_texts(client):
    found = client.embeddings.create(model="e", input=["ab", "abcdef"])
    expected = FakeEncoder().encode(["ab", "abcdef"], "passage")
    assert [d.embedding for d in found.data] == expected.tolist()
    assert found.usage.prompt_tokens == 8
    (one,) = client.embeddings.create(
        model="e", input="ab", dimensions=2, extra_body={"input_type": "query"}
    ).data
    assert one.embedding == pytest.approx([2 / 5**0.5, 1 / 5**0.5])
    with pytest.raises(openai.BadRequestError, match="text 1 of input has 51 tokens"):
        client.embeddings.create(model="e", input=["ab", "a" * 51])
    with pytest.raises(openai.BadRequestError, match="dimensions=5 must be at most 4"):
        client.embeddings.create(model="e", input="ab", dimensions=5)


def test_models_are_listed_and_others_are_missing(client):
    assert [model.id for model in client.models.list()] == ["m", "e"]
    for call in (
        lambda: client.chat.completions.create(model="e", messages=USER),
        lambda: client.embeddings.create(model="m", input="a"),
    ):
        with pytest.raises(openai.NotFoundError, match="does not exist for /v1"):
            call()


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (http_request("/v1/nothing", b"{}"), 404, "'/v1/nothing' does not exist"),
        (http_request("/v1/models", b"{}"), 405, "does not support POST"),
        (http_request("/v1/completions", b"", "GET"), 405, "does not support GET"),
        (http_request("/v1/completions", b"", "BREW"), 501, "Unsupported method"),
        (http_request("/v1/completions", b"{" * 9000000), 413, "more than 1048576 bytes"),
        (http_request("/v1/completions", b"[" * 100000), 400, "not JSON"),
        (http_request("/v1/completions", b'{"model": "m", "prompt": ["\\ud800", [9]]}'), 400,
         "surrogates not allowed"),
        (http_request("/v1/completions", b"[]"), 400, "must be a JSON object"),
        (http_request("/v1/completions", b"{}").replace(b"application/json", b"text/plain"), 415,
         "must be application/json"),
        (http_request("/v1/completions", b"{}").replace(b"Content-Length", b"X"), 411, "required"),
        (http_request("/v1/completions", b"{}").replace(b"-Length: 2", b"-Length: -2"), 400,
         "must be one number"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", 414, "Too Long"),
        (b"nonsense\r\n\r\n", 400, "Bad request"),
    ],
)  # fmt: skip
def test_bad_http_request_is_refused(server, data, status, words):
    response = _send(server, data)
    if response.startswith(b"HTTP"):
        assert status_of(response) == status
    assert words.encode() in response


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"surprise": 1}, "'surprise' is not a field"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "alternatives"),
        ({"seed": 10**30}, "seed="),
        ({"stop": [""]}, "stop must be"),
        ({"stop": ["a"] * 17}, "stop must be"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"stream_options": {}}, "stream_options needs stream=true"),
        ({"n": 1000}, "n=1000 must lie between 1 and 256"),
        ({"add_generation_prompt": False}, "opposite of continue_final_message"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role must be one of"),
        ({"messages": [{"role": "user", "content": None}]}, "content must be a string"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "name is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "of type text"),
        ({"response_format": {"type": "grammar"}}, "response_format.type must be"),
        ({"response_format": {"type": "json_schema"}}, "schema must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "json_schema cannot be enforced",
        ),
    ],
)
def test_chat_field_that_cannot_be_honoured_is_refused(fields, words):
    with pytest.raises(ApiError, match=words.replace("(", r"\(")) as error:
        api_format.parse_chat({"model": "m", "messages": USER, **fields}, 50)
    assert error.value.status == 400
    message = api_format.error_body(error.value)["error"]
    assert message["message"] and len(message["message"]) <= 500


def test_chat_fields_without_effect_are_accepted():
    fields = {"user": "me", "metadata": {"a": "b"}, "frequency_penalty": 0, "tools": []}
    job = api_format.parse_chat({"model": "m", "messages": USER, **fields}, 50)
    assert [r.max_tokens for r in job.requests] == [50]
    seeds = [r.seed for r in api_format.parse_chat(
        {"model": "m", "messages": USER, "n": 3, "seed": 5}, 50
    ).requests]  # fmt: skip
    assert seeds[0] == 5 and len(set(seeds)) == 3


def test_full_queue_and_full_server_are_reported(engine):
    engine.gate.clear()
    with serving(engine, max_waiting=1, max_connections=3) as server:
        body = json.dumps({"model": "m", "messages": USER}).encode()
        data = http_request("/v1/chat/completions", body)
        with socket.create_connection(server.server_address[:2]) as first:
            first.sendall(data)
            _wait_for(lambda: server.models._batcher._waiting["m"])
            assert status_of(_send(server, data)) == 429
            _wait_for(lambda: len(server._deadlines) == 1)
            address = server.server_address[:2]
            with socket.create_connection(address), socket.create_connection(address):
                _wait_for(lambda: len(server._deadlines) == 3)
                assert status_of(_send(server, b"")) == 503
            engine.gate.set()
            assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_slow_request_is_closed(engine, monkeypatch):
    monkeypatch.setattr(serve_http, "_READ_SECONDS", 0.1)
    with serving(engine) as server:
        assert b"incomplete" in _send(server, http_request("/v1/completions", b"{" * 9)[:-1])


def test_close_answers_running_requests(engine):
    with (
        socket.socket() as connection,
        serving(engine) as server,
    ):
        connection.connect(server.server_address[:2])
        body = {"model": "m", "messages": [{"role": "user", "content": "forever"}]}
        connection.sendall(http_request("/v1/chat/completions", json.dumps(body).encode()))
        _wait_for(lambda: server.models._batcher._running)
        server.is_closing = True
        server.models.close()
        assert b" 503 " in connection.recv(1 << 16)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["port=70000"], "config.port=70000 must lie between"),
        (["only_encoder=true"], "needs config.encoder.model"),
        (["merge_adapter=true"], "exactly one adapter"),
        (["adapter=('a/x','b/x')"], "two adapters have the name x"),
        (["max_body_mib=0"], "must be above 0"),
    ],
)
def test_bad_config_is_refused(overrides, words):
    config = config_files.load_config(str(_CONFIG), [f"--config.{each}" for each in overrides])
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        serve._check_config(config)


def test_adapters_have_names():
    adapter = "--config.adapter=('runs/reader','mine=runs/other')"
    config = config_files.load_config(str(_CONFIG), [adapter])
    assert serve._check_config(config) == {"reader": "runs/reader", "mine": "runs/other"}
