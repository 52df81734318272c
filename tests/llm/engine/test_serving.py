"""Given tokens, echo and cancellation in the engine, and its server."""

import dataclasses
import signal
import subprocess
import sys

import jax
import numpy as np
import openai
import pytest

from cirag_jax.llm.client import OpenAIBackend, OpenAIConfig
from cirag_jax.llm.engine.engine import CANCELLED, Engine
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.llm.types import Complete, Message, Score
from cirag_jax.models import lora
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.retrieval.encoders import FlaxEncoder
from cirag_jax.retrieval.server_encoder import EmbeddingConfig, ServerEncoder
from tests import tiny
from tests.commands.fake_engine import serving
from tests.llm.engine.engines import SIZES, ask, numbers, open_engine, pages_are_free, text

pytestmark = pytest.mark.slow

ECHO = {"echo": True, "max_tokens": 0, "logprobs": True}


@pytest.fixture(scope="module")
def ids(shared_engine):
    return tuple(shared_engine.tokenizer.encode(text(60, 1)).tolist())


@pytest.fixture(scope="module")
def shared_engine(folder):
    return open_engine(folder)


def test_echo_equals_scores_of_continuation(shared_engine):
    engine, messages = shared_engine, (Message("user", text(30, 2)),)
    continuation = text(25, 3)
    (scored,) = engine.score([Score(messages, (continuation,))])
    expected = scored.tokens[0]
    prompt = engine.tokenizer.encode_prompt(messages).tolist()
    tokens = (*prompt, *(token.id for token in expected))
    (response,) = engine.generate([Complete(tokens=tokens, **ECHO)])
    assert [token.id for token in response.prompt] == list(tokens)
    found = [token.logprob for token in response.prompt[len(prompt) :]]
    np.testing.assert_allclose(found, [t.logprob for t in expected], rtol=0, atol=2e-5)
    assert (response.text, response.tokens, response.finish_reason) == ("", (), "length")


def test_echo_neither_reads_nor_changes_the_cache(shared_engine, ids):
    engine = shared_engine
    engine.forget()
    echo = Complete(tokens=ids, top_logprobs=1, **ECHO)
    (first,) = engine.generate([echo])
    (fresh,) = engine.generate([Complete(tokens=ids, max_tokens=9, logprobs=True)])
    assert fresh.usage.cached_tokens == 0
    (again,) = engine.generate([echo])
    assert again.prompt == first.prompt and again.usage.cached_tokens == 0
    (answer,) = engine.generate([dataclasses.replace(echo, max_tokens=9)])
    assert answer.prompt == first.prompt
    assert answer.text == fresh.text
    for token in first.prompt[1:]:
        best = token.top[0]
        assert best[2] >= token.logprob and (best[2] == token.logprob) == (best[1] == token.id)
    assert first.prompt[0].logprob is None and pages_are_free(engine)


