"""Checkpoints: the train state, the data iterator's state and metadata, saved atomically.

The folder of a step contains three items. ``state`` has every array of the train state under its
path, so the state can be restored onto any mesh and into other container classes. ``data`` is the
state of the data iterator, one file per process. ``meta`` is JSON that describes the model for
evaluations. On a file system, Orbax writes a step to a temporary folder and renames it when
complete. In Google Cloud Storage, it writes ``commit_success.txt`` last. Incomplete steps of killed
processes are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from cirag_jax import processes
from cirag_jax.errors import UserError
from cirag_jax.io import Closing, write_text
from cirag_jax.models.io.checkpoint_folders import Folder, folder_of, is_local, open_folder

PyTree = Any
# Errors that reading a damaged checkpoint file can raise.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_CLOSING = 60.0  # seconds that an event loop waits for its tasks before closing


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    ``state`` has the requested structure and shardings. ``data_state`` is the saved state of the
    data iterator. ``metrics`` is None for a checkpoint without them.
    """

    step: int
    state: PyTree
    data_state: Any
    metrics: dict[str, float] | None


class Checkpoints(Closing):
    """The checkpoints of one run, in one folder.

    Keeps the ``keep`` latest steps and the best step by ``best_metric``.

    Args:
      directory: the folder, created if absent, see `open_folder`. With ``read_only``, it may be
        a workdir, see `folder_of`.
      keep: number of latest steps to keep.
      best_metric: the metric (see `add_metrics`) that ranks checkpoints. Lower is better if its
        name contains "loss", otherwise higher. NaN ranks last.
      read_only: for evaluation; changes no files and requires at least one checkpoint.
    """

    def __init__(
        self,
        directory: str | Folder,
        *,
        keep: int = 2,
        best_metric: str = "dev/mrr",
        read_only: bool = False,
    ):
        directory = open_folder(directory)
        if read_only and is_local(directory) and (directory / "checkpoints").exists():
            directory = folder_of(directory)
        self.directory = directory
        # Clients of object stores raise errors of their own types.
        local = is_local(directory)
        self._errors: tuple[type[Exception], ...] = (OSError, ValueError) if local else (Exception,)
        self._damage: tuple[type[Exception], ...] = _DAMAGE if local else (Exception,)
        self.best_metric = best_metric
        self._step = -1  # the last step saved; its write may still be running
        mode = "min" if "loss" in best_metric else "max"
        worst = math.inf if mode == "min" else -math.inf

        def rank(metrics: Mapping[str, float]) -> float:
            value = metrics.get(best_metric, worst)
            return value if math.isfinite(value) else worst

        try:
            if read_only and not directory.is_dir():
                raise UserError(f"checkpoint folder {directory} does not exist")
            self._manager = self._open(rank, mode, keep, read_only)
            self._manager.best_step()  # reads the metrics of all steps
        except UserError:
            raise
        except self._damage as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            what = "the metrics of a checkpoint" if local else "the folder"
            raise UserError(f"{directory}: {what} cannot be read ({reason[:200]})") from None
        if read_only and self.latest_step() is None:
            self.close()
            raise UserError(f"{directory} has no complete checkpoint")

    def _open(
        self, rank: Callable[[Any], float], mode: str, keep: int, read_only: bool
    ) -> ocp.CheckpointManager:
        policies = ocp.checkpoint_managers
        return ocp.CheckpointManager(
            self.directory,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "data": _DataStateHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                best_fn=rank,
                best_mode=mode,
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(keep),
                        policies.BestN(
                            get_metric_fn=rank,
                            reverse=mode == "min",
                            n=1,
                            keep_checkpoints_without_metrics=False,
                        ),
                    ]
                ),
                # Saves from a CPU to a file system are synchronous. There is no device-to-host
                # copy to overlap with the next step, and a writing thread would keep JAX from
                # reusing donated buffers.
                enable_async_checkpointing=jax.default_backend() != "cpu"
                or not is_local(self.directory),
                cleanup_tmp_directories=not read_only,
                create=not read_only,
                read_only=read_only,
            ),
        )

    def save(self, step: int, state: PyTree, data_state: Any, meta: Mapping[str, Any]) -> None:
        """Saves a step that is not saved yet.

        Args:
          step: number of train steps done.
          state: pytree of arrays (typed RNG keys included) and Python numbers.
          data_state: the state of the data iterator, as JSON data.
          meta: description of the model, as JSON data.
        """
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_flatten(state)),
            data=_DataStateSave(data_state),
            meta=ocp.args.JsonSave(dict(meta)),
        )
        self.wait()  # otherwise Orbax waits in save() and reports an earlier error for this step
        self._step = step
        with self._writing():
            # The trainer decides when to save; Orbax must not skip the step.
            self._manager.save(step, args=items, force=True)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the evaluation results that rank a saved step. All processes must call this."""
        self.wait()
        self._step = step
        file = self.directory / str(step) / "metrics" / "metrics"  # Orbax reads this file.
        text = json.dumps({key: float(value) for key, value in metrics.items()})

        def write() -> None:
            if jax.process_index() == 0:
                file.parent.mkdir(exist_ok=True)
                if isinstance(file, pathlib.Path):
                    write_text(file, [text])
                else:
                    file.write_text(text)

        with self._writing():
            processes.together(write)
        self._manager.reload()

    def restore(
        self, step: int | None, abstract_state: PyTree, *, subset: bool = False
    ) -> Restored:
        """Reads a checkpoint onto the mesh that ``abstract_state`` describes.

        Args:
          step: the step, or None for the latest.
          abstract_state: the structure of the saved state, with arrays or ``jax.ShapeDtypeStruct``
            leaves that give the shape, dtype and sharding to restore.
          subset: whether the checkpoint may contain more than the abstract state. Evaluations read
            parameters without the optimizer's moments.
        """
        step = self._require(step)
        expected = _flatten(abstract_state, abstract=True)
        self._check_structure(step, expected, subset)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(
                expected,
                restore_args=ocp.checkpoint_utils.construct_restore_args(expected),
                partial_restore=subset,
            ),
            data=_DataStateRestore(),
        )
        with self._reading(step):
            restored = self._manager.restore(step, args=items)
        return Restored(
            step,
            _unflatten(abstract_state, restored["state"]),
            restored["data"],
            self._manager.metrics(step),
        )

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """Returns the metadata of a step, by default the latest."""
        step = self._require(step)
        items = ocp.args.Composite(meta=ocp.args.JsonRestore())
        with self._reading(step):
            return dict(self._manager.restore(step, args=items)["meta"])

    def metrics(self, step: int | None = None) -> dict[str, float] | None:
        """Returns the metrics of a step, by default the latest; None if none were saved."""
        step = self._require(step)
        with self._reading(step):
            return self._manager.metrics(step)

    def all_steps(self) -> list[int]:
        """Returns the complete steps, ascending."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Returns the latest complete step, or None."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Returns the step with the best metric; the latest if tied, None without metrics."""
        return self._manager.best_step()

    def wait(self) -> None:
        """Waits until all running saves are complete on disk."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for running saves and releases the folder; raises the same errors as `wait`."""
        with self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except self._errors as error:
            is_disk_error = not isinstance(error, ValueError) or "os_error_code" in str(error)
            if is_local(self.directory) and not is_disk_error:
                raise  # only ValueErrors with this code are TensorStore's reports of disk errors
            # The reason is at the end of the message, after long paths.
            message = str(error) or type(error).__name__
            reason = OSError(message.splitlines()[0].partition(" [")[0].rpartition(": ")[2])
            raise UserError(self._failed(self._step, "written", reason)) from error

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except self._damage as error:
            raise UserError(self._failed(step, "read", error)) from error

    def _require(self, step: int | None) -> int:
        steps = self.all_steps()
        if not steps:
            raise UserError(f"{self.directory} has no complete checkpoint")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise UserError(
                f"{self.directory} has no checkpoint of step {step}, only of "
                f"{', '.join(map(str, steps))}"
            )
        return step

    def _check_structure(self, step: int, expected: Mapping[str, Any], subset: bool) -> None:
        """Compares names, shapes and types before reading any array."""
        with self._reading(step):
            saved = self._manager.item_metadata(step)["state"].tree
        differences = []
        if missing := sorted(expected.keys() - saved.keys()):
            differences.append(f"lacks {_shortened(missing)}")
        if not subset and (extra := sorted(saved.keys() - expected.keys())):
            differences.append(f"has unexpected {_shortened(extra)}")
        changed = [
            f"{name} ({_type_name(saved[name])}, expected {_type_name(expected[name])})"
            for name in sorted(expected.keys() & saved.keys())
            if _type_name(saved[name]) != _type_name(expected[name])
        ]
        if changed:
            differences.append(f"has unexpected shapes or types in {_shortened(changed)}")
        if differences:
            raise UserError(
                f"checkpoint {self.directory / str(step)} does not fit this model: it "
                + " and ".join(differences)
            )

    def _failed(self, step: int, action: str, error: Exception) -> str:
        reason = f"{type(error).__name__}: {error}".splitlines()[0].partition(" [")[0]
        return f"checkpoint {self.directory / str(step)} cannot be {action} ({reason[:200]})"


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _type_name(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def _flatten(tree: PyTree, *, abstract: bool = False) -> dict[str, Any]:
    """Returns path -> leaf, optionally as abstract arrays; RNG keys become their integer data."""
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path)
        if abstract:
            flat[name] = _abstract_leaf(leaf)
        elif _is_key(leaf):
            flat[name] = jax.random.key_data(leaf)
        else:
            flat[name] = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return flat


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _abstract_leaf(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):
        return np.asarray(leaf)  # Python numbers are restored as NumPy arrays
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        # Otherwise Orbax uses the sharding in the file, which names the devices of another run.
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _unflatten(tree: PyTree, flat: Mapping[str, Any]) -> PyTree:
    def rebuild(path: tuple[Any, ...], like: Any) -> Any:
        value = flat[_name(path)]
        if _is_key(like):
            return jax.random.wrap_key_data(value, impl=_key_impl(like))
        return value if hasattr(like, "dtype") else type(like)(value)

    return jax.tree_util.tree_map_with_path(rebuild, tree)


