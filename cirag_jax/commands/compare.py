"""Runs several methods on the same questions and compares them: the command ``launch/compare.py``.

Each run has a folder with the files of launch/answer.py (`commands.answer`). The methods share
loaded models and indexes. `commands.comparison` writes the tables.
"""

import collections
import pathlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax import cli, config_files
from cirag_jax.commands import answer, comparison, latency, opening, task
from cirag_jax.commands.answer import PlannedRun
from cirag_jax.commands.pool import Pool
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.io import say
from cirag_jax.runtime.records import JournalReader, check_settings
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Config

# ``[NAME=]METHOD[:PRESET]``; METHOD may be the path of a config file, NAME becomes a folder.
_METHOD = re.compile(r"(?:(?P<name>\w[\w.-]*)=)?(?P<method>\w+|[\w./-]+\.py)(?::(?P<preset>\w*))?")
# ``[NAME:]KEY=VALUE``
_OVERRIDE = re.compile(r"(?:(?P<name>\w[\w.-]*):)?(?P<key>[\w.]+)=.*", re.DOTALL)
# Fields of the comparison's config that apply to all runs.
_SHARED = ("data", "profile", "metrics", "recall_at", "seed", "cache")


class NamedMethod(NamedTuple):
    """A method and preset to compare, under a name."""

    name: str
    method: str
    preset: str


