"""Checkpoints: the train state, the data iterator and a description, saved as one or not at all.

A step's folder holds three items: ``state`` (every array of the train state under its path, so that
it restores onto any mesh and does not depend on container classes), ``data`` (what the iterator
needs to go on, one file for each process) and ``meta`` (JSON: what an evaluation must know about
the model). Orbax writes a step aside and renames it when it is whole; a killed process leaves a
temporary folder that is never taken for a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from cirag_jax.errors import UserError
from cirag_jax.io import Closing, replacing

PyTree = Any
# What reading a damaged file of a checkpoint raises.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_CLOSING = 60.0  # Seconds that an event loop waits for its tasks before it closes.


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint read back.

    ``state`` has the structure and shardings that were asked for; ``data_state`` is what the
    iterator's ``get_state`` gave when the checkpoint was saved; ``metrics`` is None for a
    checkpoint saved without them.
    """

    step: int
    state: PyTree
    data_state: Any
    meta: dict[str, Any]
    metrics: dict[str, float] | None


class Checkpoints(Closing):
    """The checkpoints of one run, in one folder.

    Keeps the ``keep`` latest steps and, whatever their age, the best by ``best_metric``.

    Args:
      directory: the folder; made where absent. With ``read_only``, a workdir that holds
        ``checkpoints/`` will do.
      keep: how many of the latest steps stay.
      best_metric: the key of ``save(metrics=...)`` that ranks checkpoints: the lower the better
        where its name has "loss", else the higher. A NaN ranks last.
      read_only: for evaluation: creates, cleans and saves nothing, and requires a checkpoint.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep: int = 2,
        best_metric: str = "dev/mrr",
        read_only: bool = False,
    ):
        directory = pathlib.Path(directory).expanduser().absolute()
        if read_only and not directory.is_dir():
            raise UserError(f"there is no checkpoint folder {directory}")
        if read_only and (directory / "checkpoints").is_dir():
            directory /= "checkpoints"
        self.directory = directory
        self.best_metric = best_metric
        self._step = -1  # the one last saved, which may be under way
        mode = "min" if "loss" in best_metric else "max"
        worst = math.inf if mode == "min" else -math.inf

        def rank(metrics: Mapping[str, float]) -> float:
            value = metrics.get(best_metric, worst)
            return value if math.isfinite(value) else worst

        try:
            self._manager = self._open(rank, mode, keep, read_only)
            self._manager.best_step()  # ranks them all
        except _DAMAGE as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(
                f"{directory}: the metrics of a checkpoint cannot be read ({reason[:200]})"
            ) from None
        if read_only and self.latest_step() is None:
            self.close()
            raise UserError(f"{directory} holds no complete checkpoint")

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
                # On a CPU a save is finished before it returns: there is no copy to another memory
                # to hide behind the next step, and while a thread writes from the very buffers,
                # JAX cannot reuse them where the train step donates them.
                enable_async_checkpointing=jax.default_backend() != "cpu",
                cleanup_tmp_directories=not read_only,
                create=not read_only,
                read_only=read_only,
            ),
        )

    def save(
        self,
        step: int,
        state: PyTree,
        data: Any,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Saves a step; returns False, and does nothing, where it is saved already.

        Args:
          step: number of train steps done.
          state: pytree of arrays (typed RNG keys included) and Python numbers.
          data: the data iterator (its ``get_state()`` is taken now) or its state, which JSON or
            bytes must hold.
          meta: JSON-able description of the model.
          metrics: evaluation figures of this step; they decide which checkpoint is the best.
        """
        if step in self._manager.all_steps():
            return False
        if metrics is not None:
            metrics = {key: float(value) for key, value in metrics.items()}
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_flatten(state)),
            data=_DataStateSave(data.get_state() if hasattr(data, "get_state") else data),
            meta=ocp.args.JsonSave(dict(meta)),
        )
        self.wait()  # Orbax would, and its error would seem to be of this step
        self._step = step
        with self._writing():
            # When to save is decided by the trainer, not by a policy in here.
            return self._manager.save(step, args=items, metrics=metrics, force=True)

    def restore(
        self,
        step: int | None,
        abstract_state: PyTree,
        data: Any = None,
        *,
        subset: bool = False,
    ) -> Restored:
        """Reads a checkpoint onto the mesh that ``abstract_state`` describes.

        Args:
          step: the step, or None for the latest.
          abstract_state: like the saved state, with ``jax.ShapeDtypeStruct`` leaves that carry
            shardings, or with arrays whose shape, type and sharding are taken.
          data: the data iterator; its ``set_state`` is called. May be None.
          subset: whether the checkpoint may hold more than is asked for (an evaluation wants the
            parameters and not the optimizer's moments).
        """
        step = self._require(step)
        wanted = _flatten(abstract_state, abstract=True)
        self._check(step, wanted, subset)
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        wanted,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                        partial_restore=subset,
                    ),
                    data=_DataStateRestore(),
                    meta=ocp.args.JsonRestore(),
                ),
            )
        except _DAMAGE as error:
            raise UserError(self._unreadable(step, error)) from error
        data_state = restored["data"]
        if data is not None:
            data.set_state(data_state)
        return Restored(
            step,
            _unflatten(abstract_state, restored["state"]),
            data_state,
            dict(restored["meta"]),
            self._manager.metrics(step),
        )

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """The description saved with a step (None: the latest)."""
        step = self._require(step)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )
        except _DAMAGE as error:
            raise UserError(self._unreadable(step, error)) from error
        return dict(restored["meta"])

    def metrics(self, step: int | None = None) -> dict[str, float] | None:
        """The metrics saved with a step (None: the latest), or None where there were none."""
        step = self._require(step)
        try:
            return self._manager.metrics(step)
        except _DAMAGE as error:
            raise UserError(self._unreadable(step, error)) from error

    def all_steps(self) -> list[int]:
        """The complete steps, ascending."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The latest complete step, or None."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The step with the best metric (the latest of several), or None where none was ranked."""
        return self._manager.best_step()

    def wait(self) -> None:
        """Returns when every save under way is complete on disk."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves under way and releases the folder; raises as `wait`."""
        with self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and "os_error_code" not in str(error):
                raise  # no fault of the disk's, of which TensorStore makes a ValueError
            # The last words are the disk's; before them come long paths.
            reason = OSError(str(error).splitlines()[0].partition(" [")[0].rpartition(": ")[2])
            raise UserError(self._failed(self._step, "written", reason)) from error

    def _require(self, step: int | None) -> int:
        steps = self.all_steps()
        if not steps:
            raise UserError(f"{self.directory} holds no complete checkpoint")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise UserError(
                f"{self.directory} holds no checkpoint of step {step}, only of "
                f"{', '.join(map(str, steps))}"
            )
        return step

    def _check(self, step: int, wanted: Mapping[str, Any], subset: bool) -> None:
        """Compares names, shapes and types before anything is read."""
        try:
            saved = self._manager.item_metadata(step)["state"].tree
        except _DAMAGE as error:
            raise UserError(self._unreadable(step, error)) from error
        differences = []
        if missing := sorted(wanted.keys() - saved.keys()):
            differences.append(f"lacks {_some(missing)}")
        if not subset and (extra := sorted(saved.keys() - wanted.keys())):
            differences.append(f"has unexpected {_some(extra)}")
        other = [
            f"{name} ({_spell(saved[name])}, expected {_spell(wanted[name])})"
            for name in sorted(wanted.keys() & saved.keys())
            if _spell(saved[name]) != _spell(wanted[name])
        ]
        if other:
            differences.append(f"has other shapes or types in {_some(other)}")
        if differences:
            raise UserError(
                f"checkpoint {self.directory / str(step)} does not fit this model: it "
                + " and ".join(differences)
            )

    def _unreadable(self, step: int, error: Exception) -> str:
        return self._failed(step, "read", error)

    def _failed(self, step: int, what: str, error: Exception) -> str:
        reason = f"{type(error).__name__}: {error}".splitlines()[0].partition(" [")[0]
        return f"checkpoint {self.directory / str(step)} cannot be {what} ({reason[:200]})"


