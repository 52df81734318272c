"""Devices of the tests: a CPU with XLA's attention, and GPUs with cuDNN's attention."""

import functools
from typing import NamedTuple

import jax
import pytest

from tests.gpu import parity


class Target(NamedTuple):
    """Where a test runs: the mesh, and the sizes of its models."""

    platform: str
    mesh: jax.sharding.Mesh
    sizes: parity.Sizes


def targets(*meshes: tuple[int, int, int]) -> pytest.MarkDecorator:
    """Runs a test on one CPU device, and on each mesh of GPUs."""
    on_gpu = [pytest.param(("gpu", sizes), marks=pytest.mark.gpu) for sizes in meshes]
    params = [("cpu", (1, 1, 1)), *on_gpu]
    return pytest.mark.parametrize("target", params, indirect=True, ids=str)


@pytest.fixture
def target(request, monkeypatch):
    """Returns the `Target` of `targets`; skips the test if there are too few GPUs."""
    platform, sizes = request.param
    count = sizes[0] * sizes[1] * sizes[2]
    if platform == "cpu":
        on_xla = functools.partial(attention_on_xla, jax.nn.dot_product_attention)
        monkeypatch.setattr(jax.nn, "dot_product_attention", on_xla)
        return Target(platform, parity.make_mesh(sizes), parity.CPU)
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if len(gpus) < count:
        pytest.skip(f"needs {count} NVIDIA GPUs; JAX finds {len(gpus)}")
    return Target(platform, parity.make_mesh(sizes), parity.GPU)


def attention_on_xla(attention, *arrays, implementation, **options):
    """Calls `jax.nn.dot_product_attention` with XLA in place of cuDNN."""
    del implementation
    return attention(*arrays, implementation="xla", **options)