def compare(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs ``config.methods`` in ``workdir/NAME`` and compares them; resumes interrupted runs.

    Returns:
      ``methods``: the result of each run. ``opened``: the number of loaded models, indexes and
      other resources, by kind. ``texts``: how many embeddings of texts the methods ``requested`` in
      this command, and how many were ``embedded`` rather than cached. ``complete``: whether all
      runs have ended; if so, also the result of `comparison.compare_runs`, which writes the tables.
    """
    check_at_least(1, config, "repeats")
    check_at_least(0, config, "latency_questions")
    until = task.deadline(config)
    methods = read_methods(config.methods, config.preset)
    check_choice("config.baseline", config.baseline, (None, *(method.name for method in methods)))
    with Pool() as pool:
        configs = _configs(config, methods)
        runs = {name: answer.plan_run(run_config, pool) for name, run_config in configs.items()}
        for name, run in runs.items():
            _check(name, run, workdir / name)
        answer.warn_of_training_questions(runs.values())
        answer.warn_of_untrained_integrators(runs)
        results = _answer_all(runs, workdir, pool, until)
        complete = all(result["complete"] for result in results.values()) and (
            _repeat_all(config, runs, workdir, pool, until)
        )
        encoders = pool.encoders()
        texts = {
            "requested": sum(encoder.requested for encoder in encoders),
            "embedded": sum(encoder.embedded for encoder in encoders),
        }
        say(f"{texts['requested']:,} embeddings requested, {texts['embedded']:,} computed")
        complete = complete and _measure_latency(config, runs, workdir, pool, until)
        opened = {kind: count for kind, count in pool.opened.items() if kind != "data sets"}
    say("opened: " + ", ".join(f"{count} {kind}" for kind, count in opened.items()))
    result = {"methods": results, "opened": opened, "texts": texts, "complete": complete}
    if not complete:
        say("stopped before the end; run the same command to resume")
        return result
    folders = [(name, workdir / name) for name in runs]
    compared = comparison.compare_runs(config, folders, workdir, True, config.repeats)
    return {**result, **compared}


# ------------------------------------------------------------------------------------ the methods


def read_methods(specs: Any, preset: str | None) -> list[NamedMethod]:
    """Parses ``config.methods``; ``preset`` applies to methods without a preset."""
    methods = []
    for text in config_files.texts_of(specs, ","):
        match = _METHOD.fullmatch(text)
        if match is None:
            raise UserError(
                f"config.methods: {text!r} is not a method; expected METHOD, METHOD:PRESET or "
                "NAME=METHOD:PRESET, separated by commas, where METHOD is the name of a method or "
                "the path of a config file."
            )
        name = match["name"] or pathlib.PurePath(match["method"]).stem
        own_preset = preset if match["preset"] is None else match["preset"]
        methods.append(NamedMethod(name, match["method"], own_preset or ""))
    if not methods:
        raise UserError("config.methods is required: --config.methods=direct,native_rag,cirag")
    for name, count in collections.Counter(method.name for method in methods).items():
        if count > 1:
            raise UserError(f"config.methods has {name!r} twice; rename one of them: other={name}.")
    return methods


def _configs(config: Config, methods: Sequence[NamedMethod]) -> dict[str, Config]:
    """Returns the config of each method, with the shared fields and ``config.set``."""
    configs = {method.name: task.method_config(method.method, method.preset) for method in methods}
    overrides = _overrides(config, configs)
    for name, method, preset in methods:
        if preset:
            _warn_of_overwritten(name, configs[name], task.method_config(method, ""), config)
        run_config = configs[name] = task.method_config(method, preset, overrides[name])
        with run_config.unlocked():
            triples = run_config.get("triples")
            for field in _SHARED:
                run_config[field] = config[field]
            if triples is not None:  # Set by config.set, for this method only.
                run_config.data = config.data.copy_and_resolve_references()
                run_config.data.triples = triples
            if "triples" in run_config:
                run_config.triples = run_config.data.get_ref("triples")
            if config.in_flight is not None:
                run_config.in_flight = config.in_flight
            if config.model is not None and "model" in run_config:
                run_config.model = config.model
    return configs


def _warn_of_overwritten(name: str, own: Config, default: Config, config: Config) -> None:
    """Names the fields of a method's preset that have another value in the comparison."""
    defaults, shared = dict(_leaves(default)), dict(_leaves(config))
    changes = [
        f"{field}={value} ({shared.get(field)})"
        for field, value in _leaves(own)
        if value not in (defaults.get(field), shared.get(field))
    ]
    if changes:
        say(
            f"WARNING: {name}: the comparison's values, in brackets, replace those of the preset: "
            f"{', '.join(changes)}; set config.FIELD to change them for all methods"
        )


def _leaves(config: Config) -> Iterator[tuple[str, Any]]:
    """Yields the shared fields of a config of configs/methods, with dotted names."""
    for field in _SHARED:
        if field == "data":
            yield from ((f"data.{name}", value) for name, value in config.data.items())
        elif field in config:
            yield field, config[field]


def _overrides(config: Config, configs: Mapping[str, Config]) -> dict[str, list[str]]:
    """Returns the overrides of each method; KEY=VALUE without NAME applies to all that have KEY."""
    overrides: dict[str, list[str]] = {name: [] for name in configs}
    for text in config_files.texts_of(config.set):
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise UserError(f"config.set: {text!r} must be KEY=VALUE or NAME:KEY=VALUE.")
        key, name = match["key"], match["name"]
        if key.partition(".")[0] in (*_SHARED, "stop_after_minutes"):
            raise UserError(f"config.set: {key} applies to all methods; set --config.{key}=...")
        if name is not None and name not in configs:
            raise UserError(
                f"config.set: {text!r} does not name one of config.methods: {', '.join(configs)}."
            )
        names = (
            [name]
            if name
            else [n for n, run_config in configs.items() if config_files.has_key(run_config, key)]
        )
        if not names:
            raise UserError(f"config.set: none of config.methods has a key {key!r}.")
        for method in names:
            overrides[method].append(text[match.end("name") + 1 :] if name else text)
    return overrides


def _check(name: str, run: PlannedRun, folder: pathlib.Path) -> None:
    try:
        opening.check_task(run.config, run.task)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    check_settings(folder / JOURNAL, run.settings)


# --------------------------------------------------------------------------------------- the runs


def _answer_all(
    runs: Mapping[str, PlannedRun], workdir: pathlib.Path, pool: Pool, until: float | None
) -> dict[str, Any]:
    """Returns each run's result; a run that did not start in time only has ``complete``."""
    results: dict[str, Any] = {}
    for number, (name, run) in enumerate(runs.items(), start=1):
        if until is not None and time.monotonic() >= until:
            results[name] = {"complete": False}
            continue
        say(f"{name} ({number} of {len(runs)})")
        results[name] = _answer(run, workdir / name, pool, until)
    return results


def _answer(run: PlannedRun, folder: pathlib.Path, pool: Pool, until: float | None) -> Any:
    started = time.monotonic()
    result = cli.run_inside(
        folder, run.config, lambda: answer.execute(run, folder, pool, started, until)
    )
    pool.release()
    return result


def _repeat_all(
    config: Config,
    runs: Mapping[str, PlannedRun],
    workdir: pathlib.Path,
    pool: Pool,
    until: float | None,
) -> bool:
    """Reruns sampling methods with additional seeds; returns whether all runs have ended."""
    if config.repeats == 1:
        return True
    for name, run in runs.items():
        with JournalReader(workdir / name / JOURNAL) as journal:
            is_sampled = journal.is_sampled
        if not is_sampled:
            say(f"{name} decodes greedily and runs only once, because repeats would be identical")
            continue
        for number in range(2, config.repeats + 1):
            say(f"{name}, repeat {number} of {config.repeats}")
            run_config = run.config.copy_and_resolve_references()
            with run_config.unlocked():
                run_config.seed = config.seed + number - 1
            folder = workdir / name / f"{comparison.REPEAT}{number}"
            if not _answer(answer.plan_run(run_config, pool), folder, pool, until)["complete"]:
                return False
    return True


def _measure_latency(
    config: Config,
    runs: Mapping[str, PlannedRun],
    workdir: pathlib.Path,
    pool: Pool,
    until: float | None,
) -> bool:
    """Times the same sample of questions with each method; returns whether all runs have ended."""
    if not config.latency_questions:
        return True
    for name, run in runs.items():
        ids = latency.sample(run.task.questions, config.latency_questions, config.seed)
        say(f"{name}, latency of {len(ids)} questions")
        folder = workdir / name / comparison.LATENCY
        if not latency.measure(run, ids, folder, pool, until):
            return False
    return True
