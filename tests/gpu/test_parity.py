"""Training on GPUs: cuDNN's attention compared with XLA's and with PEFT; repeatable bits.

A test on a CPU, with smaller models and with XLA's attention in place of cuDNN's, checks the
comparison itself and the arguments of cuDNN's attention. The same test on GPUs (``make test-gpu``)
checks the kernels.
"""

import functools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from cirag_jax import cli
from tests import tiny_adapter
from tests.gpu import parity
from tests.gpu.conftest import targets
from tests.gpu.parity import CPU

pytestmark = pytest.mark.usefixtures("standard_promotion")

MESHES = [*parity.meshes(1), *parity.meshes(2)]
LONG = pytest.param("long", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def peft_models(tmp_path_factory):
    """Returns a function from sizes to the folder of a decoder, PEFT's model, and our adapter."""

    @functools.cache
    def make(sizes):
        folder = tmp_path_factory.mktemp("decoder")
        model, _, adapter = tiny_adapter.both(folder, parity.LORA, **parity.decoder_fields(sizes))
        return folder, model, adapter

    return make


def peft_step(model, batch):
    """Returns the loss and gradient of PEFT in fp32 on the CPU."""
    import torch

    model.zero_grad()
    real_BT = np.arange(batch.tokens_BT.shape[1]) < batch.lengths_B[:, None]
    logits = model(
        input_ids=torch.tensor(batch.tokens_BT, dtype=torch.int64),
        attention_mask=torch.tensor(real_BT, dtype=torch.int64),
    ).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        torch.tensor(batch.targets_BT, dtype=torch.int64).flatten(),
        reduction="none",
    )
    weights = torch.tensor(batch.mask_BT).flatten()
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    gradient = tiny_adapter.stacked(model, parity.LORA.names, 2, gradient=True)
    return parity.Step(float(loss.detach()), parity._flatten(gradient))


@targets(*MESHES)
@pytest.mark.parametrize("case", ["padded", LONG])
def test_encoder_cudnn_equals_xla(target, case):
    longest = min(target.sizes.long, 512)
    batch = parity.encoder_batch(*((128, 5) if case == "padded" else (longest, longest)))
    ours = parity.encoder_step(target.sizes, "cudnn", batch, target.mesh)
    theirs = parity.encoder_step(target.sizes, "xla", batch, parity.make_mesh((1, 1, 1)))
    parity.assert_parity(ours, theirs)


@targets(*MESHES)
@pytest.mark.parametrize("case", ["padded", "packed", "shared", LONG])
def test_decoder_cudnn_equals_xla_and_peft(target, case, peft_models):
    folder, model, adapter = peft_models(target.sizes)
    batches, plain = parity.decoder_batches(case, target.sizes)

    def step(attention, mesh):
        return parity.decoder_step(folder, target.sizes, attention, batches, adapter, mesh)

    ours = step("cudnn", target.mesh)
    parity.assert_parity(ours, step("xla", parity.make_mesh((1, 1, 1))))
    parity.assert_parity(ours, peft_step(model, plain))


@pytest.mark.parametrize("case", ["padded", "packed", "shared"])
def test_parity_wrong_mask_is_detected(case, peft_models, monkeypatch):
    """Without the mask of padding or of conversations, the comparison fails."""
    attend = jax.nn.dot_product_attention

    def unmasked(q, k, v, *, scale, is_causal, **_):
        return attend(q, k, v, scale=scale, is_causal=is_causal and case != "padded")

    folder, model, adapter = peft_models(CPU)
    batches, plain = parity.decoder_batches(case, CPU)
    monkeypatch.setattr(jax.nn, "dot_product_attention", unmasked)
    mesh = parity.make_mesh((1, 1, 1))
    ours = parity.decoder_step(folder, CPU, "cudnn", batches, adapter, mesh)
    with pytest.raises(AssertionError):
        parity.assert_parity(ours, peft_step(model, plain))


@targets((1, 1, 1))
def test_training_twice_gives_equal_bits(target, repository):
    """On a GPU, this needs XLA's deterministic operations, and no cached programs."""
    if target.platform == "cpu":
        digests = [parity.training_digest(CPU, "cudnn", steps) for steps in (2, 2, 1)]
        assert digests[0] == digests[1] != digests[2]
        return
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), *cli.DETERMINISTIC_FLAGS])
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "tests.gpu.parity"]
    # This process has reserved most of the GPU's memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    runs = [
        subprocess.run(
            command, env=environment, cwd=repository, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] != ""
