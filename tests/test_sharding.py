"""The table of axes, and sharded passes, which must equal unsharded ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import decoder_params, lora
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.encoder import layer_parameters
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.pooling import embed
from cirag_jax.sharding import logical_to_spec, make_mesh, shard_state, state_sharding
from cirag_jax.training import lora_step
from cirag_jax.training.rehearsal import collectives
from cirag_jax.training.state import make_state, place_rows
from tests import tiny_decoder
from tests.tiny import random_encoder

# BERT with MPNet's bias has every kind of parameter.
CONFIG = EncoderConfig(
    64, 32, 2, 4, 64, max_positions=32, attention="transposed", relative_bias=True
)


def test_make_mesh_fills_one_axis_and_is_auto():
    mesh = make_mesh(data=-1, fsdp=2, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert make_mesh(1, 1, 1, jax.devices()[:1]).size == 1


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, -1, 1), (0, 1, 1), (-1, 3, 1), (16, 1, 1)])
def test_make_mesh_wrong_sizes_raise(sizes):
    with pytest.raises(UserError, match="mesh sizes"):
        make_mesh(*sizes)


def test_logical_to_spec_uses_rules():
    mesh = make_mesh(2, 2, 2)
    assert logical_to_spec(("embed", "mlp")) == PartitionSpec("fsdp", "tensor")
    assert logical_to_spec(("batch", "length")) == PartitionSpec(("data", "fsdp"), None)
    assert logical_to_spec(("vocab", "embed"), (31, 32), mesh) == PartitionSpec(None, "fsdp")
    assert logical_to_spec((None, "heads"), (3, 4), mesh) == PartitionSpec(None, "tensor")


def test_logical_to_spec_collision_or_unknown_axis_raises():
    with pytest.raises(ValueError, match="'heads' and 'mlp' .* both map to mesh axis 'tensor'"):
        logical_to_spec(("heads", "mlp"))
    with pytest.raises(ValueError, match="'embedding' is not in the table"):
        logical_to_spec(("embedding",))
    with pytest.raises(ValueError, match="do not name the dimensions"):
        logical_to_spec(("embed",), (2, 3))


def test_logical_to_spec_indivisible_axis_is_replicated(caplog):
    sharding._note.cache_clear()
    mesh = make_mesh(2, 2, 2)
    with caplog.at_level("INFO", "cirag_jax.sharding"):
        for _ in range(2):
            logical_to_spec(("vocab",), (30523,), mesh)
    assert caplog.text.count("'vocab' of size 30523 is not divisible by 2 (tensor)") == 1


def test_state_sharding_covers_parameters_and_moments():
    mesh = make_mesh(2, 2, 2)
    _, state = random_encoder(CONFIG)
    for path, variable in nnx.to_flat_state(state):
        assert len(variable.get_metadata()["logical_axes"]) == variable.ndim, path
    placed = shard_state(state, mesh)
    assert placed["token_embedding"].get_value().sharding.spec == PartitionSpec("tensor", "fsdp")
    moments = optax.adamw(1e-3).init(placed)
    shardings = state_sharding(moments, mesh)
    bias = placed["relative_embedding"].get_value()
    assert bias.sharding.spec == PartitionSpec(None, "tensor")
    up = shardings[0].mu["layers"][0]["up_kernel"].get_value()
    assert up.spec == PartitionSpec("fsdp", "tensor")
    assert shardings[0].count.spec == PartitionSpec()


def loss(graphdef, state, tokens_BT, mask_BT):
    """Contrastive loss with the candidates of every device as negatives."""
    emb_BD = embed(graphdef, state, tokens_BT, mask_BT)
    scores = emb_BD[:4] @ emb_BD.T / 0.1
    labels = jnp.arange(4) + 4
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


@pytest.fixture(scope="module")
def unsharded():
    """Returns the model, a batch, and the loss and gradient on one device."""
    graphdef, state = random_encoder(CONFIG)
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, 64, (16, 12)).astype(np.int32)
    mask_BT = np.arange(12) < rng.integers(1, 13, 16)[:, None]
    step = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    return graphdef, state, tokens_BT, mask_BT, step(graphdef, state, tokens_BT, mask_BT)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 2, 2), (2, 2, 2), (8, 1, 1)])
def test_encoder_sharded_value_and_gradient_equal_unsharded(sizes, unsharded):
    graphdef, state, tokens_BT, mask_BT, (expected, expected_gradient) = unsharded
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    step = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    with jax.set_mesh(mesh):
        batch = [
            sharding.place(x, sharding.batch_sharding(mesh, 2, x.shape))
            for x in (tokens_BT, mask_BT)
        ]
        value, gradient = step(graphdef, shard_state(state, mesh), *batch)
    # Relative, 8 units of fp32: the order of sums differs, by 5 units on a Xeon with AMX.
    assert abs(float(value) - float(expected)) < 1e-6 * float(expected)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        # Entries reach 4, so this is a few units in the last place of fp32.
        np.testing.assert_allclose(a, b, atol=1e-5)


def encoder_collectives(*sizes):
    """Returns the collectives for the gradient of one layer and the embeddings."""
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    # Many words, because XLA gathers a table that is smaller than the rows looked up.
    graphdef, state = random_encoder(dataclasses.replace(CONFIG, num_layers=1, vocab_size=1024))
    step = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    with jax.set_mesh(mesh):
        tokens_BT = sharding.place(np.zeros((16, 12), np.int32), sharding.batch_sharding(mesh, 2))
        lowered = step.lower(graphdef, shard_state(state, mesh), tokens_BT, tokens_BT)
        return collectives(lowered.compile().as_text() or "")


def test_encoder_tensor_mesh_only_sums_activations():
    """The lookup needs one sum; attention and feed-forward need one each in both passes."""
    assert encoder_collectives(1, 1, 2) == {"all-reduce": (5, 5 * 16 * 12 * CONFIG.d_model * 4)}


def test_encoder_fsdp_mesh_gathers_only_kernels():
    kernels = sum(
        4 * int(np.prod(shape))
        for name, (shape, _) in layer_parameters(CONFIG).items()
        if name.endswith("kernel")
    )
    found = encoder_collectives(2, 2, 2)
    # Half of the heads per device, forward and backward, and the few embeddings of the loss.
    embeddings = 3 * 16 * CONFIG.d_model * 4
    assert found["all-gather"].bytes <= 2 * kernels // 2 + embeddings, found


def adapter_collectives(*sizes):
    """Returns the collectives for an adapter's gradient with dropout, and the base's parameters."""
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    config = DecoderConfig(320, 32, 2, 4, 2, 8, 48, remat="projections")
    lora_config = lora.LoraConfig(rank=16, dropout=0.1)
    tokens_BT = np.zeros((8, 12), np.int32)
    with jax.set_mesh(mesh):
        params = decoder_params.to_params(shard_state(tiny_decoder.random_state(config), mesh))
        state = make_state(lora.init_adapter(config, lora_config), optax.sgd(0.1), 0, mesh)
        batch = place_rows(lora_step.Batch(tokens_BT, tokens_BT, tokens_BT == 0), mesh)
        step = lora_step.TrainStep(config, lora_config, optax.sgd(0.1), state, mesh, chunk=96)
        lowered = step._gradient.lower(state.params, params, batch, state.key, 0, 0)
        return collectives(lowered.compile().as_text() or ""), params


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 2)])
def test_adapter_fsdp_mesh_gathers_only_base(sizes):
    """Both passes gather the kernels, one the output layer; no gradient is summed."""
    found, params = adapter_collectives(*sizes)
    kernels = [x.nbytes for name, x in params["layers"].items() if name.endswith("_proj")]
    weights = (2 * sum(kernels) + params["lm_head"].nbytes) // sizes[2]
    ids = 8 // sizes[0] * 12 * 4
    assert found["all-gather"] == (2 * 2 * len(kernels) + 1 + 1, weights + ids), found
    assert found["all-to-all"] == (1, ids // 2 * 32)
    assert ("all-reduce" in found) == (sizes[2] > 1)  # of activations, see below


def test_adapter_tensor_mesh_only_sums_activations():
    """Exchanges 4 hidden states and 7 low-rank products per layer, and 2 more hidden states."""
    hidden, low_rank, numbers = 8 * 12 * 32 * 4, 8 * 12 * 16 * 4, 3 * 8 * 12 * 4
    total = (2 * 4 + 2) * hidden + 2 * 7 * low_rank + numbers
    found = adapter_collectives(1, 1, 2)[0]
    assert found == {"all-reduce": (found["all-reduce"].number, total)}
