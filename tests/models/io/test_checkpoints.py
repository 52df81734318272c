import contextlib
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl import logging as absl_logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cirag_jax.errors import UserError
from cirag_jax.models.io.checkpoint_folders import keep_step, steps_in
from cirag_jax.models.io.checkpoints import Checkpoints


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])


def mesh_of(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(devices, ("data", "fsdp"))


def make_state(mesh, seed=0):
    params = nnx.state(Model(nnx.Rngs(seed)), nnx.Param)
    state = {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "rng": jax.random.split(jax.random.key(seed), 3),
        "step": jnp.int32(7),
        "epoch": 2,
        "bf16": jnp.arange(4, dtype=jnp.bfloat16) / 3,
    }
    return jax.tree.map(lambda x: place(x, mesh), state)


def spec_of(leaf):
    return P("fsdp", "data") if getattr(leaf, "shape", ()) == (8, 4) else P()


def place(leaf, mesh):
    if not hasattr(leaf, "dtype"):
        return leaf
    return jax.device_put(leaf, NamedSharding(mesh, spec_of(leaf)))


def abstract(state, mesh):
    def of(leaf):
        if not hasattr(leaf, "dtype"):
            return leaf
        sharding = NamedSharding(mesh, spec_of(leaf))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(of, state)


def raw(leaf):
    if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert getattr(a, "dtype", type(a)) == getattr(b, "dtype", type(b))
        np.testing.assert_array_equal(raw(a), raw(b))


def iterator(seed=0):
    return iter(grain.MapDataset.range(20).shuffle(seed=seed).batch(3).to_iter_dataset())


@pytest.mark.parametrize("onto", [(1, 1), (2, 1), (2, 4), (4, 2)])
def test_restore_onto_another_mesh_is_exact(tmp_path, onto):
    state = make_state(mesh_of(2, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, state, {"position": 4}, {"model": "tiny"})
        checkpoints.add_metrics(10, {"dev/mrr": 0.5})
    mesh = mesh_of(*onto)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        restored = checkpoints.restore(None, abstract(state, mesh))
        assert checkpoints.meta() == {"model": "tiny"}
    assert restored.step == 10
    assert restored.data_state == {"position": 4}
    assert restored.metrics == {"dev/mrr": 0.5}
    assert_same(restored.state, state)
    kernel = restored.state["params"]["layers"][1]["kernel"][...]
    assert kernel.sharding == NamedSharding(mesh, P("fsdp", "data"))


def test_restore_rng_key_draws_same_numbers(tmp_path):
    state = {"rng": jax.random.key(5, impl="rbg")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None, {})
        restored = checkpoints.restore(1, jax.eval_shape(lambda: state)).state
    assert restored["rng"].dtype == state["rng"].dtype
    np.testing.assert_array_equal(
        jax.random.normal(restored["rng"], (3,)), jax.random.normal(state["rng"], (3,))
    )


def test_restore_grain_iterator_resumes(tmp_path):
    batches = iterator()
    next(batches)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(2)}, batches.get_state(), {})
        expected = [next(batches).tolist() for _ in range(3)]
        other = iterator()
        other.set_state(checkpoints.restore(None, {"a": jnp.ones(2)}).data_state)
    assert [next(other).tolist() for _ in range(3)] == expected


def test_restore_other_process_count_needs_equal_iterator_states(tmp_path):
    state = {"a": jnp.ones(2)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"position": 3}, {})
        (only,) = (tmp_path / "1" / "data").glob("process_*")
        text = only.read_text()
        only.unlink()
        for index in range(2):
            (only.parent / f"process_{index}-of-2.json").write_text(text)
        assert checkpoints.restore(1, state).data_state == {"position": 3}
        (only.parent / "process_1-of-2.json").write_text(text.replace("3", "4"))
        with pytest.raises(UserError, match="a different number of processes"):
            checkpoints.restore(1, state)


def test_save_keeps_best_and_latest_steps(tmp_path):
    state = {"a": jnp.ones(2)}
    scores = [0.1, 0.9, 0.3, math.nan, 0.2, None]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, score in enumerate(scores):
            checkpoints.save(step, state, None, {})
            if score is not None:
                checkpoints.add_metrics(step, {"dev/mrr": score, "loss": 1.0})
        checkpoints.wait()
        assert checkpoints.all_steps() == [1, 4, 5]
        assert (checkpoints.best_step(), checkpoints.latest_step()) == (1, 5)
        assert checkpoints.metrics(1) == {"dev/mrr": 0.9, "loss": 1.0}
        assert checkpoints.metrics() is None
    # A new process finds the same best step.
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert (checkpoints.best_step(), checkpoints.latest_step()) == (1, 5)
        checkpoints.save(6, state, None, {})
        checkpoints.add_metrics(6, {"dev/mrr": 0.95})
        checkpoints.save(7, state, None, {})
        assert checkpoints.all_steps() == [6, 7]


