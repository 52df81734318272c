"""LoRA training of a decoder as an aligner, its checkpoint, and its exports."""

import jax
import numpy as np
import pytest

from cirag_jax.models.io.pretrained import load_encoder
from cirag_jax.models.io.workdir import open_encoder
from cirag_jax.retrieval.encode import encode
from cirag_jax.training import aligner
from tests import tiny, tiny_embedder
from tests.training.aligners import config_of
from tests.training.students import read_losses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

LORA = {"model.lora.rank": 4, "optimizer.learning_rate": 0.02}


@pytest.fixture(scope="module")
def decoder_and_data(tmp_path_factory):
    root = tmp_path_factory.mktemp("embedder")
    return tiny_embedder.folder(root / "qwen3-embedding"), tiny.dataset_folder(root / "data")


@pytest.fixture(scope="module")
def trained(decoder_and_data, tmp_path_factory):
    """The workdir of a short training, and its result."""
    workdir = tmp_path_factory.mktemp("trained")
    config = config_of(decoder_and_data, **LORA, num_steps=12, eval_every=6)
    with jax.numpy_dtype_promotion("standard"):
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
