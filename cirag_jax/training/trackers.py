"""Experiment trackers: programs that show the metrics of training runs.

By default, all of them only write files in the workdir. The environment variables of wandb and
mlflow (``WANDB_MODE=online``, ``MLFLOW_TRACKING_URI``) choose a server instead.
"""

from __future__ import annotations

import os
import pathlib
import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from cirag_jax import cli, config_files
from cirag_jax.errors import check_choice, import_optional, parsing
from cirag_jax.io import one_line, read_object, say, write_json
from cirag_jax.types import Config

TRACKERS = ("tensorboard", "wandb", "mlflow", "none")
FILE_NAME = "tracker.json"  # In the workdir: the run's id by tracker, for resuming.
_PROJECT = "cirag_jax"
# Defaults of variables that keep both libraries from sending anything, also about their own use.
_OFFLINE = {
    "wandb": {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"},
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
}


class Tracker(Protocol):
    """Receives the scalars of a run."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records finite scalars of a step; a step may be recorded in several calls."""

    def close(self) -> None:
        """Ends the recording."""


def check_tracker(name: str) -> None:
    """Raises `UserError` if a tracker is unknown or not installed."""
    check_choice("config.tracker", name, TRACKERS)
    if name in _OFFLINE:
        _library(name)


def _library(name: str) -> Any:
    for variable, value in _OFFLINE[name].items():
        os.environ.setdefault(variable, value)  # Read when the library is imported.
    modules = [name]
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        modules += ["sqlalchemy", "alembic"]  # MLflow imports them when it opens the database.
    return [import_optional(m, f"config.tracker={name}", "trackers") for m in modules][0]


def open_tracker(
    name: str, workdir: str | os.PathLike[str], start_step: int, config: Config | None = None
) -> Tracker:
    """Starts a run, or continues the run of ``workdir`` if ``start_step`` is above 0.

    Args:
      name: one of `TRACKERS`.
      workdir: existing folder.
      start_step: the restored step; 0 for a new run.
      config: the config to record.
    """
    folder = pathlib.Path(workdir)
    if name == "none":
        return _Silent()
    if name == "tensorboard":
        return _TensorBoard(folder, start_step, config)
    known = read_object(folder / FILE_NAME, optional=True)
    run_id = known.get(name) if start_step else None
    with parsing(f"config.tracker={name} cannot start"):
        tracker = (_Wandb if name == "wandb" else _Mlflow)(folder, run_id, config)
    write_json(folder / FILE_NAME, known | {name: tracker.run_id})
    return tracker


class _Silent:
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class _TensorBoard:
    def __init__(self, folder: pathlib.Path, start_step: int, config: Config | None):
        from tensorboardX import SummaryWriter  # Takes two seconds if torch is installed.

        self._writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else 0
        )
        if config is not None:
            lines = [f"    {key} = {value!r}" for key, value in config_files.leaves(config)]
            self._writer.add_text("config", "\n".join(lines), start_step)
        self.close = self._writer.close

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class _Wandb:
    """Weights & Biases; it ignores steps before the last one that it has received."""

    def __init__(self, folder: pathlib.Path, run_id: str | None, config: Config | None):
        wandb = _library("wandb")
        self.run_id = run_id or uuid.uuid4().hex
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.resolve().name,
            dir=str(folder),
            id=self.run_id,
            resume="allow",
            reinit="create_new",  # Leaves other runs of this process open.
            config={} if config is None else cli.jsonable(config.to_dict()),
            allow_val_change=True,  # Some settings may differ when training resumes.
            settings=wandb.Settings(console="off"),  # Standard output is already redirected.
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """MLflow, whose names of metrics may not contain ``@``: ``recall@5`` is ``recall_at_5``."""

    def __init__(self, folder: pathlib.Path, run_id: str | None, config: Config | None):
        mlflow = _library("mlflow")
        self._error = mlflow.exceptions.MlflowException
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._entities, self._failed = mlflow.entities, False
        if run_id:
            self.run_id = str(run_id)
            self._client.update_run(self.run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(_PROJECT)
        id = experiment.experiment_id if experiment else self._client.create_experiment(_PROJECT)
        self.run_id = self._client.create_run(id, run_name=folder.resolve().name).info.run_id
        leaves = config_files.leaves(config) if config is not None else ()
        params = [self._entities.Param(key, str(value)[:500]) for key, value in leaves]
        for first in range(0, len(params), 100):  # The limits of MLflow's REST API.
            self._client.log_batch(self.run_id, params=params[first : first + 100])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(name.replace("@", "_at_"), value, now, step)
            for name, value in scalars.items()
        ]
        self._try("log_batch", metrics=metrics)

    def close(self) -> None:
        self._try("set_terminated")

    def _try(self, method: str, **arguments: Any) -> None:
        """Calls the client; a server that fails does not end the training."""
        if self._failed:
            return
        try:
            getattr(self._client, method)(self.run_id, **arguments)
        except self._error as error:
            self._failed = True
            say(f"WARNING: MLflow failed and gets no more metrics ({one_line(str(error))[:200]})")
