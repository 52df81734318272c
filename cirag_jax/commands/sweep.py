"""A grid of settings over a training or an evaluation: one run each, one table."""

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

FAILED = "failed.txt"  # in a run's folder: why it failed
# Between commas; these separate nothing within brackets and quotes.
_VALUE = re.compile(r"""(?:[^,()\[\]'"]|\([^()]*\)|\[[^\[\]]*\]|'[^']*'|"[^"]*")+""")


class GridRun(NamedTuple):
    """A point of the grid.

    Attributes:
      name: of its folder, ``seed=1,optimizer.learning_rate=3e-5``.
      values: of every swept field, as they were given.
      config: of the training or evaluation.
    """

    name: str
    values: Mapping[str, str]
    config: Config


def sweep(config: Config, workdir: pathlib.Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Carries out every run of a grid in ``workdir/NAME``, or one of a job array; resumes.

    A run that fails is told of and does not keep the others from being carried out; one that is
    stopped, by a signal or its time, ends the command. One that another command works at is left to
    it. Writes ``table.md`` and ``result.json`` after every run.

    Args:
      config: of a training or an evaluation, with ``array_index``, ``dry_run`` and ``metric``.
      workdir: an existing folder, which several processes of an array share.
      arguments: ``--config.sweep.FIELD=VALUE,VALUE``.

    Returns:
      ``metric``, ``runs`` (of each its ``name``, ``values``, ``state`` and, if it has ended,
      `series.figures`), the name of the ``best``, and ``complete``: whether the runs that this
      command was to carry out have ended or failed.
    """
    if jax.process_count() > 1 and not is_training(config):
        raise UserError(f"an evaluation runs in one process, not in {jax.process_count()}")
    runs = make_runs(config, arguments)
    metric = series.metric_of(config)
    chosen = runs[_choice(config, len(runs))]
    for run in runs:
        series.finished(workdir / run.name, run.config)  # refuses other settings
    if config.dry_run:
        for index, run in enumerate(runs):
            say(f"{index:>4}  {run.name}")
        return cli.Shown(_report(workdir, runs, metric, complete=False))
    complete = True
    for number, run in enumerate(chosen, start=1):
        folder = workdir / run.name
        if series.finished(folder, run.config) is not None:
            continue
        say(f"{run.name} ({number} of {len(chosen)})")
        try:
            ended = _carry_out(run, folder)
        except InUse:
            say(f"{run.name} is in the hands of another command")
            complete = False
            continue
        except Exception as error:
            _report(workdir, runs, metric, complete=False)
            if len(chosen) == 1 or jax.process_count() > 1:
                raise
            told = isinstance(error, UserError)
            say(f"{run.name} failed: {one_line(str(error)) if told else traceback.format_exc()}")
            continue
        _report(workdir, runs, metric, complete=False)
        if not ended:
            complete = False
            break
    return _report(workdir, runs, metric, complete)


def _choice(config: Config, count: int) -> slice:
    """The runs that this process carries out."""
    index = config.array_index
    name = "config.array_index"
    if index is None and (told := os.environ.get("SLURM_ARRAY_TASK_ID")):
        index, name = int(told), "SLURM_ARRAY_TASK_ID"
    if index is None:
        return slice(None)
    if not 0 <= index < count:
        raise UserError(f"{name}={index} must be 0 to {count - 1}: the grid has {count} runs.")
    return slice(index, index + 1)


def _carry_out(run: GridRun, folder: pathlib.Path) -> bool:
    """Whether the run has come to its end."""

    def work() -> dict[str, Any]:
        (folder / FAILED).unlink(missing_ok=True)
        try:
            return jobs.run(run.config, folder)
        except Exception as error:
            write_text(folder / FAILED, [one_line(str(error)) or type(error).__name__, "\n"])
            raise

    return cli.run_inside(folder, run.config, work).get("complete") is not False


# --------------------------------------------------------------------------------------- the grid


def make_runs(config: Config, arguments: Sequence[str]) -> list[GridRun]:
    """Every combination of the values, the last field's changing first.

    Args:
      config: what all runs share, with the fields of the sweep itself.
      arguments: ``--config.sweep.FIELD=VALUE,VALUE``. A comma within brackets or quotes belongs to
        a value.
    """
    grid: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, text = argument.lstrip("-").partition("=")
        field, values = name.removeprefix("config.sweep."), _VALUE.findall(text)
        if not values or ",".join(values) != text:
            raise UserError(f"{argument}: values are needed, with a comma between two of them.")
        if field in grid:
            raise UserError(f"--config.sweep.{field} is given twice.")
        grid[field] = values
    if not grid:
        raise UserError("nothing is swept: give --config.sweep.FIELD=VALUE,VALUE at least once.")
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
    """A folder's; what no folder can be named is told apart by a hash."""
    text = ",".join(f"{field}={value}" for field, value in values.items())
    name = re.sub(r"[^\w.,=+@:-]", "_", text, flags=re.ASCII)[:200]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


# -------------------------------------------------------------------------------------- the table


def _report(
    workdir: pathlib.Path, runs: Sequence[GridRun], metric: str, complete: bool
) -> dict[str, Any]:
    """Writes and returns how far all runs are, whoever carried them out."""
    rows: dict[tuple[str, ...], series.Figures] = {}
    found = []
    for run in runs:
        folder = workdir / run.name
        result, state = series.finished(folder, run.config), "ended"
        row = {} if result is None else series.figures(result, metric)
        if result is None:
            state = "begun" if (folder / "config.json").exists() else ""
            if (folder / FAILED).exists():
                state = f"failed: {(folder / FAILED).read_text('utf-8').strip()}"
        rows[*run.values.values(), state] = row
        found.append({"name": run.name, "values": run.values, "state": state, **row})
    values = {
        run.name: next(iter(row.values()), None)
        for run, row in zip(runs, rows.values(), strict=True)
    }
    best = series.best_of(values, metric)
    result = {"metric": metric, "runs": found, "best": best, "complete": complete}
    if jax.process_index() == 0:
        text = f"{metric} is best with {best}.\n\n" if best else ""
        text += series.table(rows, (*runs[0].values, "state"))
        write_text(workdir / "table.md", (text, "\n"))
        write_json(workdir / "result.json", result)
    return result