def _key_impl(like: Any) -> Any:
    """Returns the RNG algorithm of a key or of its ShapeDtypeStruct."""
    impls = []
    struct = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), struct)
    return impls[0]


class _DataStateHandler(ocp.CheckpointHandler):
    """Saves one JSON file per process, because each process may read a different data shard."""

    def save(self, directory: Any, args: _DataStateSave) -> None:
        path = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        path.write_text(json.dumps({"json": args.item}))

    def restore(self, directory: Any, args: _DataStateRestore | None = None) -> Any:
        del args
        path = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        # Files of a different number of processes are usable if all had the same state.
        files = [path] if path.exists() else directory.glob("process_*.json")
        texts = {file.read_text() for file in files}
        if len(texts) != 1:
            raise UserError(
                f"checkpoint {directory.parent} was saved by a different number of processes, "
                "each with its own position in the data; training cannot resume with "
                f"{jax.process_count()}"
            )
        return json.loads(texts.pop())["json"]


@ocp.args.register_with_handler(_DataStateHandler, for_save=True)
@dataclasses.dataclass
class _DataStateSave(ocp.args.CheckpointArgs):
    item: Any


@ocp.args.register_with_handler(_DataStateHandler, for_restore=True)
@dataclasses.dataclass
class _DataStateRestore(ocp.args.CheckpointArgs):
    item: Any = None


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname


# Orbax logs every save and restore, which would disturb the progress bar. No error is lost, because
# Orbax also raises the errors that it logs.
logging.getLogger("absl").addFilter(_is_not_from_orbax)


class _PatientLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for unfinished tasks when it is closed."""

    def close(self) -> None:
        """Closes the loop after waiting at most `_CLOSING` seconds for its tasks."""
        tasks = () if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            waiting = asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                self.run_until_complete(asyncio.wait_for(waiting, _CLOSING))
        super().close()


class _PatientLoops(asyncio.DefaultEventLoopPolicy):
    """An event loop policy that creates `_PatientLoop` instances."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _PatientLoop()


# Orbax closes its event loop when the first of many reads or writes fails. TensorStore then reports
# the other operations to the closed loop, each with a traceback, and may still write files after
# the failed save. Orbax 0.12.8 has no option to prevent this, so all event loops of this program
# wait.
asyncio.set_event_loop_policy(_PatientLoops())
