"""Tiny students: a base model, trajectories and a training config."""

import json
import pathlib
import runpy

import jax
import numpy as np
import pytest

from cirag_jax import sharding
from cirag_jax.config_files import load_config
from cirag_jax.distill import trajectories as trajectories_lib
from cirag_jax.methods.cirag import prompts
from cirag_jax.models.io.pretrained_decoder import load_decoder
from cirag_jax.training import adapter
from tests import tiny, tiny_decoder
from tests.distill import by_hand

_ROOT = pathlib.Path(__file__).resolve().parents[2]
SIDECAR = {
    "normalization": "ascii",
    "prompt_format": "multi_turn",
    "few_shot": False,
    "num_candidates": 15,
}


def read_metrics(workdir):
    """Returns the lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def read_losses(workdir):
    """Returns the pair (step, loss) of each step."""
    lines = read_metrics(workdir)
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def write(folder, trajectories, **sidecar):
    folder.mkdir(parents=True, exist_ok=True)
    trajectories_lib.write_trajectories(folder / trajectories_lib.FILE, trajectories)
    text = json.dumps({**SIDECAR, **sidecar})
    (folder / trajectories_lib.SIDECAR).write_text(text)
    return folder


def base_folder(folder):
    """Writes a tiny base model. Its tokenizer has the trajectories' words: examples are short."""
    texts = [
        message.text
        for t in map(by_hand.trajectory, range(3))
        for message in prompts.integration_messages(t.question, t.steps, t.steps[0].candidates)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_decoder, "VOCABULARY", 640)
        patch.setattr(tiny_decoder, "_TEXT", [*tiny_decoder._TEXT, *texts[1:]])
        return tiny_decoder.folder(folder, vocab_size=640, max_position_embeddings=512)


def config_of(folders, preset="quick", script="integrator", **changes):
    base, trajectories = folders
    values = {
        "model.spec": base, "trajectories": trajectories, "length": 448, "batch_size": 2,
        "num_steps": 4, "eval_every": 2, "dev_fraction": 0.2, "lora.rank": 4, "mesh.data": 1,
        "optimizer.learning_rate": 0.03, "chunk": 64, **changes,
    }  # fmt: skip
    overrides = [f"--config.{key}={value}" for key, value in values.items() if value is not ...]
    return load_config(str(_ROOT / f"configs/{script}.py:{preset}"), overrides)


def train(folders, workdir):
    """Runs the training command on one device.

    Returns the workdir, the result, and the base model's arrays before and after.
    """
    kept, before = [], []

    def load(*args, **kwargs):
        kept.append(load_decoder(*args, **kwargs))
        before.append(tiny.arrays(jax.tree.map(np.array, kept[-1].state)))
        return kept[-1]

    make_mesh = sharding.make_mesh
    command = runpy.run_path(str(_ROOT / "launch/train.py"))["main"]
    changes = {"num_steps": 6, "eval_every": 3}
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(sharding, "make_mesh", lambda *s: make_mesh(*s, devices=jax.devices()[:1]))
        patch.setattr(adapter, "load_decoder", load)
        patch.setattr(prompts, "_INSTRUCTION", "Collect facts.")
        result = command(config_of(folders, **changes), workdir)
    return workdir, result, before[0], tiny.arrays(kept[0].state)
