"""Hostile server responses, which the client reads and the journal records."""

import dataclasses
import json
import math

import pytest

from cirag_jax import io
from cirag_jax.errors import UserError
from cirag_jax.llm import openai_format as wire
from cirag_jax.llm.client import OpenAIBackend, OpenAIConfig
from cirag_jax.llm.types import Generate, Generated, Message, Usage
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.scheduler import Job, Scheduler
from cirag_jax.runtime.store import Journal
from cirag_jax.server import retry_after
from tests.attacks.hostile import (
    CORRUPTIONS,
    DEEP,
    MUTATIONS,
    TEXTS,
    attack,
    attempt,
    corrupt,
    mutate_json,
    st,
)
from tests.llm.faulty_server import completion, faulty_server

_TOKEN = {"token": "a", "logprob": -0.5, "id": 7, "top_logprobs": [{"token": "b", "logprob": -1}]}
RESPONSE = completion('{"a": 1}', logprobs={"content": [_TOKEN]})
RESPONSE["usage"]["prompt_tokens_details"] = {"cached_tokens": 1}
PLAIN = Generate((Message("user", "who?"),), role="reader", max_tokens=5)
RICH = dataclasses.replace(PLAIN, logprobs=True, top_logprobs=1, json_schema={}, stop=("}",))


def _read_and_record(content: bytes, request: Generate) -> None:
    """Checks that a response is rejected or can be recorded and replayed."""
    errors = (wire.MalformedResponse, wire.RequestRejected)
    completed = attempt(lambda: wire.read_completion(content, request), *errors)
    if completed is None:
        return
    usage = Usage(
        completed.prompt_tokens or 0, completed.cached_tokens, completed.generated_tokens or 0
    )
    response = Generated(completed.text, completed.finish_reason, usage, tokens=completed.tokens)
    with Journal(":memory:", {}) as journal:
        journal.open_program("q", 0, {})
        journal.record(RequestKey("q", 0), request, response)
        assert journal.replay(RequestKey("q", 0), request) == response
        assert float(sum(journal.totals().usage.values(), Usage()).prompt_tokens) >= 0


@attack(150, MUTATIONS, st.sampled_from([PLAIN, RICH]))
def test_response_mutated_json(changes, request):
    _read_and_record(mutate_json(RESPONSE, changes), request)


@attack(60, CORRUPTIONS, st.sampled_from([PLAIN, RICH]))
def test_response_corrupt_bytes(damages, request):
    _read_and_record(corrupt(json.dumps(RESPONSE).encode(), damages), request)


@attack(40, TEXTS)
def test_response_with_any_text(text):
    _read_and_record(json.dumps(completion(text)).encode(), PLAIN)


@pytest.mark.parametrize("logprob", [math.nan, math.inf])
def test_non_finite_logprob_is_rejected(logprob):
    response = completion("a", logprobs={"content": [{**_TOKEN, "logprob": logprob}]})
    with pytest.raises(wire.MalformedResponse):
        wire.read_completion(
            json.dumps(response).encode(), dataclasses.replace(PLAIN, logprobs=True)
        )


_DATES = ("Mon, 01 Jan {} 00:00:00 GMT", "{} Jan 1 0:0:0", "Sun, 0{}", "{}", "-{}", "1e{}", "+{}:0")


@attack(60, st.sampled_from(_DATES), st.integers(0, 10**30) | TEXTS)
def test_retry_after_with_any_value(form, value):
    seconds = attempt(lambda: retry_after({"retry-after": form.format(value)}, now=1.0))
    assert seconds is None or (math.isfinite(seconds) and seconds >= 0)


EVIL = "half \ud800 a pair, \x1b[2J\x9b31m, \u202egnp.exe, \0"
_REFUSAL = completion(None)
_REFUSAL["choices"][0]["message"]["refusal"] = EVIL
ANSWERS = {
    "surrogates and escapes in an error": (400, {}, EVIL),
    "a deeply nested error": b'{"error":' + b"[" * DEEP,
    "a wait until the year 10^20": (429, {"retry-after": f"Mon, 01 Jan 1{'0' * 20} 00:00:00 GMT"}),
    "a wait that is no number": (503, {"retry-after": "NaN"}),
    "a refusal that drives a terminal": _REFUSAL,
    "a count of 400 digits": {**completion("x"), "usage": {"prompt_tokens": 10**400}},
    "a text of brackets": completion("[" * DEEP),
    "brackets": b"[" * DEEP,
    "NaN": b"NaN",
    "an empty body": b"",
    "an unknown reason": completion("x", finish_reason=EVIL),
}

# Faults of servers that do not affect the text.
ACCEPTED = {"a count of 400 digits", "an unknown reason"}


@pytest.fixture(scope="module")
def server():
    with faulty_server() as running:
        yield running


def _backend(server, **fields) -> OpenAIBackend:
    fields = {"max_retries": 1, **fields}
    config = OpenAIConfig("m", base_url=server.url, backoff=0.0, max_concurrency=4, **fields)
    return OpenAIBackend(config)


def test_bad_responses_are_recorded_as_errors(server, tmp_path, capfd):
    requests = {
        name: dataclasses.replace(PLAIN, messages=(Message("user", name),)) for name in ANSWERS
    }
    requests["a text of brackets"] = dataclasses.replace(
        requests["a text of brackets"], json_schema={}
    )
    for name, answer in ANSWERS.items():
        server.script[name] = [answer] * 2
    requests["good"] = dataclasses.replace(PLAIN, messages=(Message("user", "good"),))

    def job(name: str) -> Job:
        def start():
            response = yield requests[name]
            return response.text

        return Job(name, {}, start)

    with Journal(tmp_path / "journal.sqlite", {}) as journal:
        handler = GenerateHandler(_backend(server), {"reader": 5}, seed=None)
        Scheduler({"reader": handler}, journal).run(map(job, requests))
    with Journal(tmp_path / "journal.sqlite", {}) as journal:
        records = {record.id: record for record in journal.records()}
    assert records["good"].outcome == "echo good"
    for name in ACCEPTED:
        assert (records[name].outcome, records[name].error) == ("x", None)
    for name in ANSWERS.keys() - ACCEPTED:
        error = records[name].error
        assert error and error == io.visible(error) and len(error) < 500, name
    io.say(records["surrogates and escapes in an error"].error)
    assert "\\x1b[2J" in capfd.readouterr().err


@pytest.mark.parametrize("name", [None, 7, [], {}, "\ud800", EVIL])
def test_bad_model_name_is_rejected(server, name, monkeypatch):
    server.models[:] = [name]
    try:
        backend = OpenAIBackend(OpenAIConfig("", base_url=server.url, max_retries=0))
        backend.config.model.encode()
    except UserError as error:
        assert "does not list its models" in str(error)
