"""The LoRA step compared with PEFT and torch's AdamW; accumulation, sharding and dropout."""

import dataclasses
import types
import weakref
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

from cirag_jax import sharding
from cirag_jax.models import decoder_params, lora, nf4, precision
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import DEFAULT_LORA
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import lora_step
from cirag_jax.training.lora_step import Batch
from cirag_jax.training.state import make_state, place_rows
from tests import tiny, tiny_adapter, tiny_decoder

pytestmark = pytest.mark.usefixtures("standard_promotion")

LORA = LoraConfig(rank=4, alpha=6.0)
RATE, DECAY, CLIP = 1e-2, 0.1, 0.5
# AdamW's first step is RATE * g / (|g| + EPS). A small EPS would amplify rounding errors.
EPS = 1e-3
ATOL = 1e-6  # Weights move by up to 1e-2; the largest measured difference is 2e-7.


def optimizer():
    adamw = optax.adamw(RATE, b1=0.9, b2=0.999, eps=EPS, weight_decay=DECAY)
    return optax.chain(optax.clip_by_global_norm(CLIP), adamw)


def batch(rows=4, length=11, seed=0, share=0.6) -> Batch:
    rng = np.random.default_rng(seed)
    tokens_BT = rng.integers(3, 320, (rows, length)).astype(np.int32)
    lengths_B = rng.integers(length // 2, length + 1, rows).astype(np.int32)
    mask_BT = (rng.random((rows, length)) < share) & (np.arange(length) + 1 < lengths_B[:, None])
    return Batch(tokens_BT, np.roll(tokens_BT, -1, 1), mask_BT, lengths_B)


class Run:
    """A tiny model on a mesh, with its training state and step."""

    def __init__(self, folder, config=LORA, sizes=(1, 1, 1), quantization=None, **fields):
        self.folder, self.lora = folder, config
        _, ours, adapter = tiny_adapter.both(folder, config, **fields)
        self.config = dataclasses.replace(ours.config, quantization=quantization)
        self.mesh = sharding.make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
        state = sharding.shard_state(ours.state, self.mesh)
        if quantization:
            state = load_decoder(str(folder), mesh=self.mesh, quantization=quantization).state
        self.params = decoder_params.to_params(state)
        tx = optimizer()
        self.state = make_state(adapter, tx, 0, self.mesh)
        self.initial_state = self.state
        self.reset()
        self.step = lora_step.TrainStep(self.config, config, tx, self.state, self.mesh, chunk=16)

    def __call__(self, *batches):
        placed = [place_rows(b, self.mesh) for b in batches]
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.step(self.state, self.params, placed)
        return {name: float(value) for name, value in metrics.items()}

    def peft(self):
        return tiny_adapter.peft_model(self.folder, self.lora)

    def reset(self):
        """Resets the state, but keeps compiled functions."""
        self.state = jax.tree.map(lambda leaf: leaf.copy(), self.initial_state)
        return self

    def adapter(self):
        return jax.tree.map(np.asarray, lora.to_adapter(self.state.params))


def torch_step(model, batches) -> dict[str, float]:
    """Takes a step with torch on the mean loss of all supervised tokens; returns its metrics."""
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    adamw = torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY, eps=EPS)
    total = torch.zeros(())
    for b in batches:
        real_BT = np.arange(b.tokens_BT.shape[1]) < b.lengths_B[:, None]
        logits = model(
            input_ids=torch.tensor(b.tokens_BT, dtype=torch.int64),
            attention_mask=torch.tensor(real_BT, dtype=torch.int64),
        ).logits
        labels = torch.tensor(np.where(b.mask_BT, b.targets_BT, -100), dtype=torch.int64)
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
    count = sum(int(b.mask_BT.sum()) for b in batches)
    (total / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
    adamw.step()
    moved = [(p.detach() - q).square().sum() for p, q in zip(trained, before, strict=True)]
    return {
        "loss": float(total.detach() / count),
        "tokens": count,
        "gradient_norm": float(norm),
        "update_norm": float(sum(moved)) ** 0.5,
        "parameter_norm": float(sum(p.detach().square().sum() for p in trained)) ** 0.5,
        "skipped_steps": 0,
    }


def assert_close(actual, expected, atol):
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, rtol=0, atol=atol), actual, expected)


