"""The parts of a declared experiment: stages, and the scales at which it runs."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.papers.printed import Column, Printed

SCALES = ("smoke", "small", "paper")
# Variables that every declaration may use: the folder of --data, and the stage's own folder.
DATA, OUT = "data", "out"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command, as a user would type it after ``python``.

    Attributes:
      command: the command's words, separated like in a shell. ``{NAME}`` is the folder of the
        earlier stage NAME, ``{data}/PATH`` is a file or folder in ``--data``, ``{VARIABLE}`` is the
        value of a variable. The runner adds ``--workdir`` unless the command contains ``{out}``,
        the stage's own folder.
      plan: further words for launch/plan.py, such as the number of devices and examples. None if
        launch/plan.py cannot estimate the stage.
      slurm: options of sbatch.
    """

    command: str
    plan: str | None = None
    slurm: str = "--time=4:00:00 --ntasks=1"


class Measured(NamedTuple):
    """A measured value, in the unit of the paper's table.

    Attributes:
      value: the value; None if it is undefined.
      low, high: the ends of its 95 % interval, or None.
      count: the number of questions.
      reason: why the value is undefined, or "".
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    count: int | None = None
    reason: str = ""


Reader = Callable[[Mapping[str, Any]], Measured]  # from the result of a stage


class Cell(NamedTuple):
    """A cell of a table: the mean of what is read from the results of stages.

    Attributes:
      sources: stages, and the functions that read their results.
      summed: whether the cell is the sum instead.
    """

    sources: Sequence[tuple[str, Reader]]
    summed: bool = False

    def measure(self, results: Mapping[str, Mapping[str, Any]]) -> Measured | None:
        """Returns the value, given the results of finished stages; None if one is missing."""
        if not all(stage in results for stage, _ in self.sources):
            return None
        values = [read(results[stage]) for stage, read in self.sources]
        if len(values) == 1:
            return values[0]
        reasons = [value.reason for value in values if value.value is None]
        if reasons:
            return Measured(None, reason=reasons[0])
        total = math.fsum(value.value or 0.0 for value in values)
        mean = total if self.summed else total / len(values)
        return Measured(mean, count=sum(value.count or 0 for value in values))


@dataclasses.dataclass(frozen=True)
class Setup:
    """An experiment at one scale.

    Attributes:
      stages: the stages by name, each after those that it reads.
      variables: default values of variables, which ``--set=NAME=VALUE`` changes. "" is required.
      server: a Python file that serves language models and prints its URL, which is then the
        variable ``server``.
      cells: how the cells of the paper's table are filled; others are not run.
    """

    stages: Mapping[str, Stage]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    server: str | None = None
    cells: Mapping[tuple[str, Column], Cell] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table or figure, or the path to a table.

    Attributes:
      name: the name in ``--only``.
      title: one line for ``--list``.
      scales: a function for each supported scale that returns the setup.
      table: the table or figure of a paper, or None for a path.
      missing: rows of the table without a run -> ``not implemented`` or ``not run``, a colon, and
        the reason.
      unsupported: scales that are not supported, and why.
    """

    name: str
    title: str
    scales: Mapping[str, Callable[[], Setup]]
    table: Printed | None = None
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)


GPU = "--time=24:00:00 --ntasks=1 --gpus-per-node=1"

# Benchmarks of ``--scale=paper``, and the configs of their official files.
BENCHMARKS = {"hotpotqa": "distractor", "two_wiki": "default", "musique": "ans"}


# ``--scale=small``: random training and dev_report questions of 2WikiMultihopQA, and as passages to
# search their contexts (CIRAG, section 4.1). `SMALL_VARIABLES` are the defaults of its variables.
SMALL_FOLDER = "--config.data.dir={data}/2wikimultihopqa"
_DRAWN = "--config.data.limit={questions} --config.data.random=true"
SMALL_TRAIN = f"{SMALL_FOLDER} --config.data.split=train {_DRAWN}"
SMALL_DEV = f"{SMALL_FOLDER} --config.data.split=dev --config.data.fold=dev_report {_DRAWN}"
CONTEXTS = "--config.data.corpus=selected_questions"
SMALL_VARIABLES = {"questions": "100"}
# Weights of 8 bits and more rows at once decode faster on CPUs.
SMALL_EXTRACT = (
    "launch/extract.py --config=configs/extract.py:small --config.extractor.dtype=int8 "
    "--config.extractor.batch_size=32"
)


def small_stages() -> dict[str, Stage]:
    """Returns the stages that extract the triples of `SMALL_TRAIN` and `SMALL_DEV`."""
    extract = f"{SMALL_EXTRACT} {CONTEXTS}"
    return {
        "extract_train": Stage(f"{extract} {SMALL_TRAIN}"),
        "extract": Stage(f"{extract} {SMALL_DEV}"),
    }


def served(*roles: str) -> str:
    """Returns the flags that send the requests of roles to the smoke server."""
    return " ".join(
        f"--config.{role}.backend=openai --config.{role}.base_url={{server}} "
        f"--config.{role}.model=smoke"
        for role in roles
    )


def export(checkpoint: str) -> Stage:
    """Returns the stage that exports the model of a training stage."""
    return Stage(
        f"launch/export.py --config=configs/export.py --config.checkpoint={{{checkpoint}}}"
    )


def runs_flag(rows: Mapping[str, str], suffix: str = "") -> str:
    """Returns the flag that lists runs, given as row -> stage without the suffix."""
    runs = ",".join(f'"{row}={{{stage}{suffix}}}"' for row, stage in rows.items())
    return f"'--config.runs=({runs})'"


def comparison(rows: Mapping[str, str], suffix: str = "") -> Stage:
    """Returns the stage that compares runs; see `runs_flag`."""
    return Stage(
        f"launch/evaluate.py --config=configs/comparison.py {runs_flag(rows, suffix)} "
        "--config.allow_different=true"
    )


def benchmark_stages(
    benchmark: str, files: str, *, limit: int = 0, suffix: str = "", config: str = ""
) -> dict[str, Stage]:
    """Returns the stages that make dataset folders for training and for answering.

    ``prepare`` converts the official files. ``corpus_train`` and ``corpus`` select at most
    ``limit`` random training and dev questions, with the passages of their contexts.

    Args:
      benchmark: a name of ``python -m cirag_jax.datasets.prepare``.
      files: the folder of the official files, such as ``{data}/two_wiki``.
      limit: number of questions of each split; 0 is all.
      suffix: appended to the names of the stages.
      config: the benchmark's config, such as distractor; "" is the first one.
    """
    prepare = f"-m cirag_jax.datasets.prepare --benchmark={benchmark} --manual_dir={files}"
    if config:
        prepare += f" --config={config}"
    select = f"{prepare} --data_dir={{prepare{suffix}}}/tfds --corpus=selected_questions"
    if limit:
        select += f" --limit={limit} --seed=0"
    return {
        f"prepare{suffix}": Stage(f"{prepare} --out={{out}}"),
        f"corpus_train{suffix}": Stage(f"{select} --split=train --out={{out}}"),
        f"corpus{suffix}": Stage(f"{select} --split=dev --out={{out}}"),
    }


def without_training(stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """Returns `benchmark_stages` of a paper that trains nothing."""
    return {name: stage for name, stage in stages.items() if not name.startswith("corpus_train")}
