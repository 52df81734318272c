"""GRADE: Tables 1 to 3 and 5 to 16, and Figures 2 to 4."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.papers import benches
from experiments.papers.answers import System, interval_of, needed, slug
from experiments.papers.printed import Column, Printed, tables
from experiments.paths import grade
from experiments.paths.declare import Cell, Experiment, Measured, Reader, Setup, Stage, runs_flag

Place = Mapping[str, Any]  # what a cell is about: the keys of `_PARTS`, system and quartile
# Adds the stages that a place needs; returns the name of the one with its values, None if not run.
Adder = Callable[[dict[str, Stage], Place], str | None]

_UNSTATED = "unstated"  # as a model: the paper names none; ours is the path's GPT-4o
_ANY = "any"  # as a model: the mean over the models
_MODELS = ("o1-mini", "GPT-4o", "GPT-4o-mini")
_AGGREGATES = {"Mean": "mean", "Power Mean": "power_mean", "Min": "min"}
_HOPS = {f"{hops}-hop": str(hops) for hops in (2, 3, 4, 5)}
_KINDS = {"exact": "exact", "contextual": "context", "both": "either"}
# Chunks -> their settings at the scale paper, and in words at the scale smoke.
_CHUNKS = {
    "256-512 tokens, 100 overlap": ((256, 512, 100), (10, 24, 0)),
    "64-128 tokens, 25 overlap": ((64, 128, 25), (4, 10, 0)),
}
_ENCODERS = {
    "all-mpnet-base-v2": "sentence-transformers/all-mpnet-base-v2",
    "bge-en-large-v1.5": "BAAI/bge-large-en-v1.5",
    "jina-embeddings-v3": "jinaai/jina-embeddings-v3",
}
_DATA = {"Sports": "two_wiki", "Health": "hotpotqa", "Science": "musique"}
# What the parts of a row's name can be.
_PARTS = {
    "domain": _DATA,
    "model": _MODELS,
    "aggregate": _AGGREGATES,
    "encoder": _ENCODERS,
    "chunks": _CHUNKS,
    "hops": _HOPS,
}


def place_of(row: str, axes: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a cell is about.

    Args:
      row: the row's name, whose parts are separated by commas.
      axes: the values of the column's axes.
      fixed: what all cells of the table share.
    """
    place = {"system": "native_rag", "model": _UNSTATED, "aggregate": "Min", **fixed, **axes}
    for name, words in _PARTS.items():
        found = [word for word in words if f", {word}," in f", {row},"]
        place |= {name: found[0]} if found else {}
    return place


# ------------------------------------------------------------------------------------------- stages


def _with(command: str, *settings: str) -> str:
    """Returns a command with other values of settings, given as NAME=VALUE."""
    for setting in settings:
        flag = f" --config.{setting}"
        pattern = re.escape(flag.partition("=")[0]) + "=[^ ]*"
        command, count = re.subn(pattern, lambda _, flag=flag: flag, command)
        command += "" if count else flag
    return command


def _chunk_settings(sizes: Sequence[int]) -> Iterator[str]:
    for name, size in zip(("least", "most", "overlap"), sizes, strict=True):
        yield f"chunks.{name}={size}"


def _name(kind: str, place: Place, *parts: str) -> str:
    return slug("_".join([kind, *(str(place[part]) for part in parts if part in place)]))


_RUN = ("domain", "chunks", "system", "model", "encoder")


class _Path:
    """Adds stages of the path's setup, which generate questions from articles."""

    def __init__(
        self,
        setup: Setup,
        articles: str,
        settings: Callable[[Place], Sequence[str]],
        ignored: Sequence[str] = (),
    ):
        """Takes the stages of a setup.

        Args:
          setup: the path's setup.
          articles: the folder of a ``{domain}``.
          settings: returns the settings of a run, such as its reader's model.
          ignored: parts of a place that change nothing, so that their runs are the same.
        """
        self._base, self._articles, self._settings = setup.stages, articles, settings
        self._ignored = ignored

    def questions(self, stages: dict[str, Stage], place: Place) -> str:
        """Adds the stage that generates the questions of a domain."""
        place = {name: value for name, value in place.items() if name not in self._ignored}
        name = _name("questions", place, "domain", "chunks")
        documents = self._articles.replace("{domain}", place.get("domain", "").lower())
        settings = [s for s in self._settings(place) if s.startswith("chunks.")]
        command = _with(self._base["questions"].command, f"documents={documents}", *settings)
        stages[name] = dataclasses.replace(self._base["questions"], command=command)
        return name

    def matrix(self, stages: dict[str, Stage], place: Place) -> str:
        """Adds the stages from the questions to the matrix of a system."""
        place = {name: value for name, value in place.items() if name not in self._ignored}
        system, settings = place["system"], self._settings(place)
        answer, judge, table = (_name(k, place, *_RUN) for k in ("answer", "judge", "table"))
        base = self._base[f"answer_{system}"]
        command = base.command.replace("{questions}", f"{{{self.questions(stages, place)}}}")
        own = [s for s in settings if not s.startswith("chunks.")]
        stages[answer] = dataclasses.replace(base, command=_with(command, *own))
        run = runs_flag({system: answer})
        for name, kind in ((judge, "judge"), (table, "table")):
            base = self._base[kind]
            command = base.command.replace(runs_flag(grade.ROWS), run)
            command = command.replace("{judge}", f"{{{judge}}}")
            own = [s for s in settings if kind == "table" and s.startswith("encoder.")]
            stages[name] = dataclasses.replace(base, command=_with(command, *own))
        return table