MESHES = ((1, 1, 1), (4, 1, 1), (2, 2, 2))
MIXTURE = {"family": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1]}
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a model with biases and tied embeddings, on one and on several devices."""
    folder = tmp_path_factory.mktemp("lora_step") / "base"
    return {sizes: Run(folder, sizes=sizes, **BIASED) for sizes in MESHES}


@pytest.fixture
def run(runs):
    return runs[1, 1, 1].reset()


def test_train_step_equals_peft_and_torch(run):
    model = run.peft()
    expected = torch_step(model, [batch()])
    metrics = run(batch())
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert_close(run.adapter(), tiny_adapter.stacked(model, LORA.names, 2), ATOL)


def test_train_step_not_finite_is_skipped(tmp_path):
    run, good = Run(tmp_path / "base"), batch()
    bad = good._replace(mask_BT=np.where(good.mask_BT, np.float32(np.nan), np.float32(0)))
    before = tiny.arrays((run.state.params, run.state.opt_state))
    metrics = run(good, bad)
    assert np.isnan(metrics["loss"]) and metrics["skipped_steps"] == 1
    for a, b in zip(before, tiny.arrays((run.state.params, run.state.opt_state)), strict=True):
        np.testing.assert_array_equal(a, b)
    metrics = run(good)
    assert metrics["skipped_steps"] == 1 and metrics["update_norm"] > 0


def test_train_step_unequal_micro_batches_equal_whole_batch(run):
    pieces = [batch(4, 11, 0, 0.9), batch(2, 7, 1, 0.2), batch(4, 11, 2, 0.5)]
    counts = [int(piece.mask_BT.sum()) for piece in pieces]
    assert len(set(counts)) == 3
    model = run.peft()
    expected = torch_step(model, pieces)
    metrics = run(*pieces)
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert_close(run.adapter(), tiny_adapter.stacked(model, LORA.names, 2), ATOL)


def test_train_step_donates_state_but_not_base(run):
    before = jax.tree.map(np.array, run.params)
    first = run.state
    run(batch())
    jax.tree.map(np.testing.assert_array_equal, run.params, before)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(run.params))
    donated = jax.tree.leaves((first.params, first.opt_state))
    assert all(leaf.is_deleted() for leaf in donated)


def test_optimizer_state_covers_only_the_adapter(run):
    trained = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    moments = sum(leaf.size for leaf in jax.tree.leaves(run.state.opt_state))
    assert 2 * trained <= moments <= 2 * trained + 4  # and counters
    assert trained == sum(p.numel() for p in run.peft().parameters() if p.requires_grad)


@pytest.mark.parametrize("sizes", MESHES[1:])
def test_train_step_sharded_equals_unsharded(runs, sizes):
    plain, sharded = runs[1, 1, 1].reset(), runs[sizes].reset()
    for seed in range(3):
        batches = batch(seed=seed), batch(seed=seed + 10)
        assert sharded(*batches) == pytest.approx(plain(*batches), rel=1e-5)
    assert_close(sharded.adapter(), plain.adapter(), 3 * ATOL)
    step, tensor = sharded.step, sizes[2]
    assert step.traces == {"gradient": 1, "add": 1, "apply": 1}
    assert step._add._cache_size() == 1  # Sums and summands have the same sharding.
    pair = sharded.state.opt_state[1][0].mu["layers"]["down_proj"]
    assert pair["a"].get_value().addressable_shards[0].data.shape == (2, 48 // tensor, 4)
    assert pair["b"].get_value().addressable_shards[0].data.shape == (2, 4, 32)


@pytest.mark.parametrize("sizes", [(2, 2, 2)])
def test_train_step_experts_sharded_equals_unsharded(tmp_path, sizes):
    config = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "o_proj"))
    plain, sharded = (Run(tmp_path / "base", config, s, **MIXTURE) for s in ((1, 1, 1), sizes))
    assert sharded(batch()) == pytest.approx(plain(batch()), rel=1e-5)
    assert_close(sharded.adapter(), plain.adapter(), ATOL)
    experts = sharded.params["layers"]["expert_up"]
    assert experts.sharding.shard_shape(experts.shape) == (1, 4 // sizes[2], 32 // sizes[1], 20)


@pytest.mark.parametrize(("sizes", "fields"), [((1, 1, 1), BIASED), ((2, 2, 2), MIXTURE)])
def test_train_step_nf4_equals_step_on_dequantized_base(tmp_path, sizes, fields):
    config = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "v_proj", "o_proj"))
    plain = Run(tmp_path / "base", config, **fields)
    packed = Run(tmp_path / "base", config, sizes, "nf4", **fields)
    whole = jax.device_put(packed.params["layers"], jax.devices()[0])
    plain.params["layers"] = {
        name: nf4.dequantize(x, x.scales.dtype) if isinstance(x, nf4.Nf4) else x
        for name, x in whole.items()
    }
    assert packed(batch()) == pytest.approx(plain(batch()), rel=1e-5)
    assert_close(packed.adapter(), plain.adapter(), ATOL)
    codes = packed.params["layers"]["q_proj"].codes
    assert codes.sharding.shard_shape(codes.shape) == (
        2,
        16 // sizes[1],
        codes.shape[2] // sizes[2],
    )


def test_dropout_depends_on_step_and_micro_batch(tmp_path):
    config = LoraConfig(rank=4, alpha=6.0, dropout=0.5)
    run = Run(tmp_path / "base", config)
    b = place_rows(batch(), run.mesh)
    state = run.state
    options = lora.lora_options(config, train=False)

    @jax.jit
    def evaluate(params, adapter, batch):
        return lora_step.loss(run.config, params, adapter, batch, options, chunk=16)

    gradient = run.step._gradient
    with jax.set_mesh(run.mesh):
        losses = [
            float(gradient(state.params, run.params, b, state.key, step, index)[1][0])
            for step, index in ((0, 0), (0, 1), (1, 0), (0, 0))
        ]
        values = [float(evaluate(run.params, state.params, b)[0]) for _ in range(2)]
    assert losses[0] == losses[3] and len(set(losses)) == 3
    assert values[0] == values[1] and values[0] not in losses
    plain = torch_step(run.peft(), [batch()])
    assert values[0] / plain["tokens"] == pytest.approx(plain["loss"], rel=1e-6)


def test_train_step_rounding_adapter_once_changes_nothing(monkeypatch):
    config = DecoderConfig(
        320, 32, 2, 4, 2, 8, 48, dtype="bfloat16", param_dtype="bfloat16", remat="projections"
    )
    mesh, tx = sharding.make_mesh(devices=jax.devices()[:1]), optax.sgd(0.1)
    params = tiny_decoder.random_params(config)
    adapter = jax.tree.map(lambda x: x + 0.1, lora.init_adapter(config, LORA))
    placed = [place_rows(batch(seed=seed), mesh) for seed in range(2)]

    def trained():
        """Returns the adapter after a step, the metrics, and the dtypes in the step."""
        state = make_state(adapter, tx, 0, mesh)
        step, dtypes = lora_step.TrainStep(config, LORA, tx, state, mesh, chunk=16), set()

        def run(function, *arguments):
            if function is step._gradient:
                dtypes.update(str(leaf.dtype) for leaf in jax.tree.leaves(arguments[0]))
            return function(*arguments)

        with jax.set_mesh(mesh):
            state, metrics = step(state, params, placed, run)
        return jax.tree.map(np.asarray, (lora.to_adapter(state.params), metrics)), dtypes

    actual, dtypes = trained()
    assert dtypes == {"bfloat16"}
    monkeypatch.setattr(precision, "round_weights", lambda params, dtype, run: params)
    expected, dtypes = trained()  # Each use rounds.
    assert dtypes == {"float32"}
    assert actual[1]["gradient_norm"] > 0
    assert_close(actual, expected, 0)


def test_train_step_without_targets_only_decays(run):
    before = run.adapter()
    metrics = run(batch(share=0.0))
    assert metrics["loss"] == metrics["tokens"] == metrics["gradient_norm"] == 0.0
    shrunk = jax.tree.map(lambda x: x * (1 - RATE * DECAY), before)
    assert_close(run.adapter(), shrunk, 2e-7)


def test_train_step_without_micro_batch_raises(run):
    with pytest.raises(ValueError, match="at least one"):
        run()


def test_train_step_frees_added_gradient_before_next():
    """While a micro-batch is computed, only the sum of earlier gradients is in memory."""

    class Array:
        pass

    step: Any = object.__new__(lora_step.TrainStep)
    step.config, step.options = types.SimpleNamespace(dtype="float32"), DEFAULT_LORA
    step._gradient, step._add, step._apply = "gradient", "add", "apply"
    arrays, alive = [], []

    def run(function, *_):
        if function == "apply":
            return "state", "metrics"
        if function == "gradient":
            alive.append(sum(array() is not None for array in arrays))
        array = Array()
        arrays.append(weakref.ref(array))
        return array

    state: Any = types.SimpleNamespace(params=None, key=None, step=None)
    assert step(state, {}, [None] * 4, run) == ("state", "metrics")
    assert alive == [0, 1, 1, 1]
