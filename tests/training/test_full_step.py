"""Training of all parameters: a hand-written optax step, sharding over fsdp, and bfloat16."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cirag_jax import sharding
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.training import lora_step
from cirag_jax.training.state import make_state, place_rows
from tests import tiny_decoder
from tests.training.test_lora_step import ATOL, assert_close, batch, optimizer

pytestmark = pytest.mark.usefixtures("standard_promotion")

TIED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
MODELS = {
    "untied": {},
    "tied": TIED,
    "gemma": {"family": "gemma2"},
    "experts": {"family": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("full")
    return {name: tiny_decoder.folder(root / name, **fields) for name, fields in MODELS.items()}


def run(folder, *batches, sizes=(1, 1, 1), dtype="float32", steps=1):
    """Takes training steps; returns the state, the metrics of the last step, and the step."""
    mesh = sharding.make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    base, tx = load_decoder(str(folder), dtype=dtype, param_dtype="float32", mesh=mesh), optimizer()
    state = make_state(base.state, tx, 0, mesh)
    step = lora_step.TrainStep(base.config, None, tx, state, mesh, chunk=16)
    with jax.set_mesh(mesh):
        for _ in range(steps):
            placed = [place_rows(b, mesh) for b in batches]
            state, metrics = step(state, {}, placed)
    return state, {name: float(value) for name, value in metrics.items()}, step


def by_hand(folder, *batches):
    """Takes a step on the plain mean of all tokens' losses; returns parameters and loss."""
    base = load_decoder(str(folder))
    before = decoder_params.to_params(base.state)

    def mean_loss(params):
        total, count = 0.0, 0
        for b in batches:
            hidden_BTD = decoder.forward(
                base.config, params, jnp.asarray(b.tokens_BT), lengths_B=jnp.asarray(b.lengths_B)
            )
            logprobs_BTV = jax.nn.log_softmax(decoder.logits(base.config, params, hidden_BTD))
            picked_BT = jnp.take_along_axis(logprobs_BTV, b.targets_BT[..., None], -1)[..., 0]
            total -= jnp.where(b.mask_BT, picked_BT, 0.0).sum()
            count += int(b.mask_BT.sum())
        return total / count

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(before)
    tx = optimizer()
    updates, _ = tx.update(gradient, tx.init(before), before)
    return optax.apply_updates(before, updates), float(loss), gradient


@pytest.mark.parametrize("name", MODELS)
def test_full_step_equals_hand_written_optax_step(folders, name):
    batches = batch(), batch(2, 7, 1, 0.3)
    expected, loss, gradient = by_hand(folders[name], *batches)
    state, metrics, _ = run(folders[name], *batches)
    found = decoder_params.to_params(state.params)
    assert_close(found, expected, ATOL)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["gradient_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    outer = {"embedding", "final_norm", *(() if name in ("tied", "gemma") else ("lm_head",))}
    assert set(found) == {*outer, "layers"}


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 2)])
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_full_step_sharded_over_fsdp_equals_unsharded(folders, name, sizes):
    batches = batch(), batch(seed=1)
    plain, expected, _ = run(folders[name], *batches, steps=2)
    state, metrics, step = run(folders[name], *batches, sizes=sizes, steps=2)
    assert metrics == pytest.approx(expected, rel=1e-5)
    arrays = (decoder_params.to_params(s.params) for s in (state, plain))
    assert_close(*(jax.tree.map(np.asarray, tree) for tree in arrays), 3 * ATOL)
    assert step.traces == {"gradient": 1, "add": 1, "apply": 1}
    _, fsdp, tensor = sizes
    opt_state: Any = state.opt_state
    for tree in (state.params, opt_state[1][0].mu):
        up = tree["layers"]["up_proj"].get_value()
        assert up.addressable_shards[0].data.shape == (2, 32 // fsdp, 48 // tensor)
        table = tree["embedding"].get_value()
        assert table.addressable_shards[0].data.shape == (320 // tensor, 32 // fsdp)


def test_full_step_bfloat16_trains_float32_weights(folders):
    train = functools.partial(run, folders["untied"], batch(), dtype="bfloat16")
    (_, first, _), (state, last, _) = train(), train(steps=8)
    assert last["loss"] < 0.9 * first["loss"]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    exact = run(folders["untied"], batch())[1]
    assert first["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert first["gradient_norm"] == pytest.approx(exact["gradient_norm"], rel=0.1)
