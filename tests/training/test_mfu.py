"""Peaks of devices."""

from typing import Any

import pytest

from cirag_jax.training import mfu

tpu_info: Any = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")  # not public


@pytest.mark.parametrize("kind", mfu.TPUS)
def test_peak_of_tpu_is_that_of_jax(kind):
    """Compares with JAX's own table; a device is a chip, but half a chip of a TPU7x."""
    version = tpu_info.chip_version_from_device_kind(kind)
    cores = version.num_physical_tensor_cores_per_chip if version.supports_megacore else 1
    theirs = tpu_info._get_tpu_info_impl(version, cores)
    tpu = mfu.TPUS[kind]
    assert mfu.peak_flops(kind) == tpu.flops
    assert tpu.flops == pytest.approx(cores * theirs.bf16_ops_per_second, rel=0.01)
    # JAX states 2,460 GB/s for v5p, Google 2,765.
    assert tpu.bandwidth == pytest.approx(cores * theirs.mem_bw_bytes_per_second, rel=0.13)
    assert tpu.memory_gib == pytest.approx(cores * theirs.hbm_capacity_bytes / 2**30, rel=0.02)


def test_peak_of_unknown_tpu_is_unknown():
    assert mfu.peak_flops("TPU v5 lite pod") is None and mfu.peak_flops("TPU v9") is None
