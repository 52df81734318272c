"""Training steps of small models, to compare implementations of attention, or two runs.

``python -m tests.gpu.parity`` trains both models for a few steps and prints a digest of the losses
and parameters.
"""

import dataclasses
import hashlib
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models import decoder_params, lora
from cirag_jax.models.attention import Implementation
from cirag_jax.models.encoder import Encoder
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io.pretrained_decoder import TextDecoder, load_decoder
from cirag_jax.models.lora import LoraConfig
from cirag_jax.models.precision import Dtype
from cirag_jax.training import aligner_step, gradient_cache, lora_step, state
from cirag_jax.training.data import packing, pools
from cirag_jax.training.data.examples import Example
from tests import tiny_decoder

LOSS_TOLERANCE = 1e-3  # relative
LEAST_COSINE = 0.999
LORA = LoraConfig(rank=8, alpha=16.0)
SHARED = 37  # tokens of the prefix of all conversations


class Step(NamedTuple):
    """The loss of a step, and its gradient (or any other arrays) as one vector."""

    loss: float
    gradient: np.ndarray


class Sizes(NamedTuple):
    """Sizes of the models; ``long`` is the number of tokens of the decoder's longest rows."""

    d_model: int
    long: int
    dtype: Dtype


CPU = Sizes(64, 384, "float32")
GPU = Sizes(512, 4096, "bfloat16")  # heads of 64, which cuDNN supports


def assert_parity(ours: Step, theirs: Step) -> None:
    """Checks that two implementations agree within the rounding of bf16."""
    assert np.isfinite(ours.loss) and np.isfinite(ours.gradient).all()
    assert abs(ours.loss - theirs.loss) <= LOSS_TOLERANCE * abs(theirs.loss)
    norms = np.linalg.norm(ours.gradient) * np.linalg.norm(theirs.gradient)
    assert norms > 0 and ours.gradient @ theirs.gradient / norms > LEAST_COSINE


def meshes(count: int) -> list[tuple[int, int, int]]:
    """Returns the sizes of the meshes of one or two devices."""
    return [(1, 1, 1)] if count == 1 else [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


def make_mesh(sizes: Sequence[int]) -> jax.sharding.Mesh:
    """Returns a mesh of the first devices."""
    return sharding.make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])


