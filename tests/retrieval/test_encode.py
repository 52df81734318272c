"""Encoding in buckets: order, duplicates, independent rows, one compilation per bucket."""

import concurrent.futures
import dataclasses

import jax
import numpy as np
import pytest
import tokenizers

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.retrieval import encode as encode_lib
from cirag_jax.retrieval.buckets import BUCKETS, batch_rows, bucket_length, bucket_lengths
from cirag_jax.retrieval.encode import encode, pad, tokenize
from tests import tiny


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return load_encoder(str(tiny.model_folder(tmp_path_factory.mktemp("model"))))


def texts(count: int, longest: int = 60) -> list[str]:
    rng = np.random.default_rng(0)
    words = np.array(["balia", "corum", "potter", "saint", "born", "in", "a", "7"])
    return [" ".join(rng.choice(words, rng.integers(1, longest))) for _ in range(count)]


def test_encode_rows_are_ordered_and_independent(encoder):
    some = texts(150)
    together = encode(encoder, None, some, tokens_per_batch=512)
    for index in (0, 17, 149):
        alone = encode(encoder, None, [some[index]], tokens_per_batch=512)
        np.testing.assert_array_equal(alone[0], together[index])
    backwards = encode(encoder, None, some[::-1], tokens_per_batch=512)
    np.testing.assert_array_equal(backwards[::-1], together)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)


def test_encode_equal_texts_are_encoded_once(encoder):
    finished = []
    emb = encode(encoder, None, ["potter", "saint", "potter"] * 3, progress=finished.append)
    assert sum(finished) == 2
    assert emb.shape == (9, encoder.dim)
    np.testing.assert_array_equal(emb[0], emb[2])
    assert np.abs(emb[0] - emb[1]).max() > 1e-3


def test_encode_compiles_once_per_bucket(encoder):
    # No other test compiles this architecture.
    encoder = load_encoder(str(encoder.folder), pooling="cls")
    before = encode_lib.TRACES.copy()
    some = texts(90, longest=40)
    for part in (some, some[:7], some[40:]):
        encode(encoder, None, part, tokens_per_batch=768)
    encode(encoder, jax.tree.map(lambda x: x * 1.5, encoder.state), some, tokens_per_batch=768)
    traced = encode_lib.TRACES - before
    lengths = {bucket_length(len(row)) for row in tokenize(encoder, some)}
    assert traced == {(batch_rows(length, 768), length): 1 for length in lengths}


def test_encode_long_texts_share_few_buckets(tmp_path):
    encoder = load_encoder(str(tiny.model_folder(tmp_path, positions=1000)))
    before = encode_lib.TRACES.copy()
    lengths = (513, 600, 601, 777, 999, 1000, 2000)
    encode(encoder, None, ["saint " * (length - 2) for length in lengths], tokens_per_batch=2048)
    assert encode_lib.TRACES - before == {(2, 768): 1, (2, 1000): 1}


def test_encode_uses_given_parameters_and_prefixes(encoder):
    base = encode(encoder, None, ["saint potter"])
    live = encode(encoder, jax.tree.map(lambda x: x * 1.5, encoder.state), ["saint potter"])
    assert np.abs(base - live).max() > 1e-4
    prefixed = dataclasses.replace(encoder, query_prefix="who is ", passage_prefix="patron ")
    as_query = encode(prefixed, None, ["saint potter"], kind="query")
    as_passage = encode(prefixed, None, ["saint potter"])
    np.testing.assert_array_equal(as_query, encode(encoder, None, ["who is saint potter"]))
    np.testing.assert_array_equal(as_passage, encode(encoder, None, ["patron saint potter"]))


def test_encode_no_texts_gives_an_empty_array(encoder):
    assert encode(encoder, None, []).shape == (0, encoder.dim)


def test_tokenize_truncation_keeps_special_tokens(encoder):
    (row,) = tokenize(encoder, ["balia " * 50], max_length=10)
    assert len(row) == 10
    assert (row[0], row[-1]) == (2, 3)
    assert row.dtype == np.int32


def test_tokenize_two_threads_keep_their_own_limits(encoder):
    """Grain's thread may build batches while the main thread evaluates with another limit."""
    some = texts(5, longest=30)
    before = encoder.tokenizer.to_str()

    def count_wrong(limit):
        expected = [row.tolist() for row in tokenize(encoder, some, limit)]
        assert max(map(len, expected)) == limit
        calls = ([row.tolist() for row in tokenize(encoder, some, limit)] for _ in range(5000))
        return sum(rows != expected for rows in calls)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(count_wrong, (7, 23))) == [0, 0]
    assert encoder.tokenizer.to_str() == before


@pytest.mark.parametrize("limit", [2, 3, 9, 60])
def test_tokenize_equals_truncation_of_the_library(encoder, limit):
    library = tokenizers.Tokenizer.from_str(encoder.tokenizer.to_str())
    library.enable_truncation(limit)
    some = [*texts(20, longest=70), "", "[SEP] saint"]
    expected = [row.ids for row in library.encode_batch(some)]
    assert [row.tolist() for row in tokenize(encoder, some, limit)] == expected


def test_buckets_have_lengths_and_batch_sizes():
    assert [bucket_length(n) for n in (1, 16, 17, 64, 65, 512)] == [16, 16, 24, 64, 96, 512]
    assert bucket_length(40, limit=45) == 45
    assert bucket_lengths(45) == (16, 24, 32, 45)
    assert bucket_lengths(512) == BUCKETS and bucket_lengths(600) == (*BUCKETS, 600)
    longer = (768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
    assert bucket_lengths(8192) == (*BUCKETS, *longer)
    with pytest.raises(UserError, match="a text of 46 tokens does not fit the 45 tokens of a row"):
        bucket_length(46, limit=45)
    assert batch_rows(16, 2048) == 128
    assert batch_rows(512, 2048) == 8
    assert batch_rows(128, 2048, multiple=12) == 12
    tokens_BT, lengths_B = pad([np.arange(3, dtype=np.int32)], 2, 4, pad_id=9)
    assert tokens_BT.tolist() == [[0, 1, 2, 9], [9, 9, 9, 9]]
    assert lengths_B.tolist() == [3, 1]


def test_encode_on_a_mesh_gives_the_same_embeddings(encoder):
    some = texts(60, longest=30)
    plain = encode(encoder, None, some, tokens_per_batch=512)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    state = sharding.shard_state(encoder.state, mesh)
    sharded = encode(encoder, state, some, mesh=mesh, tokens_per_batch=512)
    np.testing.assert_allclose(sharded, plain, atol=2e-6)
