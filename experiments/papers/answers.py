"""Tables of answers: runs of launch/answer.py, compared per data set."""

import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from cirag_jax import config_files
from experiments.papers.printed import Column, Printed, tables
from experiments.paths.declare import (
    Cell,
    Experiment,
    Measured,
    Reader,
    Setup,
    Stage,
    runs_flag,
)

JUDGED = "acc_judge"  # as a metric: the share of answers that a judge accepts
AVERAGE = "average"  # as a data set: the mean over the others


@dataclasses.dataclass(frozen=True)
class System:
    """A system of a table.

    Attributes:
      name: the run's name in the comparison.
      config: file and preset in configs/methods, such as ``cirag:paper``.
      settings: settings that make the row, as NAME=VALUE.
      trained: settings whose value is a trained model, or another stage's output -> its name in
        the bench.
      models: settings that name other models; they only apply where a model can be named, not at
        the scale smoke.
    """

    name: str
    config: str
    settings: Sequence[str] = ()
    trained: Mapping[str, str] = dataclasses.field(default_factory=dict)
    models: Sequence[str] = ()

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.config.partition(":")[0]

    def but(self, name: str, *settings: str, models: Sequence[str] = ()) -> "System":
        """Returns the system with another name and further settings."""
        return dataclasses.replace(
            self,
            name=name,
            settings=(*self.settings, *settings),
            models=(*self.models, *models),
        )

    def without(self, setting: str) -> "System":
        """Returns the system without a trained model."""
        trained = {name: part for name, part in self.trained.items() if name != setting}
        return dataclasses.replace(self, trained=trained)


@dataclasses.dataclass(frozen=True)
class Bench:
    """The data, models and settings at a scale.

    Attributes:
      stages: all stages before the answers.
      data: the data sets at this scale.
      command: returns the command that answers the questions of a data set with a system, given
        the values of the table's axes; None if the scale cannot run the system.
      variables, server: as in `Setup`.
      slurm: options of sbatch for the answers.
      judge: flags of the judge's language model, or "" without one.
      models: the values of a column axis ``model`` that the bench fills; None is all of them.
    """

    stages: Mapping[str, Stage]
    data: Sequence[str]
    command: Callable[[System, Mapping[str, Any]], str | None]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    server: str | None = None
    slurm: str = ""
    judge: str = ""
    models: Sequence[str] | None = None


@functools.cache
def config_of(config: str) -> Any:
    """Returns the config of a `System.config`, only for reading."""
    name, _, preset = config.partition(":")
    return config_files.load_config(f"configs/methods/{name}.py{':' if preset else ''}{preset}")


def roles_of(config: str) -> list[str]:
    """Returns the roles whose language models a config needs; triples are given."""
    return [
        name
        for name, block in config_of(config).items()
        if isinstance(block, ConfigDict)
        and {"backend", "max_tokens"} <= {*block}
        and name != "extractor"
    ]


# ------------------------------------------------------------------------------------------ results


def interval_of(score: Mapping[str, Any], count: int | None, factor: float = 100.0) -> Measured:
    """Returns a score of a result, which has ``value``, ``low`` and ``high``."""
    value, low, high = (
        None if (x := score.get(key)) is None or math.isnan(x) else factor * x
        for key in ("value", "low", "high")
    )
    return Measured(value, low, high, count, score.get("reason", "") if value is None else "")


class Score(NamedTuple):
    """Reads a score of a run from a comparison."""

    run: str
    name: str

    def __call__(self, result: Mapping[str, Any]) -> Measured:
        """Returns the score in per cent."""
        return interval_of(result["systems"][self.run][self.name], result["num_questions"])

    def minus(self, other: "Score", result: Mapping[str, Any]) -> dict[str, float] | None:
        """Returns the paired difference from another run, in points, or None without one.

        The keys are those of `significance.pairwise`, without ``p``.
        """
        signs = {f"{self.run}-{other.run}": 100, f"{other.run}-{self.run}": -100}
        for pair, sign in signs.items():
            found = result["differences"].get(pair, {}).get(self.name)
            if found and self.name == other.name and found["difference"] is not None:
                low, high = sorted(sign * found[key] for key in ("low", "high"))
                ends = {"difference": sign * found["difference"], "low": low, "high": high}
                return {**ends, "p_holm": found["p_holm"]}
        return None


def share(run: str, counts: str, key: str) -> Reader:
    """Reads the share of questions, in per cent, from counts such as ``granularities``."""

    def read(result: Mapping[str, Any]) -> Measured:
        found: Any = result["systems"][run]
        for part in counts.split("."):
            found = found[part]
        total = sum(found.values())
        count = result["num_questions"]
        if not total:
            return Measured(None, count=count, reason="no question was answered")
        return Measured(100 * found.get(key, 0) / total, count=count)

    return read


