import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models.encoder import Encoder
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.pooling import embed
from cirag_jax.training import aligner_step, gradient_cache
from cirag_jax.training.contrastive import contrastive_loss
from cirag_jax.training.data import pools as pools_lib
from cirag_jax.training.data.pools import Example, Layout, build_batch
from cirag_jax.training.rehearsal import bytes_of
from cirag_jax.training.state import make_state
from configs import aligner as aligner_config
from tests import tiny

pytestmark = pytest.mark.slow

# BERT with MPNet's bias has all kinds of parameters.
CONFIG = EncoderConfig(
    vocab_size=100, d_model=16, num_layers=1, num_heads=4, d_ff=32, max_positions=32,
    initializer_range=0.3, attention="transposed", relative_bias=True,
)  # fmt: skip


def _examples(queries=8, negatives=3):
    rng = np.random.default_rng(0)

    def text():
        return " ".join(str(n) for n in rng.integers(4, 100, rng.integers(2, 14)))

    return [
        Example(text(), (text(), text()), tuple(text() for _ in range(negatives)))
        for _ in range(queries)
    ]


def _batch(ways=1, **changes):
    settings = {
        "num_queries": 8, "num_candidates": 32, "negatives": "cross_device",
        "mask_false_negatives": True, "micro_batches": 1, "device_groups": ways,
        "chunk_tokens": 64 // ways, "bucket_lengths": (8, 16), **changes,
    }  # fmt: skip

    def tokenize(texts, role):
        return [np.array(t.split(), np.int32) for t in texts]

    return build_batch(_examples(), Layout(**settings), tokenize, 0)


def _model():
    return nnx.split(Encoder(CONFIG, rngs=nnx.Rngs(0)))


_embed = jax.jit(embed, static_argnums=0)


def _full_batch(graphdef, params, batch, key=None):
    """Returns the loss and gradient of the full batch, computed without chunks."""

    def loss(params):
        queries, candidates = batch.count_BC.shape
        table = jnp.zeros((queries + candidates + 1, CONFIG.d_model))
        for index, chunk in enumerate(batch.chunks):
            k = None if key is None else jax.random.fold_in(key, index)
            rows = _embed(graphdef, params, chunk.tokens_BT, chunk.mask_BT, k)
            table = table.at[chunk.row_B].set(rows)
        return contrastive_loss(
            table[:queries], table[queries:-1], batch.positive_B, batch.count_BC,
            batch.weight_B, 0.1,
        )[0]  # fmt: skip

    return jax.value_and_grad(loss)(params)


@functools.cache
def _wanted(**changes):
    """Returns `_full_batch` of a batch; cached."""
    return _full_batch(*_model(), _batch(**changes))


def _assert_close(by_shard, wanted, rtol, atol):
    for x, y in zip(jax.tree.leaves(by_shard), jax.tree.leaves(wanted), strict=True):
        x = x.sum(0)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def _step(batch, **settings):
    """Returns the loss and gradient on one device, and the number of bytes stored per chunk."""
    kept = []

    def run(function, *arguments):
        result = function(*arguments)
        if function is gradient_cache._embed_and_keep:
            kept.append(bytes_of(result[1]))
        return result

    batch = aligner_step.place_batch(batch, sharding.make_mesh(devices=jax.devices()[:1]))
    loss, _, gradient = gradient_cache.loss_and_gradient(
        *_model(), batch, temperature=0.1, width=16, run=run, **settings
    )
    return loss, gradient, kept


