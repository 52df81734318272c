"""LoRA training of a decoder as an aligner, its checkpoint, and its exports."""

import jax
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models.io.export import export_sentence_transformers
from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.io.workdir import export_encoder_adapter, open_encoder
from cirag_jax.models.lora import LoraConfig
from cirag_jax.retrieval.encode import encode
from cirag_jax.training import aligner, aligner_step, gradient_cache
from cirag_jax.training.data.pools import Example, Layout, build_batch
from tests import tiny, tiny_embedder
from tests.training.aligners import config_of
from tests.training.students import read_losses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

TEXTS = ["who is the patron of corum?", "a", "the weaver was born in 1984. " * 3]
LORA = {"model.lora.rank": 4, "optimizer.learning_rate": 0.02}


@pytest.fixture(scope="module")
def decoder_and_data(tmp_path_factory):
    root = tmp_path_factory.mktemp("embedder")
    return tiny_embedder.folder(root / "qwen3-embedding"), tiny.dataset_folder(root / "data")


@pytest.fixture(scope="module")
def trained(decoder_and_data, tmp_path_factory):
    """The workdir of a short training, and its result."""
    workdir = tmp_path_factory.mktemp("trained")
    config = config_of(decoder_and_data, **LORA, num_steps=12, eval_every=12)
    make_mesh = sharding.make_mesh
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        one = jax.devices()[:1]
        patch.setattr(sharding, "make_mesh", lambda *sizes: make_mesh(*sizes, devices=one))
        return workdir, aligner.train_and_evaluate(config, workdir)


def test_lora_training_lowers_loss_and_keeps_base(decoder_and_data, trained):
    workdir, result = trained
    losses = [loss for _, loss in read_losses(workdir)]
    assert result["complete"] and np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1
    encoder, meta = open_encoder(str(workdir))
    assert meta["lora"]["rank"] == 4 and meta["bidirectional"] is False
    base = load_encoder(str(decoder_and_data[0]))
    _, frozen = encoder.split()
    for ours, wanted in zip(jax.tree.leaves(frozen), jax.tree.leaves(base.state), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    assert np.abs(encode(encoder, None, ["a"]) - encode(base, None, ["a"])).max() > 1e-3


def check_equal(encoder, model):
    for kind, function in (("query", model.encode_query), ("passage", model.encode_document)):
        wanted = function(TEXTS, normalize_embeddings=True, show_progress_bar=False)
        np.testing.assert_allclose(encode(encoder, None, TEXTS, kind=kind), wanted, atol=1e-5)


def test_export_merged_equals_sentence_transformers(trained, tmp_path):
    encoder, _ = open_encoder(str(trained[0]))
    folder = export_sentence_transformers(encoder, tmp_path / "merged")
    check_equal(encoder, SentenceTransformer(str(folder), device="cpu"))
    again = load_encoder(str(folder))
    difference = encode(encoder, None, TEXTS) - encode(again, None, TEXTS)
    assert np.abs(difference).max() < 1e-5


def test_export_adapter_equals_sentence_transformers(decoder_and_data, trained, tmp_path):
    encoder, meta = open_encoder(str(trained[0]))
    assert export_encoder_adapter(encoder, meta, tmp_path / "adapter", 4) == 1.0
    model = SentenceTransformer(str(decoder_and_data[0]), device="cpu")
    model.load_adapter(str(tmp_path / "adapter"))
    check_equal(encoder, model)
    again = load_encoder(str(tmp_path / "adapter"))
    np.testing.assert_array_equal(encode(encoder, None, TEXTS), encode(again, None, TEXTS))
    with pytest.raises(UserError, match="config.rank=8 differs from the training"):
        export_encoder_adapter(encoder, meta, tmp_path / "other", 8)


def test_lora_gradient_equals_on_any_mesh(decoder_and_data):
    """The frozen decoder is split over fsdp, and the result does not depend on it."""
    encoder = load_encoder(str(decoder_and_data[0]), lora=LoraConfig(rank=4))
    layout = Layout(
        num_queries=4, num_candidates=16, negatives="cross_device", mask_false_negatives=True,
        micro_batches=1, device_groups=8, chunk_tokens=16, bucket_lengths=(16,),
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def tokenize(texts, role):
        return [rng.integers(3, 300, 12).astype(np.int32) for _ in texts]

    examples = [Example(f"q{i}", (f"p{i}",), tuple(f"n{i}{j}" for j in range(3))) for i in range(4)]
    batch = build_batch(examples, layout, tokenize, 0)
    results = []
    for shape, count in (((1, 1, 1), 1), ((2, 4, 1), 8)):
        mesh = sharding.make_mesh(*shape, devices=jax.devices()[:count])
        params, frozen = (sharding.shard_state(part, mesh) for part in encoder.split())
        with jax.set_mesh(mesh):
            loss, _, gradient = gradient_cache.loss_and_gradient(
                encoder.graphdef, params, aligner_step.place_batch(batch, mesh), frozen,
                temperature=0.1, width=encoder.dim,
            )  # fmt: skip
            results.append((loss, sharding.sum_shards(gradient)))
    (loss, gradient), (other_loss, other) = results
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    norms = [np.abs(x).max() for x in jax.tree.leaves(gradient)]
    assert max(norms) > 1e-3
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