def plain(run: str, name: str) -> Reader:
    """Reads a number of a run that is no score, such as ``generated_tokens``."""

    def read(result: Mapping[str, Any]) -> Measured:
        value = result["systems"][run][name]
        if isinstance(value, Mapping):
            return interval_of(value, value.get("num_questions"), factor=1.0)
        return Measured(value, count=result["num_questions"])

    return read


def metric_of(row: str, run: str, axes: Mapping[str, Any]) -> Reader:
    """Reads the score that the axes ``metric`` and ``unit`` name."""
    del row
    unit = axes.get("unit", "passage")
    return Score(run, axes["metric"] if unit == "passage" else f"{unit}_{axes['metric']}")


# ------------------------------------------------------------------------------------------- setups


@dataclasses.dataclass(frozen=True)
class Answers:
    """A table whose cells are read from comparisons of answers.

    Attributes:
      system: returns the system of a row, given the values of the axes that select a run; None if
        it is not run.
      fixed: values of axes that the table does not have, such as its data set.
      read: returns the reader of a cell from its row, the name of its run, and the values of its
        axes.
      of_result: axes that select a number of a run instead of a run.
      scoring: flags of the comparison, such as ``--config.recall_at=(2,5)``.
      latency: number of questions that are also answered one at a time; 0 measures no latency.
      judge: flags of configs/judge.py for the metric ``acc_judge``, or "" without this metric.
    """

    system: Callable[[str, Mapping[str, Any]], System | None]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[str, str, Mapping[str, Any]], Reader] = metric_of
    of_result: Sequence[str] = ("metric", "unit", "hop", "iterations", "queries")
    scoring: str = ""
    latency: int = 0
    judge: str = ""

    def setup(self, table: Printed, bench: Bench) -> Setup:
        """Returns the stages and cells of a table."""
        return _setup(self, table, bench)


def _setup(own: Answers, table: Printed, bench: Bench) -> Setup:
    names: dict[str, str] = {}  # command -> stage
    stages, cells = dict(bench.stages), {}
    groups: dict[tuple[tuple[str, Any], ...], list[Column]] = {}
    for column in table.columns:
        axes = {**own.fixed, **table.axis_values(column)}
        filled = bench.models is None or table.axis_values(column).get("model") in (
            None,
            *bench.models,
        )
        if filled and axes["data"] in bench.data:
            key = tuple((name, value) for name, value in axes.items() if name not in own.of_result)
            groups.setdefault(key, []).append(column)
    for key, columns in groups.items():
        runs: dict[str, str] = {}  # command -> name of the run
        run_of_row = {}
        for row in table.rows:
            system = own.system(row, dict(key))
            command = system and bench.command(system, dict(key))
            if system and command:
                run_of_row[row] = runs.setdefault(command, system.name)
        if not runs:
            continue
        suffix = "_".join(slug(value) for _, value in key)
        stage = f"table_{suffix}"
        if own.latency:
            stages[stage] = timed_comparison(runs, own.latency, own.scoring, bench.slurm)
        else:
            rows = {}
            for command, run in runs.items():
                answer = names.setdefault(command, f"answer_{slug(run)}_{suffix}")
                stages[answer] = Stage(command, **({"slurm": bench.slurm} if bench.slurm else {}))
                rows[run] = answer
            stages[stage] = Stage(
                f"launch/evaluate.py --config=configs/comparison.py {runs_flag(rows)} "
                f"--config.allow_different=true {own.scoring}".strip()
            )
            if own.judge and bench.judge:
                stages[f"judge_{suffix}"] = Stage(
                    f"launch/evaluate.py --config=configs/judge.py {runs_flag(rows)} {own.judge} "
                    f"{bench.judge}"
                )
        for column in columns:
            axes = {**dict(key), **table.axis_values(column)}
            for row, run in run_of_row.items():
                if axes.get("metric") != JUDGED:
                    cells[row, column] = Cell([(stage, own.read(row, run, axes))])
                elif f"judge_{suffix}" in stages:
                    cells[row, column] = Cell([(f"judge_{suffix}", Score(run, "judge"))])
    _add_averages(table, cells)
    return Setup(needed(stages, cells), bench.variables, bench.server, cells)