@functools.cache
def _sizes():
    """Returns the number of bytes of each chunk if all chunks are stored."""
    return _step(_batch(), keep_bytes=math.inf)[2]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_gradient_cache_equals_full_batch(share):
    """The result does not depend on how many chunks are stored."""
    sizes = _sizes()
    loss, gradient, kept = _step(_batch(), keep_bytes=share * sum(sizes))
    expected, expected_gradient = _wanted()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    _assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) > 1e-2
    assert kept == {0.0: [], 1.0: sizes}.get(share, kept)
    assert sum(kept) <= share * sum(sizes) < sum(kept) + max(sizes) + 1
    assert len(sizes) > 2


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_embed_and_keep_stores_no_parameters(scanned, devices):
    """Storing parameters would copy 1.2 GB per chunk for E5-large."""
    config = dataclasses.replace(CONFIG, num_layers=2, d_ff=1000, scan_layers=scanned)
    mesh = sharding.make_mesh(devices, devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        graphdef, params = nnx.split(Encoder(config, rngs=nnx.Rngs(0)))
        chunk = pools_lib.Chunk(
            np.zeros((2, 7), np.int32),
            np.ones((2, 7), bool),
            np.arange(2, dtype=np.int32),
            np.zeros(2, bool),
        )
        table_ND = np.zeros((3, config.d_model), np.float32)
        arguments = graphdef, (params, nnx.State({})), table_ND, chunk, None
        _, pull = jax.eval_shape(gradient_cache._embed_and_keep, *arguments)
    kernels = {x.size for x in jax.tree.leaves(params) if x.size > 500}
    assert len(kernels) > 3 and not [x for x in jax.tree.leaves(pull) if x.size in kernels]


@pytest.mark.parametrize(("scanned", "keep_bytes"), [(False, 0.0), (True, math.inf)])
def test_gradient_cache_rounds_weights_once_per_step(scanned, keep_bytes):
    """No pass of a chunk rounds the weights again."""
    config = dataclasses.replace(
        CONFIG, num_layers=2, d_ff=40, dtype="bfloat16", scan_layers=scanned
    )
    graphdef, params = nnx.split(Encoder(config, rngs=nnx.Rngs(0)))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    length = 24  # This size differs from all dimensions of kernels.
    batch = _batch(bucket_lengths=(length,), chunk_tokens=20 * length)
    batch = aligner_step.place_batch(batch, mesh)
    kernels = [(16, 3, 4, 4), (4, 4, 16), (16, 40), (40, 16)]

    def step(dtype):
        rounds = collections.Counter()

        def run(function, *arguments):
            if hasattr(function, "lower"):
                text = function.lower(*arguments).as_text()
                for dims in re.findall(r"convert .*\(tensor<([\dx]+)xf32>\) -> .*xbf16>", text):
                    shape = tuple(map(int, dims.split("x")))
                    rounds[function.__name__] += any(shape[-len(k) :] == k for k in kernels)
            return function(*arguments)

        loss, _, gradient = gradient_cache.loss_and_gradient(
            graphdef, params, batch, temperature=0.1, width=16, dtype=dtype, keep_bytes=keep_bytes,
            run=run,
        )  # fmt: skip
        return loss, gradient, +rounds

    loss, gradient, rounds = step("bfloat16")
    assert rounds == {"_round": len(kernels) * (1 if scanned else 2)}
    wanted, wanted_gradient, rounds = step("float32")  # Each use rounds the weights.
    assert rounds.total() >= 4 * len(kernels) and "_round" not in rounds
    assert loss == wanted
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        assert x.dtype == jnp.float32 and x.any()
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("devices", [1, 2])
def test_train_step_one_chunk_is_one_program_and_equals_the_cache(devices, monkeypatch):
    """The steps are plain gradient descent, so their updates are the gradients."""
    config = dataclasses.replace(CONFIG, hidden_dropout=0.3, attention="xla", relative_bias=False)
    graphdef, params = nnx.split(Encoder(config, rngs=nnx.Rngs(0)))
    mesh = sharding.make_mesh(devices, devices=jax.devices()[:devices])
    settings = aligner_config.quick()
    settings.model.dropout = 0.3
    names = []

    def run(function, *arguments):
        names.append(getattr(function, "__name__", ""))
        return function(*arguments)

    def step(batch, gib, stored=None):
        settings.activations_gib = gib
        if stored is not None:
            monkeypatch.setattr(gradient_cache, "_stored_bytes", lambda *inputs: stored)
        names.clear()
        with jax.set_mesh(mesh):
            tx = optax.sgd(1.0)
            state = make_state(params, tx, 0, mesh)
            after, metrics = aligner_step.train_step(
                graphdef, tx, state, batch, settings, mesh, run
            )
        return tiny.arrays(after.params), metrics

    one = _batch(devices, bucket_lengths=(16,), chunk_tokens=40 * 16)
    assert len(one.chunks) == 1
    whole, metrics = step(one, None)
    assert names == ["_step"]
    cached, cached_metrics = step(one, 0.0)
    assert "_embed" in names and "_pull" in names
    for x, y, before in zip(whole, cached, tiny.arrays(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        assert (x != before).any()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, cached_metrics[name], rtol=1e-5, err_msg=name)
    limit = 1 / 1024
    for stored, expected in ((2**20, ["_step"]), (2**20 + 1, [])):
        step(one, limit, stored)
        assert [name for name in names if name == "_step"] == expected
    step(_batch(devices), None)
    assert "_step" not in names and "_embed_and_keep" in names


def test_gradient_cache_second_forward_repeats_dropout():
    graphdef, params = nnx.split(
        Encoder(
            EncoderConfig(**{**CONFIG.__dict__, "hidden_dropout": 0.3, "attention_dropout": 0.3}),
            rngs=nnx.Rngs(0),
        )
    )
    batch, key = _batch(), jax.random.key(7)
    expected, expected_gradient = _full_batch(graphdef, params, batch, key)
    loss, _, gradient = gradient_cache.loss_and_gradient(
        graphdef, params,
        aligner_step.place_batch(batch, sharding.make_mesh(devices=jax.devices()[:1])),
        temperature=0.1, width=16, dropout_key=key,
    )  # fmt: skip
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    _assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    without, _ = _full_batch(graphdef, params, batch)
    assert abs(float(without) - float(loss)) > 1e-3


def test_official_accumulation_equals_mean_of_micro_batches():
    graphdef, params = _model()
    whole = _batch(micro_batches=2)
    loss, _ = _full_batch(graphdef, params, whole)
    halves = []
    for part in (_examples()[:4], _examples()[4:]):
        layout = Layout(4, 16, "cross_device", True, 1, 1, 64, (8, 16))
        batch = build_batch(
            part, layout, lambda texts, role: [np.array(t.split(), np.int32) for t in texts], 0
        )
        halves.append(_full_batch(graphdef, params, batch)[0])
    np.testing.assert_allclose(loss, np.mean(halves), rtol=1e-6)


@pytest.mark.parametrize("shape", [(4, 1, 1), (8, 1, 1), (4, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("negatives", ["cross_device", "in_batch"])
def test_gradient_cache_sharded_equals_unsharded(shape, negatives):
    """Covers hard negatives on 4 and 8 devices, where sentence-transformers had wrong labels."""
    graphdef, params = _model()
    data, fsdp, tensor = shape
    mesh = sharding.make_mesh(*shape, devices=jax.devices()[: data * fsdp * tensor])
    groups = 4 if negatives == "in_batch" else 1
    batch = _batch(ways=data * fsdp, negatives=negatives, negative_groups=groups)
    expected, expected_gradient = _wanted(negatives=negatives, negative_groups=groups)
    with jax.set_mesh(mesh):
        placed = sharding.shard_state(params, mesh)
        assert not all(x.is_fully_replicated for x in jax.tree.leaves(placed)) or fsdp * tensor == 1
        device_batch = aligner_step.place_batch(batch, mesh)
        assert len(device_batch.chunks[0].tokens_BT.sharding.device_set) == data * fsdp * tensor
        loss, _, gradient = gradient_cache.loss_and_gradient(
            graphdef, placed, device_batch, temperature=0.1, width=16
        )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    _assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 2, 1)])
def test_gradient_cache_bucket_compiles_once(shape):
    graphdef, params = _model()
    mesh = sharding.make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
    params = sharding.shard_state(params, mesh)  # As in training.
    jitted = {
        "embed": (gradient_cache._embed, gradient_cache._embed_and_keep),
        "pull": (gradient_cache._pull, gradient_cache._pull_kept),
        "loss": (gradient_cache._table_loss,),
    }
    for functions in jitted.values():
        for function in functions:
            function.clear_cache()
    host_batch = _batch(ways=shape[0] * shape[1])
    with jax.set_mesh(mesh):
        for _ in range(3):
            batch = aligner_step.place_batch(host_batch, mesh)
            gradient_cache.loss_and_gradient(graphdef, params, batch, temperature=0.1, width=16)
    shapes = {chunk.tokens_BT.shape for chunk in host_batch.chunks}
    counts = {
        name: sum(function._cache_size() for function in functions)
        for name, functions in jitted.items()
    }
    assert counts == {"embed": len(shapes), "pull": len(shapes), "loss": 1}
