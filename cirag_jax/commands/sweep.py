"""Grids of settings: one training or evaluation run per combination, and a table of all runs."""

import copy
import hashlib
import itertools
import json
import os
import pathlib
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from cirag_jax import cli, config_files
from cirag_jax.commands import jobs, series
from cirag_jax.errors import InUse, UserError
from cirag_jax.io import one_line, say, write_json, write_text
from cirag_jax.training.state import is_training
from cirag_jax.types import Config

FAILED = "failed.txt"  # in a run's folder: the error message
# A value between commas; commas within brackets and quotes do not separate values.
_VALUE = re.compile(r"""(?:[^,()\[\]'"]|\([^()]*\)|\[[^\[\]]*\]|'[^']*'|"[^"]*")+""")


class GridRun(NamedTuple):
    """A run of the grid.

    Attributes:
      name: the name of the run's folder, such as ``seed=1,optimizer.learning_rate=3e-5``.
      values: the value of every swept field, as on the command line.
      config: the config of the training or evaluation.
    """

    name: str
    values: Mapping[str, str]
    config: Config


def sweep(config: Config, workdir: pathlib.Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Executes or resumes all runs of a grid in ``workdir/NAME``, or one run in a job array.

    Skips and reports failed runs and runs that another command is executing. If a run is stopped by
    a signal or its time limit, the command ends. Writes ``table.md`` and ``result.json`` after
    every run.

    Args:
      config: a config for training or evaluation, with the fields of launch/sweep.py.
      workdir: an existing folder, which the processes of a job array share.
      arguments: ``--config.sweep.FIELD=VALUE,VALUE``.

    Returns:
      ``metric``; ``runs``, each with ``name``, ``values``, ``state`` and, after it has ended,
      `series.figures`; the name of the ``best``; and ``complete``: whether all runs of this command
      have ended or failed.
    """
    if jax.process_count() > 1 and not is_training(config):
        raise UserError(f"an evaluation runs in one process, not in {jax.process_count()}")
    runs = make_runs(config, arguments)
    metric = series.metric_of(config)
    own_runs = runs[_own_slice(config, len(runs))]
    for run in runs:
        series.finished(workdir / run.name, run.config)  # checks that the settings are the same
    if config.dry_run:
        for index, run in enumerate(runs):
            say(f"{index:>4}  {run.name}")
        return cli.PrintOnly(_report(workdir, runs, metric, complete=False))
    complete = True
    for number, run in enumerate(own_runs, start=1):
        folder = workdir / run.name
        if series.finished(folder, run.config) is not None:
            continue
        say(f"{run.name} ({number} of {len(own_runs)})")
        try:
            has_ended = _execute(run, folder)
        except InUse:
            say(f"{run.name} is already running elsewhere; skipped")
            complete = False
            continue
        except Exception as error:
            _report(workdir, runs, metric, complete=False)
            if len(own_runs) == 1 or jax.process_count() > 1:
                raise
            is_user_error = isinstance(error, UserError)
            reason = one_line(str(error)) if is_user_error else traceback.format_exc()
            say(f"{run.name} failed: {reason}")
            continue
        _report(workdir, runs, metric, complete=False)
        if not has_ended:
            complete = False
            break
    return _report(workdir, runs, metric, complete)


def _own_slice(config: Config, count: int) -> slice:
    """Returns the slice of the runs that this command executes."""
    index, name = config.array_index, "config.array_index"
    if index is None and (task_id := os.environ.get("SLURM_ARRAY_TASK_ID")):
        index, name = int(task_id), "SLURM_ARRAY_TASK_ID"
    if index is None:
        return slice(None)
    if not 0 <= index < count:
        raise UserError(f"{name}={index} must be 0 to {count - 1}: the grid has {count} runs.")
    return slice(index, index + 1)


def _execute(run: GridRun, folder: pathlib.Path) -> bool:
    """Executes or resumes a run; returns whether it has ended."""

    def work() -> dict[str, Any]:
        (folder / FAILED).unlink(missing_ok=True)
        try:
            return jobs.run(run.config, folder)
        except Exception as error:
            write_text(folder / FAILED, [one_line(str(error)) or type(error).__name__, "\n"])
            raise

    return cli.run_inside(folder, run.config, work).get("complete") is not False


def make_runs(config: Config, arguments: Sequence[str]) -> list[GridRun]:
    """Returns all combinations of the values; the last field varies fastest.

    Args:
      config: the config that all runs share, with the fields of launch/sweep.py.
      arguments: ``--config.sweep.FIELD=VALUE,VALUE``.
    """
    grid: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, text = argument.lstrip("-").partition("=")
        field, values = name.removeprefix("config.sweep."), _VALUE.findall(text)
        if not values or ",".join(values) != text:
            raise UserError(f"{argument}: expected comma-separated values.")
        if field in grid:
            raise UserError(f"--config.sweep.{field} is set twice.")
        grid[field] = values
    if not grid:
        raise UserError("--config.sweep.FIELD=VALUE,VALUE is required at least once.")
    runs: dict[str, GridRun] = {}
    for combination in itertools.product(*grid.values()):
        values = dict(zip(grid, combination, strict=True))
        flags = [f"--config.{field}={value}" for field, value in values.items()]
        run_config = copy.deepcopy(config).unlock()  # keeps the types of unset fields
        for field in ("array_index", "dry_run", "metric"):
            del run_config[field]
        run_config = config_files.override(run_config, flags, "--config")
        key = json.dumps(run_config.to_dict(), default=str, sort_keys=True)
        name = _folder_name(values)
        if key in runs:
            raise UserError(f"{runs[key].name} and {name} are the same run.")
        runs[key] = GridRun(name, values, run_config)
    return list(runs.values())


def _folder_name(values: Mapping[str, str]) -> str:
    """Returns a folder name for the values; if characters are replaced, a hash is appended."""
    text = ",".join(f"{field}={value}" for field, value in values.items())
    name = re.sub(r"[^\w.,=+@:-]", "_", text, flags=re.ASCII)[:200]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _report(
    workdir: pathlib.Path, runs: Sequence[GridRun], metric: str, complete: bool
) -> dict[str, Any]:
    """Writes and returns the state of all runs, including those of other commands."""
    rows: dict[tuple[str, ...], series.Figures] = {}
    summaries = []
    for run in runs:
        folder = workdir / run.name
        result, state = series.finished(folder, run.config), "ended"
        row = {} if result is None else series.figures(result, metric)
        if result is None:
            state = "begun" if (folder / "config.json").exists() else ""
            if (folder / FAILED).exists():
                state = f"failed: {(folder / FAILED).read_text('utf-8').strip()}"
        rows[*run.values.values(), state] = row
        summaries.append({"name": run.name, "values": run.values, "state": state, **row})
    values = {
        run.name: next(iter(row.values()), None)
        for run, row in zip(runs, rows.values(), strict=True)
    }
    best = series.best_of(values, metric)
    result = {"metric": metric, "runs": summaries, "best": best, "complete": complete}
    if jax.process_index() == 0:
        note = series.recall_note(runs[0].config)
        text = f"{metric} is best with {best}.{note}\n\n" if best else ""
        text += series.table(rows, (*runs[0].values, "state"))
        write_text(workdir / "table.md", (text, "\n"))
        write_json(workdir / "result.json", result)
    return result