def timed_comparison(
    runs: Mapping[str, str], num_questions: int, scoring: str, slurm: str = ""
) -> Stage:
    """Returns the stage that answers and compares, and measures latency.

    Args:
      runs: command of launch/answer.py -> name of the run.
      num_questions: number of questions that are also answered one at a time.
      scoring: flags of the comparison.
      slurm: options of sbatch.
    """
    methods, settings, shared = [], [], []
    for command, run in runs.items():
        words = shlex.split(command)
        name = slug(run)
        (config,) = (word for word in words if word.startswith("--config="))
        method, _, preset = config.rpartition("/")[2].partition(".py")
        methods.append(f"{name}={method}{preset or ':'}")
        for word in words:
            key, equals, value = word.removeprefix("--config.").partition("=")
            if not equals or not word.startswith("--config."):
                continue
            if key.startswith("data.") or key in ("model", "profile", "metrics", "recall_at"):
                shared.append(word)
            else:
                settings.append(f"{name}:{key}={value}")
    flags = ",".join(f'"{setting}"' for setting in settings)
    command = (
        f"launch/compare.py --config=configs/compare.py --config.methods={','.join(methods)} "
        f"'--config.set=({flags},)' {shlex.join(dict.fromkeys(shared))} "
        f"--config.latency_questions={num_questions} {scoring}"
    )
    return Stage(command.strip(), **({"slurm": slurm} if slurm else {}))


def _add_averages(table: Printed, cells: dict[tuple[str, Column], Cell]) -> None:
    """Adds the cells of the data set `AVERAGE`: the means over the other data sets."""
    if "data" not in table.axes:
        return
    place = list(table.axes).index("data")
    others = [value for value in table.axes["data"] if value != AVERAGE]
    for column in table.columns:
        if column[place] != AVERAGE:
            continue
        for row in table.rows:
            parts = [
                cells.get((row, (*column[:place], data, *column[place + 1 :]))) for data in others
            ]
            if None not in parts:
                sources = [source for part in parts if part for source in part.sources]
                cells[row, column] = Cell(sources)


def needed(
    stages: Mapping[str, Stage], cells: Mapping[tuple[str, Column], Cell]
) -> dict[str, Stage]:
    """Returns the stages that the cells need, directly or through other stages."""
    names = {stage for cell in cells.values() for stage, _ in cell.sources}
    for name in reversed([*stages]):
        if name in names:
            names |= {*re.findall(r"{(\w+)}", stages[name].command)}
    return {name: stage for name, stage in stages.items() if name in names}


def slug(value: Any) -> str:
    """Returns a name as part of the names of stages and of runs of launch/compare.py."""
    return re.sub(r"\W+", "_", f"{value}".casefold()).strip("_")


def declare(
    paper: str,
    plans: Mapping[str, Answers],
    scales: Mapping[str, Callable[[], Bench]],
    missing: Mapping[str, str],
    unsupported: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Experiment]:
    """Returns the experiments of a paper's tables of answers.

    Args:
      paper: a name of `printed.PAPERS`.
      plans: how each table is measured.
      scales: the bench of each scale.
      missing: as in `Experiment`, for all tables.
      unsupported: for tables that lack scales, the scales and why.
    """
    lacking = unsupported or {}
    return [
        _experiment(tables(paper)[name], plan, scales, missing, lacking.get(name, {}))
        for name, plan in plans.items()
    ]


def _experiment(
    table: Printed,
    plan: Answers,
    scales: Mapping[str, Callable[[], Bench]],
    missing: Mapping[str, str],
    unsupported: Mapping[str, str],
) -> Experiment:
    setups = {
        scale: functools.cache(lambda bench=bench: plan.setup(table, bench()))
        for scale, bench in scales.items()
        if scale not in unsupported
    }
    rows = {row: missing[row] for row in table.rows if row in missing}
    name = f"{table.paper}_{table.name}"
    return Experiment(name, table.title, setups, table, rows, unsupported)


def counted(
    paper: str,
    name: str,
    cell: Callable[[str, Mapping[str, Any], Bench], Cell | None],
    scales: Mapping[str, Callable[[], Bench]],
    missing: Mapping[str, str] | None = None,
    unsupported: Mapping[str, str] | None = None,
) -> Experiment:
    """Returns the experiment of a table of counts, which are read from the stages of a bench.

    Args:
      paper: a name of `printed.PAPERS`.
      name: the name of the table.
      cell: returns a cell from its row, the values of its axes and the bench; None if not run.
      scales: the bench of each scale.
      missing: as in `Experiment`.
      unsupported: as in `Experiment`.
    """
    table = tables(paper)[name]

    def setup(bench: Bench) -> Setup:
        found = {
            (row, column): cell(row, table.axis_values(column), bench)
            for row in table.rows
            for column in table.columns
        }
        cells = {key: value for key, value in found.items() if value is not None}
        return Setup(needed(bench.stages, cells), bench.variables, bench.server, cells)

    setups = {
        scale: functools.cache(lambda bench=bench: setup(bench()))
        for scale, bench in scales.items()
    }
    return Experiment(
        f"{paper}_{name}", table.title, setups, table, missing or {}, unsupported or {}
    )