def test_echo_of_shortest_and_longest_prompt(shared_engine, ids):
    engine = shared_engine
    context = engine.context
    long = (ids * (context // len(ids) + 1))[: context + 1]
    requests = [
        Complete(tokens=ids[:1], **ECHO),
        Complete(tokens=long[:context], **ECHO),
        Complete(tokens=long, **ECHO),
        Complete(tokens=long[:context], max_tokens=1),
        Complete(tokens=(), **ECHO),
        Complete(tokens=(engine.tokenizer.vocab_size,), **ECHO),
    ]
    responses = engine.generate(requests)
    assert [len(response.prompt) for response in responses[:2]] == [1, context]
    assert [response.error for response in responses[2:]] == [
        f"the prompt has {context + 1} tokens but only {context} fit",
        f"the prompt has {context} tokens but only {context - 1} fit",
        "the prompt has no tokens",
        f"tokens must lie between 0 and {engine.tokenizer.vocab_size - 1}",
    ]
    assert pages_are_free(engine)


def test_cancelled_rows_end_and_others_keep_their_numbers(shared_engine):
    engine = shared_engine
    requests = [ask(text(9, i), max_tokens=60, temperature=1.0, seed=i) for i in range(5)]
    expected = engine.generate(requests)
    responses, parts = {}, {}

    def on_part(index, part):
        response = part(0)
        parts.setdefault(index, []).append(len(response.tokens))
        assert expected[index].text.startswith(response.text.rstrip("\ufffd"))
        # Request 1 is cancelled while it decodes, 4 before its prompt is computed.
        return not (index == 4 or index == 1 and len(response.tokens) >= 16)

    engine.serve(requests, responses.__setitem__, on_part=on_part)
    assert {i for i, r in responses.items() if r.error == CANCELLED} == {1, 4}
    assert parts[4] == [0] and parts[1] == [0, 8, 16]
    for index in (0, 2, 3):
        assert numbers(responses[index]) == numbers(expected[index])
    assert pages_are_free(engine)


def test_engine_with_adapter_equals_engine_opened_with_it(folder, shared_engine, ids):
    settings = lora.LoraConfig(rank=4, alpha=32)
    state = lora.init_adapter(shared_engine.config, settings, seed=1)
    state = jax.tree.map(lambda x: x + 0.05, state)  # B is 0 at first
    request = [Complete(tokens=ids, max_tokens=9, logprobs=True)]
    (base,) = shared_engine.generate(request)
    (adapted,) = shared_engine.with_adapter((state, settings)).generate(request)
    engine = Engine.open(str(folder), adapter=(state, settings), options=EngineConfig(**SIZES))
    (opened,) = engine.generate(request)
    assert numbers(adapted) == numbers(opened) != numbers(base)
    assert numbers(shared_engine.generate(request)[0]) == numbers(base)


def test_openai_client_and_our_clients(shared_engine, ids, tmp_path):
    engine = shared_engine
    encoder = FlaxEncoder(open_encoder(str(tiny.model_folder(tmp_path / "encoder")))[0])
    requests = [ask(text(5, i), max_tokens=12, top_logprobs=2) for i in range(5)]
    expected = engine.generate(requests)
    with serving(engine, encoder) as server:
        config = OpenAIConfig("m", server.url, server="vllm", max_retries=0)
        for found, wanted in zip(OpenAIBackend(config).generate(requests), expected, strict=True):
            assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)
            assert [(t.id, t.logprob, t.top) for t in found.tokens or ()] == [
                (t.id, t.logprob, t.top) for t in wanted.tokens or ()
            ]
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            (choice,) = client.completions.create(
                model="m", prompt=list(ids), max_tokens=0, echo=True, logprobs=1
            ).choices
            schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
            schema |= {"required": ["a"], "additionalProperties": False}
            answer = client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "a"}],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema},
                },
            )
        (echoed,) = engine.generate([Complete(tokens=ids, top_logprobs=1, **ECHO)])
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [t.logprob for t in echoed.prompt]
        assert choice.text == "".join(token.text for token in echoed.prompt)
        assert answer.choices[0].message.content in ('{"a": true}', '{"a": false}')
        remote = ServerEncoder(EmbeddingConfig("e", server.url), {})
        texts = ["a sailor", "the mill"]
        np.testing.assert_allclose(remote.encode(texts), encoder.encode(texts), rtol=0, atol=1e-6)
        remote.close()


def test_command_serves_until_sigterm(folder, tmp_path):
    command = [sys.executable, "launch/serve.py", f"--config.model={folder}", "--config.port=0"]
    command += ["--config.name=tiny", f"--workdir={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if " at http://" in line)
        url = line.partition(" at ")[2].partition(";")[0]
        config = OpenAIConfig("", url, max_retries=0)
        (response,) = OpenAIBackend(config).generate([ask("the sailor", logprobs=False)])
        assert response.error is None and response.text
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and '"models": ["tiny"]' in output
    assert not list(tmp_path.iterdir())
