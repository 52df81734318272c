"""Hostile requests to the server of launch/serve.py, with an engine that has no model."""

import contextlib
import json
import socket

import pytest

from tests.attacks.hostile import (
    CORRUPTIONS,
    MUTATIONS,
    TEXTS,
    attack,
    corrupt,
    mutate_json,
    st,
)
from tests.attacks.served import REQUESTS, http_request, status_of
from tests.commands.fake_engine import FakeEncoder, FakeEngine, serving

_CASES = [
    (path, {**request, "model": "e" if path == "/v1/embeddings" else "m"})
    for path, requests in REQUESTS.items()
    for request in requests
]
PLACES = st.sampled_from(range(len(_CASES)))


@pytest.fixture(scope="module")
def server():
    with serving(FakeEngine(), FakeEncoder()) as server:
        yield server


def _send(server, data: bytes) -> bytes:
    """Returns the response to data that may be only a part of a request."""
    response = b""
    with (
        socket.create_connection(server.server_address[:2], timeout=60) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(data)
        connection.settimeout(60)
        while part := connection.recv(1 << 16):
            response += part
    return response


def _check(server, path: str, body: bytes) -> None:
    assert status_of(_send(server, http_request(path, body))) in (200, 400, 404, 413)


def test_requests_are_valid(server):
    for path, request in _CASES:
        assert status_of(_send(server, http_request(path, json.dumps(request).encode()))) == 200


@attack(80, PLACES, MUTATIONS)
def test_request_mutated_json(server, place, changes):
    path, request = _CASES[place]
    _check(server, path, mutate_json(request, changes))


@attack(40, PLACES, CORRUPTIONS)
def test_request_corrupt_body(server, place, damages):
    path, request = _CASES[place]
    _check(server, path, corrupt(json.dumps(request).encode(), damages))


@attack(40, TEXTS)
def test_request_hostile_texts(server, text):
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        model = "e" if field == "input" else "m"
        _check(server, path, json.dumps({"model": model, field: text}).encode())
    for messages in ([{"role": text, "content": text}], [{"role": "user", "content": text}]):
        body = {"model": "m", "messages": messages, "stop": [text], "user": text}
        _check(server, "/v1/chat/completions", json.dumps(body).encode())
    _check(server, "/v1/completions", json.dumps({"model": text}).encode())