def _flatten(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


# ------------------------------------------------------------------------------------- encoder


def encoder(sizes: Sizes, attention: Implementation) -> tuple[Any, Any]:
    """Returns definition and random parameters of a small BERT."""
    config = EncoderConfig(
        vocab_size=1000,
        d_model=sizes.d_model,
        num_layers=2,
        num_heads=sizes.d_model // 64 if sizes.d_model > 64 else 4,
        d_ff=2 * sizes.d_model,
        initializer_range=0.1,
        dtype=sizes.dtype,
        attention=attention,
    )
    return nnx.split(Encoder(config, rngs=nnx.Rngs(0)))


def encoder_batch(length: int, shortest: int, seed: int = 0) -> pools.Batch:
    """Returns a contrastive batch of texts of ``shortest`` to ``length`` tokens."""
    rng = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(map(str, rng.integers(4, 1000, rng.integers(shortest, length + 1))))

    layout = pools.Layout(
        num_queries=4,
        num_candidates=16,
        negatives="cross_device",
        mask_false_negatives=True,
        micro_batches=1,
        device_groups=2,
        chunk_tokens=16 * length,
        bucket_lengths=(length,),
    )
    examples = [pools.Example(text(), (text(),), (text(), text())) for _ in range(4)]
    return pools.build_batch(
        examples, layout, lambda texts, _: [np.array(t.split(), np.int32) for t in texts], 0
    )


def encoder_step(
    sizes: Sizes, attention: Implementation, batch: pools.Batch, mesh: jax.sharding.Mesh
) -> Step:
    """Returns the contrastive loss of a batch, and its gradient."""
    graphdef, params = encoder(sizes, attention)
    with jax.set_mesh(mesh):
        loss, _, gradient = gradient_cache.loss_and_gradient(
            graphdef,
            sharding.shard_state(params, mesh),
            aligner_step.place_batch(batch, mesh),
            temperature=0.1,
            width=sizes.d_model,
            dtype=sizes.dtype,
        )
        return Step(float(loss), _flatten(jax.jit(sharding.sum_shards)(gradient)))


# ------------------------------------------------------------------------------------- decoder


def decoder_fields(sizes: Sizes) -> dict[str, Any]:
    """Returns fields of ``config.json`` of a decoder with four query heads per key head."""
    head_dim = 64 if sizes.d_model > 64 else 16
    return {
        "hidden_size": sizes.d_model,
        "intermediate_size": 2 * sizes.d_model,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": max(sizes.long, 512),
    }


def examples(lengths: Sequence[int], shared: int = 0, seed: int = 0) -> list[Example]:
    """Returns random conversations, whose first ``shared`` tokens are equal."""
    rng = np.random.default_rng(seed)
    prefix_T = rng.integers(3, 320, shared).astype(np.int32)
    result = []
    for length in lengths:
        tokens_T = rng.integers(3, 320, length).astype(np.int32)
        tokens_T[:shared] = prefix_T
        weight_T = (rng.random(length) < 0.7).astype(np.float32)
        weight_T[: shared + 1] = 0
        weight_T[-1] = 1
        result.append(Example(tokens_T, weight_T, (weight_T > 0).astype(np.uint8), "q"))
    return result


def decoder_batches(case: str, sizes: Sizes) -> tuple[list[lora_step.Batch], lora_step.Batch]:
    """Returns the rows of a case, and the same conversations in one padded row each."""
    rows = 4
    lengths = [150, 61, 20, 133, 90, 44, 101, 17]
    shared = SHARED if case == "shared" else 0
    if case == "long":
        lengths, rows = [sizes.long, sizes.long - 50], 2
    elif case == "shared":
        lengths = [length + shared for length in lengths]
    conversations = examples(lengths, shared)
    longest = max(lengths)
    padded = packing.Layout(longest, False, (longest,), len(lengths), len(lengths))
    everything = [packing.Row((i,)) for i in range(len(lengths))]
    (plain,) = packing.micro_batches(conversations, everything, padded, 0)
    if case in ("padded", "long"):
        layout = dataclasses.replace(padded, rows_per_step=rows, rows_per_batch=rows)
        batches = packing.micro_batches(conversations, everything, layout, 0)
    else:
        length = 512
        layout = packing.Layout(length, True, (length,), 2, 2)
        step = [packing.Row((0, 1, 2, 4), shared), packing.Row((3, 5, 6, 7), shared)]
        batches = packing.micro_batches(conversations, step, layout, 0)
    return [batch.batch for batch in batches], plain.batch


def load(folder: pathlib.Path, sizes: Sizes, attention: Implementation) -> TextDecoder:
    """Loads a decoder with the dtype of ``sizes`` and the given attention."""
    loaded = load_decoder(str(folder), dtype=sizes.dtype)
    return dataclasses.replace(
        loaded, config=dataclasses.replace(loaded.config, attention=attention)
    )


def decoder_step(
    folder: pathlib.Path,
    sizes: Sizes,
    attention: Implementation,
    batches: Sequence[lora_step.Batch],
    adapter: nnx.State,
    mesh: jax.sharding.Mesh,
) -> Step:
    """Returns the loss of a LoRA step, and the gradient of the adapter."""
    base = load(folder, sizes, attention)
    tx = optax.sgd(1.0)
    before = state.make_state(adapter, tx, 0, mesh)
    step = lora_step.TrainStep(base.config, LORA, tx, before, mesh, chunk=64)
    params = decoder_params.to_params(sharding.shard_state(base.state, mesh))
    with jax.set_mesh(mesh):
        placed = [state.place_rows(batch, mesh) for batch in batches]
        after, metrics = step(before, params, placed)
    return Step(float(metrics["loss"]), _flatten(adapter) - _flatten(after.params))


# -------------------------------------------------------------------------------------- 20 steps


def training_digest(sizes: Sizes, attention: Implementation, steps: int = 20) -> str:
    """Trains encoder and decoder for some steps; returns a digest of all losses and parameters."""
    digest = hashlib.sha256()
    mesh = make_mesh((1, 1, 1))
    tx = optax.adamw(1e-3)

    def add(tree: Any) -> None:
        for leaf in jax.tree.leaves(tree):
            digest.update(np.asarray(leaf).tobytes())

    graphdef, params = encoder(sizes, attention)
    with jax.set_mesh(mesh):
        trained = state.make_state(params, tx, 0, mesh)
        apply = jax.jit(state.apply_gradient, static_argnums=0, donate_argnums=1)
        for number in range(steps):
            batch = aligner_step.place_batch(encoder_batch(128, 5, number), mesh)
            loss, _, gradient = gradient_cache.loss_and_gradient(
                graphdef,
                trained.params,
                batch,
                temperature=0.1,
                width=sizes.d_model,
                dtype=sizes.dtype,
            )
            trained, norms = apply(tx, trained, gradient, loss)
            add((loss, norms))
        add(trained.params)
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_decoder.folder(pathlib.Path(name), **decoder_fields(sizes))
        base = load(folder, sizes, attention)
    options = dataclasses.replace(LORA, dropout=0.1)
    with jax.set_mesh(mesh):
        trained = state.make_state(lora.init_adapter(base.config, options), tx, 0, mesh)
        step = lora_step.TrainStep(base.config, options, tx, trained, mesh, chunk=64)
        params = decoder_params.to_params(sharding.shard_state(base.state, mesh))
        batches, _ = decoder_batches("padded", sizes)
        placed = [state.place_rows(batch, mesh) for batch in batches]
        for _ in range(steps):
            trained, metrics = step(trained, params, placed)
            add(metrics)
        add(trained.params)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(training_digest(GPU, "cudnn") + "\n")