def test_add_metrics_rank_a_saved_step(tmp_path):
    state = {"a": jnp.ones(2)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, score in ((1, 0.5), (2, 0.9), (3, math.nan)):
            checkpoints.save(step, state, {"row": step}, {"m": step})
            assert checkpoints.metrics(step) is None and checkpoints.best_step() != step
            checkpoints.add_metrics(step, {"dev/mrr": score})
        assert checkpoints.all_steps() == [2, 3] and checkpoints.best_step() == 2
        checkpoints.save(4, state, {"row": 4}, {"m": 4})
        assert checkpoints.all_steps() == [2, 4]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.best_step() == 2 and checkpoints.metrics(2) == {"dev/mrr": 0.9}
        assert checkpoints.restore(2, state).metrics == {"dev/mrr": 0.9}
        assert checkpoints.meta(2) == {"m": 2}


def test_add_metrics_full_disk_names_the_step(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(2)}, None, {})
        with full_disk(3), pytest.raises(UserError, match=r"checkpoint .*/1 cannot be written"):
            checkpoints.add_metrics(1, {"dev/mrr": 0.5})
        assert checkpoints.metrics(1) is None


def test_best_step_of_loss_is_lowest(tmp_path):
    with Checkpoints(tmp_path, keep=1, best_metric="dev/loss") as checkpoints:
        for step, loss in enumerate([3.0, 1.0, math.nan, 2.0]):
            checkpoints.save(step, {"a": jnp.ones(2)}, None, {})
            checkpoints.add_metrics(step, {"dev/loss": loss})
        assert checkpoints.best_step() == 1
        assert checkpoints.all_steps() == [1, 3]


def test_save_then_donate_keeps_saved_values(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((512, 512))
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        for number in range(4):
            checkpoints.save(number, {"x": x}, None, {})
            for _ in range(8):
                x = step(x)
        checkpoints.wait()
        for number in range(4):
            restored = checkpoints.restore(number, jax.eval_shape(lambda: {"x": x})).state["x"]
            np.testing.assert_array_equal(restored, 8.0 * number)


def test_logging_only_of_orbax_is_filtered(tmp_path, caplog):
    state = {"a": jnp.ones(2)}
    with caplog.at_level("INFO", logger="absl"):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state, None, {})
            checkpoints.restore(1, state)
        absl_logging.info("of our own")
    assert [record.getMessage() for record in caplog.records] == ["of our own"]


@pytest.fixture
def saved(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, {"w": jnp.ones((2, 3)), "opt": {"mu": jnp.ones(3)}}, None, {"m": 1})
        yield checkpoints


def test_restore_subset_reads_parameters_only(saved):
    want = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    np.testing.assert_array_equal(saved.restore(4, want, subset=True).state["w"], 1)
    with pytest.raises(UserError, match=r"checkpoint .*/4 does not fit .* unexpected opt/mu$"):
        saved.restore(4, want)


@pytest.mark.parametrize("subset", [False, True])
def test_restore_missing_leaf_is_named(saved, subset):
    want = {"w": jnp.ones((2, 3)), "opt": {"mu": jnp.ones(3), "nu": jnp.ones(3)}}
    with pytest.raises(UserError, match=r"lacks opt/nu$"):
        saved.restore(4, want, subset=subset)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [(jnp.ones((3, 2)), "float32[3,2]"), (jnp.ones((2, 3), jnp.bfloat16), "bfloat16[2,3]")],
)
def test_restore_other_shape_or_type_is_named(saved, leaf, expected):
    words = re.escape(f"w (float32[2,3], expected {expected})")
    with pytest.raises(UserError, match=words):
        saved.restore(4, {"w": leaf, "opt": {"mu": jnp.ones(3)}})


def test_restore_unknown_step_raises(saved):
    with pytest.raises(UserError, match="no checkpoint of step 5, only of 4"):
        saved.restore(5, {})
    with pytest.raises(UserError, match="no checkpoint of step 5, only of 4"):
        saved.meta(5)


def test_read_only_without_checkpoint_raises(tmp_path):
    with pytest.raises(UserError, match="checkpoint folder .* does not exist"):
        Checkpoints(tmp_path / "none", read_only=True)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    with pytest.raises(UserError, match="has no complete checkpoint"):
        Checkpoints(tmp_path, read_only=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_read_only_accepts_workdir(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(2)}, None, {"model": "tiny"})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.meta() == {"model": "tiny"}
        assert checkpoints.directory == tmp_path / "checkpoints"


