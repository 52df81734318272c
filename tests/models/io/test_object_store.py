"""Checkpoints in an object store, which a local folder stands for."""

import os
import sys
import types

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils.epath import backend as epath_backend
from etils.epath import gpath
from ml_collections import ConfigDict
from orbax.checkpoint._src.path import gcs_utils

from cirag_jax.errors import UserError
from cirag_jax.io import is_training_workdir
from cirag_jax.models.io.checkpoint_folders import (
    files_in,
    folder_of,
    keep_step,
    open_folder,
    steps_in,
)
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.training.state import open_checkpoints

_URL = "gs://bucket/run"


class _Bucket:
    """Maps paths in gs://bucket to files under ``root``, with the rules of an object store."""

    def __init__(self, root):
        self._root = root

    def local(self, path):
        return str(path).replace("gs://bucket", str(self._root))

    def __getattr__(self, name):
        def call(*arguments, **options):
            assert name not in ("rename", "replace", "copy")  # slow, and not atomic
            places = [self.local(argument) for argument in arguments]
            if name == "open" and places[1].startswith("w"):  # folders exist only as prefixes
                os.makedirs(os.path.dirname(places[0]), exist_ok=True)
            result = getattr(epath_backend.os_backend, name)(*places, **options)
            if name == "glob":
                return [path.replace(str(self._root), "gs://bucket") for path in result]
            return result

        return call


@pytest.fixture(autouse=True)
def bucket(tmp_path, monkeypatch):
    """Replaces the clients of Google Cloud Storage; returns the local folder."""
    bucket = _Bucket(tmp_path / "bucket")
    monkeypatch.setitem(sys.modules, "gcsfs", types.ModuleType("gcsfs"))
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", bucket)
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)

    def kvstore(path):
        end = "" if path.endswith("_sharding") else "/"  # the only file that TensorStore opens
        return {"driver": "file", "path": bucket.local(path) + end}

    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", kvstore)
    return tmp_path / "bucket"


def _open(workdir, place):
    workdir.mkdir(exist_ok=True)
    fields = {"keep_checkpoints": 1, "best_metric": "dev/mrr", "checkpoints": {"dir": place}}
    return open_checkpoints(ConfigDict(fields), workdir)


def test_checkpoints_are_saved_and_found_from_the_workdir(bucket, tmp_path):
    workdir = tmp_path / "w"
    state = {"params": {"a": jnp.arange(6.0).reshape(2, 3)}, "step": 3}
    with _open(workdir, _URL) as checkpoints:
        assert isinstance(checkpoints._manager._checkpointer, ocp.AsyncCheckpointer)
        for step, score in ((1, 0.5), (2, 0.9), (3, 0.7)):
            checkpoints.save(step, state, {"row": step}, {"m": step})
            checkpoints.add_metrics(step, {"dev/mrr": score})
        checkpoints.save(4, state, {"row": 4}, {"m": 4})
    assert (workdir / "checkpoints").read_text() == f"{_URL}\n" and is_training_workdir(workdir)
    assert steps_in(folder_of(workdir)) == [2, 4]  # the best and the latest
    (bucket / "run" / "4" / "commit_success.txt").unlink()  # as if killed during the save
    assert steps_in(folder_of(workdir)) == [2]

    with Checkpoints(workdir, read_only=True) as checkpoints:
        assert str(checkpoints.directory) == _URL and checkpoints.best_step() == 2
        restored = checkpoints.restore(2, {"params": state["params"]}, subset=True)
        np.testing.assert_array_equal(restored.state["params"]["a"], state["params"]["a"])
        assert (restored.data_state, restored.metrics) == ({"row": 2}, {"dev/mrr": 0.9})
    assert keep_step(folder_of(workdir) / "2", tmp_path / "copied" / "2")
    assert files_in(tmp_path / "copied" / "2") == files_in(folder_of(workdir) / "2")
    with Checkpoints(tmp_path / "copied", read_only=True) as checkpoints:
        copy = checkpoints.restore(2, state).state
        np.testing.assert_array_equal(copy["params"]["a"], state["params"]["a"])
    with _open(workdir, _URL) as checkpoints:  # resumes; the incomplete step is saved again
        assert checkpoints.latest_step() == 2
        checkpoints.save(4, state, {"row": 4}, {})
        checkpoints.wait()
        assert checkpoints.all_steps() == [2, 4]


def test_checkpoints_of_another_folder_are_refused(tmp_path):
    local, remote = tmp_path / "local", tmp_path / "remote"
    _open(local, None).close()
    with pytest.raises(UserError, match="has its checkpoints in .*local/checkpoints; set config"):
        _open(local, _URL)
    _open(remote, _URL).close()
    for other in (None, "gs://bucket/other", str(tmp_path / "other")):
        with pytest.raises(UserError, match="has its checkpoints in gs://bucket/run; set config"):
            _open(remote, other)


def test_open_folder_unusable_url_is_refused(tmp_path, monkeypatch):
    for url in ("s3://bucket/run", "gs:///run"):
        with pytest.raises(UserError, match=f"config.checkpoints.dir={url} must be a folder of a"):
            open_folder(url)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match="needs gcsfs, which is not installed; run: pip install"):
        open_folder(_URL)


def test_errors_of_any_type_name_the_step(monkeypatch):
    with Checkpoints(_URL) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(2)}, None, {})
        checkpoints.wait()

        def refuse(*arguments, **options):
            raise Exception("401")

        monkeypatch.setattr(checkpoints._manager, "restore", refuse)
        with pytest.raises(UserError, match=r"checkpoint gs://bucket/run/1 cannot be read .*401"):
            checkpoints.meta()