def steps_in(directory: pathlib.Path) -> list[int]:
    """The complete steps of a folder that a training may be writing or not have made, ascending."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
    return []


def keep_step(step: pathlib.Path, copy: pathlib.Path) -> bool:
    """Gives a step's folder a second place, from which its training does not delete it.

    The files are linked, on another file system copied. Returns whether they are all there: where
    the step is gone, or was deleted meanwhile, only what an earlier call kept is.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError), replacing(copy) as aside:
        files = _files(step)
        for file in files:
            (aside / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(step / file, aside / file)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                shutil.copyfile(step / file, aside / file)
        if not files or _files(step) != files:
            raise FileNotFoundError(step)
    return copy.is_dir()


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _spell(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


# ---------------------------------------------------------------------------------- state <-> dict


def _flatten(tree: PyTree, *, abstract: bool = False) -> dict[str, Any]:
    """Every leaf under its path, RNG keys as their data; ``abstract``: as ShapeDtypeStructs."""
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path)
        if name in flat:
            raise ValueError(f"two leaves of the state have the path {name}")
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
        return np.asarray(leaf)  # a Python number comes back through NumPy
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        # Orbax would trust the file's own sharding, which names devices of another run.
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if not sharding.is_fully_replicated:
        raise ValueError("a sharded RNG key cannot be restored; replicate it")
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _unflatten(tree: PyTree, flat: Mapping[str, Any]) -> PyTree:
    def rebuild(path: tuple[Any, ...], like: Any) -> Any:
        value = flat[_name(path)]
        if _is_key(like):
            return jax.random.wrap_key_data(value, impl=_key_impl(like))
        return value if hasattr(like, "dtype") else type(like)(value)

    return jax.tree_util.tree_map_with_path(rebuild, tree)


def _key_impl(like: Any) -> Any:
    """The RNG algorithm of a key, or of a ShapeDtypeStruct that stands for one."""
    found = []
    struct = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), struct)
    return found[0]