@contextlib.contextmanager
def full_disk(size):
    """Limits the size of every file to ``size`` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_save_full_disk_keeps_earlier_steps(tmp_path):
    state = {"a": np.random.default_rng(0).normal(size=30_000)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None, {"model": "tiny"})
        with (
            full_disk(100_000),
            pytest.raises(UserError, match=r"checkpoint .*/2 cannot be written .*too large"),
        ):
            checkpoints.save(2, state, None, {"model": "tiny"})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [1]
        np.testing.assert_array_equal(checkpoints.restore(1, state).state["a"], state["a"])


def test_save_failed_write_lets_other_writes_finish(tmp_path, capfd):
    """The other writes complete although the first of two hundred fails."""
    state = {str(i): np.random.default_rng(i).normal(size=2000) for i in range(200)}
    for number in range(4):
        with (
            Checkpoints(tmp_path / str(number)) as checkpoints,
            full_disk(20_000),
            pytest.raises(UserError, match="cannot be written"),
        ):
            checkpoints.save(1, state, None, {})
        shutil.rmtree(tmp_path / str(number))  # fails if a file is still being written
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("noticed_by", ["save", "wait", "close"])
def test_async_save_failure_names_its_step(tmp_path, monkeypatch, noticed_by):
    state = {"a": np.random.default_rng(0).normal(size=30_000)}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # saves are asynchronous there
    checkpoints = Checkpoints(tmp_path)
    notice = {
        "save": lambda: checkpoints.save(2, state, None, {}),
        "wait": checkpoints.wait,
        "close": checkpoints.close,
    }[noticed_by]
    with full_disk(100_000):
        checkpoints.save(1, state, None, {})
        with pytest.raises(UserError, match="/1 cannot be written .*too large"):
            notice()
    checkpoints.close()


def test_save_other_value_error_is_not_converted(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="of ours"):
        checkpoints.save(1, {"a": jnp.ones(2)}, None, {})


def test_restore_damaged_checkpoint_names_folder(saved, tmp_path):
    for path in (tmp_path / "4" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(UserError, match=r"checkpoint .*/4 cannot be read"):
        saved.restore(4, {"w": jnp.ones((2, 3)), "opt": {"mu": jnp.ones(3)}})


SAVER = """
import sys
sys.path.insert(0, sys.argv[1])
import jax.numpy as jnp
from cirag_jax.models.io.checkpoints import Checkpoints

checkpoints = Checkpoints(sys.argv[2], keep=3)
step = checkpoints.latest_step() or 0
while True:
    step += 1
    state = {f"w{i}": jnp.full((256, 256), step, jnp.float32) for i in range(8)}
    checkpoints.save(step, state, {"position": step}, {"step": step})
    print(step, flush=True)
"""


def test_kill_during_save_leaves_complete_checkpoints(tmp_path, repository):
    folder = tmp_path / "checkpoints"
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(repository), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        for _ in range(2):
            process.stdout.readline()
        # Kill during a save, as soon as its temporary folder appears.
        while not list(folder.glob("*tmp*")):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with Checkpoints(folder) as checkpoints:
        step = checkpoints.latest_step()
        assert step is not None and step >= 2
        want = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(8)}
        for step in checkpoints.all_steps():
            restored = checkpoints.restore(step, want)
            assert restored.data_state == {"position": step}
            assert checkpoints.meta(step) == {"step": step}
            for value in restored.state.values():
                np.testing.assert_array_equal(value, step)
        checkpoints.save(step + 1, restored.state, None, {})
        assert checkpoints.latest_step() == step + 1


def test_keep_step_copies_all_files_or_none(tmp_path, monkeypatch):
    source = tmp_path / "checkpoints" / "3"
    with Checkpoints(source.parent) as checkpoints:
        checkpoints.save(3, {"a": jnp.arange(4)}, {"row": 1}, {"component": "aligner"})
    (source.parent / "5.orbax-checkpoint-tmp-1").mkdir()
    assert steps_in(source.parent) == [3] and steps_in(tmp_path / "none") == []
    link = os.link

    def deleting(which):
        links = []

        def watched(old, new):  # training deletes a file during or after its linking
            links.append(old)
            if len(links) == 2:
                links[which].unlink()
            link(old, new)

        return watched

    assert keep_step(source, tmp_path / "linked" / "3")
    assert os.stat(tmp_path / "linked/3/meta/metadata").st_nlink == 2
    monkeypatch.setattr(os, "link", lambda old, new: (_ for _ in ()).throw(OSError(18, "device")))
    assert keep_step(source, tmp_path / "copied" / "3")
    for which in (0, 1):
        monkeypatch.setattr(os, "link", deleting(which))
        assert not keep_step(source, tmp_path / "torn" / "3")
    assert not keep_step(source.parent / "4", tmp_path / "torn" / "4")
    assert list((tmp_path / "torn").iterdir()) == []
    shutil.rmtree(source)
    for copy in ("linked", "copied"):
        with Checkpoints(tmp_path / copy, read_only=True) as checkpoints:
            assert checkpoints.meta() == {"component": "aligner"}
            restored = checkpoints.restore(3, {"a": jnp.zeros(4, int)})
        np.testing.assert_array_equal(restored.state["a"], np.arange(4))