@functools.cache
def _smoke() -> _Path:
    """Returns the stages with one set of articles for all domains, and one model and encoder."""

    def settings(place: Place) -> list[str]:
        chunks = place.get("chunks")
        return list(_chunk_settings(_CHUNKS[chunks][1])) if chunks else []

    return _Path(grade.smoke(), "{files}/articles", settings, ("domain", "model", "encoder"))


_READERS = {
    "Claude 4 Sonnet": (
        "reader.base_url={claude_url}", "reader.api_key_env=ANTHROPIC_API_KEY",
        "reader.model=claude-sonnet-4-20250514",
    ),
    "Llama 3.2 3B": ("reader.backend=jax", "reader.model=meta-llama/Llama-3.2-3B-Instruct"),
}  # fmt: skip


@functools.cache
def _paper() -> _Path:
    """Returns the stages with the paper's models, and articles of one's own for each domain."""

    def settings(place: Place) -> list[str]:
        model, encoder, chunks = place["model"], place.get("encoder"), place.get("chunks")
        name = "gpt-4o" if model == _UNSTATED else model.lower()
        found = list(_READERS.get(model, (f"reader.model={name}",)))
        if encoder:
            found += ["encoder.backend=flax", f"encoder.model={_ENCODERS[encoder]}"]
        return found + (list(_chunk_settings(_CHUNKS[chunks][0])) if chunks else [])

    return _Path(grade.paper(), "{data}/articles/{domain}", settings)


def _small_questions(stages: dict[str, Stage], place: Place) -> str:
    """Generates questions from the first passages of a data set, for Table 2."""
    folder = f"{{data}}/{benches.FOLDERS[_DATA[place['domain']]]}"
    command = _with(grade.small().stages["questions"].command, f"documents={folder}")
    name = _name("questions", place, "domain")
    stages[name] = Stage(f"{command} --config.limit={{documents}}")
    return name


def _small_matrix(stages: dict[str, Stage], place: Place) -> str | None:
    """Answers a data set's own questions with the only model, which stands in for GPT-4o-mini."""
    if place["model"] not in ("GPT-4o-mini", _UNSTATED):
        return None
    system = place["system"]
    answer, table = (_name(kind, place, "domain", "system") for kind in ("answer", "table"))
    config = System(system, f"{system}:paper")
    command = benches.small().command(config, {"data": _DATA[place["domain"]]})
    assert command is not None
    stages[answer] = Stage(command)
    stages[table] = Stage(
        f"launch/evaluate.py --config=configs/difficulty.py {runs_flag({system: answer})} "
        f"--config.encoder.model={benches.MINILM}"
    )
    return table


# -------------------------------------------------------------------------------------------- cells


def _of_hops(values: Mapping[str, Any], place: Place) -> Any:
    """Returns the value of a number of hops, or None if no question has it."""
    return values.get(_HOPS[place["hops"]])


def _none(place: Place) -> Measured:
    return Measured(None, count=0, reason=f"no {place['hops']} questions")


def error(place: Place) -> Reader:
    """Reads an error rate of the matrix."""

    def read(result: Mapping[str, Any]) -> Measured:
        row = _of_hops(result["systems"][place["system"]]["matrix"], place)
        if row is None:
            return _none(place)
        cell = row[int(place["quartile"][1]) - 1]
        return interval_of(cell, cell.get("num_questions"), 1.0)

    return read


def accuracy(place: Place) -> Reader:
    """Reads the accuracy of a number of hops."""

    def read(result: Mapping[str, Any]) -> Measured:
        found = _of_hops(result["systems"][place["system"]]["by_hops"], place)
        if found is None:
            return _none(place)
        value, high, low, count, reason = interval_of(found, found.get("num_questions"), 1.0)
        value, low, high = (None if x is None else 1 - x for x in (value, low, high))
        return Measured(value, low, high, count, reason)

    return read


