"""What the tables cost: minutes on two CPU cores, or questions to answer and models to train."""

import hashlib
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from experiments.papers.answers import config_of
from experiments.papers.printed import tables
from experiments.paths.declare import BENCHMARKS, Setup

# Scale smoke: the 544 stages of all tables with two questions take 20 minutes on two busy cores.
SECONDS_PER_STAGE = 2.2
# Scale small: seconds per question with the preset medium, many questions at a time, on 2 cores of
# an AMD EPYC (experiments/RESULTS.md: "Ten methods on MuSiQue, 1.5B parameters", and for NativeRAG
# the 50 questions of "CIRAG and NativeRAG with 1.5B parameters"). Other methods have no record.
SECONDS_PER_QUESTION = {
    "native_rag": 12, "ircot": 14, "iter_retgen": 13, "genground": 44, "kirag": 30, "dualrag": 57,
    "c2rag": 22, "cirag": 47, "oracle": 4,
}  # fmt: skip


class Cost(NamedTuple):
    """What a stage costs.

    Attributes:
      seconds: on two CPU cores, at the scales smoke and small; None without an estimate.
      questions: number of questions that it answers; NaN if it depends on another stage.
      trainings: number of models that it trains.
    """

    seconds: float | None = None
    questions: float = 0
    trainings: int = 0


def stages(setup: Setup, scale: str) -> dict[str, Cost]:
    """Returns the cost of each stage of a setup by a key, which equal stages share."""
    keys: dict[str, str] = {}
    costs = {}
    for name, stage in setup.stages.items():
        command = _filled(stage.command, {**setup.variables, **keys})
        keys[name] = hashlib.sha256(command.encode()).hexdigest()
        costs[keys[name]] = _cost(_filled(stage.command, setup.variables), setup, scale)
    return costs


def _filled(command: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1]) or match[0], command)


def _cost(command: str, setup: Setup, scale: str) -> Cost:
    runs = _runs(command, setup)
    seconds: float | None = None
    if scale == "smoke":
        seconds = SECONDS_PER_STAGE
    elif scale == "small" and runs and all(name in SECONDS_PER_QUESTION for name, _ in runs):
        seconds = sum(SECONDS_PER_QUESTION[name] * number for name, number in runs)
    return Cost(seconds, sum(number for _, number in runs), command.startswith("launch/train.py"))


def _runs(command: str, setup: Setup) -> list[tuple[str, float]]:
    """Returns the method and the number of questions of each run that a command makes."""
    words = shlex.split(command)
    flags = dict(word.removeprefix("--config.").split("=", 1) for word in words if "=" in word)
    if words[0] == "launch/answer.py":
        methods = [flags["--config"].rpartition("/")[2].replace(".py", "")]
    elif words[0] == "launch/compare.py":
        methods = [run.partition("=")[2].rstrip(":") for run in flags["methods"].split(",")]
    else:
        return []
    return [(method.partition(":")[0], _number(method, flags, setup)) for method in methods]


def _number(config: str, flags: Mapping[str, str], setup: Setup) -> float:
    """Returns the number of questions: the limit, that of the folder, or all dev questions."""
    folder = flags["data.dir"]
    made = setup.stages.get(folder.strip("{}"))
    own = re.search(r"--limit=(\d+)", made.command) if made else None
    limits = [int(flags.get("data.limit", config_of(config).data.limit)), int(own[1] if own else 0)]
    if known := [limit for limit in limits if limit]:
        return min(known)
    sizes = tables("kirag")["table6"].values
    folder = folder.replace("abstracts", "hotpotqa")
    return next((sizes["questions", (name,)] for name in BENCHMARKS if name in folder), math.nan)


def text(costs: Iterable[Cost], scale: str) -> str:
    """Returns the costs of stages in words."""
    costs = list(costs)
    if scale == "paper":
        numbers = [cost.questions for cost in costs]
        known = sum(number for number in numbers if not math.isnan(number))
        unknown = sum(map(math.isnan, numbers))
        answered = [f"{known:,.0f} questions"] if known or not unknown else []
        if unknown:
            answered.append(f"{unknown} runs over generated questions")
        return f"{' and '.join(answered)} to answer, {sum(c.trainings for c in costs)} trainings"
    seconds = [cost.seconds for cost in costs if cost.seconds is not None]
    if not seconds:
        return "no estimate"
    hours, minutes = sum(seconds) / 3600, sum(seconds) / 60
    shown = f"about {hours:,.0f} h" if hours >= 2 else f"about {max(minutes, 1):.0f} min"
    without = len(costs) - len(seconds)
    return f"{shown} and {without} stages without an estimate" if without else shown
