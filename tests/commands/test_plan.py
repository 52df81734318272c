"""A planned training against the same step on arrays; collectives, times, and what is refused."""

import json
import pathlib
import runpy
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cirag_jax.commands import plan
from cirag_jax.config_files import load_config
from cirag_jax.errors import UserError
from cirag_jax.models import decoder
from cirag_jax.models.io import pretrained, pretrained_decoder
from cirag_jax.training import mfu
from cirag_jax.training.rehearsal import Rehearsal, bytes_of
from tests import tiny, tiny_decoder

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_EXTEND = runpy.run_path(str(_ROOT / "launch/plan.py"))["extend"]


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models; of one, nothing but its config.json."""
    folder = tmp_path_factory.mktemp("plan")
    tiny.model_folder(folder / "encoder")
    tiny_decoder.folder(folder / "decoder")
    (folder / "shape").mkdir()
    shutil.copy(folder / "decoder/config.json", folder / "shape")
    return folder


# Of each component what makes a tiny step in several parts.
TINY = {
    "aligner": ("batch_size=8", "num_negatives=3", "chunk_tokens=512"),
    "cross_encoder": ("targets_per_step=4", "max_length=64", "buckets=(32,64)"),
    "integrator": ("length=96", "buckets=(32,64)", "batch_size=6", "rows_per_device=1", "chunk=64"),
    "reader": ("length=64", "buckets=(32,)", "batch_size=4", "rows_per_device=2"),
    "extractor": ("length=64", "buckets=(32,)", "batch_size=2"),
}


def configured(folders, component, *overrides):
    encoder = component in ("aligner", "cross_encoder")
    spec = folders / ("encoder" if encoder else "decoder")
    settings = [f"model.spec={spec}", *TINY[component], *overrides]
    if component == "cross_encoder":
        settings.insert(0, f"encoder.model={spec}")
    path = str(_ROOT / f"configs/{component}.py")
    return load_config(path, [f"--config.{setting}" for setting in settings], _EXTEND)


class Arrays(Rehearsal):
    """Runs the step on arrays, and looks at what is in memory beside each program."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self._before = _live()

    def shape(self, like, placed):
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), placed)
        value = like if isinstance(like, np.ndarray) else jnp.zeros(like.shape, like.dtype)
        return jax.device_put(value, placed)

    def __call__(self, function, *arguments):
        if not hasattr(function, "lower"):
            return function(*arguments)
        program = self._compile(function, arguments)
        program.calls = 1
        self.programs[len(self.programs)] = self.peak_program = program
        held = _live() - self._before
        top = held + program.results + program.temporaries - program.aliased
        self.peak = max(self.peak, top)
        return function(*arguments)


def _live() -> int:
    """Bytes of all arrays on the first device; what two of them share counts once."""
    first, found = jax.devices()[0], {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == first:
                found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


MESHES = ("mesh.devices=1", "mesh.devices=2")
CASES = [
    ("aligner", MESHES[0], "keep_activations=True"),
    ("aligner", MESHES[1], "keep_activations=False"),
    ("cross_encoder", MESHES[0], "model.dropout=0.1"),
    ("integrator", MESHES[0], "packing=True"),
    ("integrator", "mesh.devices=2", "mesh.fsdp=2"),
    ("reader", MESHES[1], "packing=False"),
]


@pytest.mark.parametrize(("component", "mesh", "setting"), CASES)
def test_the_planned_peak_is_that_of_the_step_on_arrays(
    folders, monkeypatch, component, mesh, setting
):
    config = configured(folders, component, mesh, setting)
    planned = plan.plan(config)
    monkeypatch.setattr(plan, "Rehearsal", Arrays)
    real = plan.plan(config)
    assert planned["collective_bytes"] == real["collective_bytes"]
    assert abs(planned["peak_bytes"] / real["peak_bytes"] - 1.0) < 0.1, (planned, real)
    assert sum(planned["bytes_per_device"].values()) == planned["peak_bytes"]