def correlation(place: Place) -> Reader:
    """Reads a correlation of difficulty and error over quartiles, or the mean over the hops."""

    def read(result: Mapping[str, Any]) -> Measured:
        found = result["systems"][place["system"]]["correlations"][_AGGREGATES[place["aggregate"]]]
        if "hops" not in place:
            return interval_of(found["mean"], result["num_questions"], 1.0)
        own = _of_hops(found["bins"], place)
        if own is None:
            return _none(place)
        return interval_of(own, _of_hops(result["hops"], place)["num_questions"], 1.0)

    return read


def links(place: Place) -> Reader:
    """Reads the share of questions that need an equivalence of names, in per cent."""

    def read(result: Mapping[str, Any]) -> Measured:
        shares = _of_hops(result["needs_link"], place)
        if shares is None:
            return _none(place)
        return Measured(shares[_KINDS[place["kind"]]], count=_of_hops(result["hops"], place))

    return read


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a table is measured.

    Attributes:
      read: returns the reader of a cell at a place.
      fixed: what all cells share.
      unsupported: why a scale is not supported.
    """

    read: Callable[[Place], Reader] = error
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def setup(self, table: Printed, base: Setup, add: Adder, models: Sequence[str]) -> Setup:
        """Returns the stages and cells of a table at a scale."""
        stages: dict[str, Stage] = dict(base.stages)
        cells: dict[tuple[str, Column], Cell] = {}
        for row in table.rows:
            for column in table.columns:
                place = place_of(row, table.axis_values(column), self.fixed)
                places = [place]
                if place["model"] == _ANY:
                    places = [{**place, "model": model} for model in models]
                names = [add(stages, one) for one in places]
                if sources := [(name, self.read(place)) for name in names if name]:
                    cells[row, column] = Cell(sources)
        return Setup(needed(stages, cells), base.variables, base.server, cells)


def _setup(plan: _Plan, table: Printed, scale: str) -> Setup:
    generates = plan.read is links
    if scale == "small":
        bench = benches.small()
        base, add = Setup(bench.stages, bench.variables), _small_matrix
        if generates:
            base = Setup({}, {**grade.small().variables, "documents": "30"})
            add = _small_questions
        return plan.setup(table, base, add, ("GPT-4o-mini",))
    path, base = (_smoke(), grade.smoke()) if scale == "smoke" else (_paper(), grade.paper())
    kept = {name: stage for name, stage in base.stages.items() if name == "files"}
    variables = base.variables
    if "Claude" in plan.fixed.get("model", "") and scale == "paper":
        variables = {**variables, "claude_url": "https://api.anthropic.com/v1"}
    add = path.questions if generates else path.matrix
    return plan.setup(table, Setup(kept, variables, base.server), add, _MODELS)


def _one_model(model: str) -> _Plan:
    return _Plan(error, {"model": model}, {"small": "one model reads at this scale"})


def _small_lacks(domain: str, reason: str) -> _Plan:
    return _Plan(error, {"domain": domain}, {"small": reason})


_DOMAIN = "no data set stands in for its domain at this scale"
_ENCODER = "one encoder searches at this scale"
_CHUNK = "its passages are shorter than a chunk"
PLANS = {
    "table1": _Plan(correlation),
    "table2": _Plan(links),
    "table3": _Plan(correlation),
    "table5": _one_model("Claude 4 Sonnet"),
    "table6": _one_model("Llama 3.2 3B"),
    "table7": _Plan(error, {"system": "multi_step"}),
    "table8": _Plan(error, {"system": "decomposition"}),
    "table9": _small_lacks("Entertainment", _DOMAIN),
    "table10": _small_lacks("Technology", _DOMAIN),
    "table11": _small_lacks("Sports", _ENCODER),
    "table12": _small_lacks("Health", _ENCODER),
    "table13": _small_lacks("Science", _ENCODER),
    "table14": _small_lacks("Sports", _CHUNK),
    "table15": _small_lacks("Health", _CHUNK),
    "table16": _small_lacks("Science", _CHUNK),
    "figure2": _Plan(accuracy, {"model": _ANY}),
    "figure3": _Plan(error),
    "figure4": _Plan(error),
}


def _experiment(name: str, plan: _Plan) -> Experiment:
    table = tables("grade")[name]
    scales = {
        scale: functools.cache(lambda scale=scale: _setup(plan, table, scale))
        for scale in ("smoke", "small", "paper")
        if scale not in plan.unsupported
    }
    return Experiment(
        f"grade_{name}", table.title, scales, table, unsupported=dict(plan.unsupported)
    )


EXPERIMENTS = [_experiment(name, plan) for name, plan in PLANS.items()]