# --------------------------------------------------------------------------------- data iterator


class _DataStateHandler(ocp.CheckpointHandler):
    """One JSON file for each process: a data iterator may read its own shard of the examples."""

    def save(self, directory: Any, args: _DataStateSave) -> None:
        state = args.item
        encoded = {"bytes": state.decode()} if isinstance(state, bytes) else {"json": state}
        path = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        path.write_text(json.dumps(encoded))

    def restore(self, directory: Any, args: _DataStateRestore | None = None) -> Any:
        del args
        path = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        if path.exists():
            encoded = json.loads(path.read_text())
        else:
            # Saved by another number of processes: usable where the state does not depend on it.
            texts = {found.read_text() for found in directory.glob("process_*.json")}
            if len(texts) != 1:
                raise UserError(
                    f"checkpoint {directory.parent} was saved by another number of processes, each "
                    f"with its own place in the data; it cannot go on with {jax.process_count()}"
                )
            encoded = json.loads(texts.pop())
        return encoded["bytes"].encode() if "bytes" in encoded else encoded["json"]


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


# Orbax comments on every save and restore, and what it reports as an error it raises as well; a
# progress bar is on the same screen.
logging.getLogger("absl").addFilter(_is_not_from_orbax)


class _PatientLoop(asyncio.SelectorEventLoop):
    """An event loop that lets its unfinished tasks end before it closes."""

    def close(self) -> None:
        """Waits for the tasks at most `_CLOSING` seconds."""
        tasks = () if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            waiting = asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                self.run_until_complete(asyncio.wait_for(waiting, _CLOSING))
        super().close()


class _PatientLoops(asyncio.DefaultEventLoopPolicy):
    """Makes every new event loop a `_PatientLoop`."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _PatientLoop()


# Orbax closes its loop at the first of many writes or reads that fails. TensorStore reports the
# others to the closed loop, each with a traceback, and may still write files after the save has
# failed. Orbax 0.12.8 has no option against it, so the loops of this program wait.
asyncio.set_event_loop_policy(_PatientLoops())
