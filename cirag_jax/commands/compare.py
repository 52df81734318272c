"""Methods answer the same questions, everything opened once, and are compared: launch/compare.py.

Each run is one of launch/answer.py in a folder of its own (`commands.answer`), and the tables are
those of configs/comparison.py (`commands.comparison`).
"""

import collections
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax import cli, config_files
from cirag_jax.commands import alone, comparison, opening, task
from cirag_jax.commands.answer import Plan, carry_out, plan, warn_of_seen
from cirag_jax.commands.pool import Pool
from cirag_jax.errors import UserError, check_at_least
from cirag_jax.io import say
from cirag_jax.runtime.records import JournalReader, check_settings
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Config

# ``[NAME=]METHOD[:PRESET]``; METHOD may be the path of a config file, NAME is a folder's.
_ENTRY = re.compile(r"(?:(?P<name>\w[\w.-]*)=)?(?P<method>\w+|[\w./-]+\.py)(?::(?P<preset>\w*))?")
# ``[NAME:]KEY=VALUE``
_VALUE = re.compile(r"(?:(?P<name>\w[\w.-]*):)?(?P<key>[\w.]+)=.*", re.DOTALL)
# What all runs have of the comparison's own config.
_SHARED = ("data", "profile", "metrics", "recall_at", "seed", "cache")


class Entry(NamedTuple):
    """A method that takes part, under a name of its own."""

    name: str
    method: str
    preset: str


def compare(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs ``config.methods`` in ``workdir/NAME`` and compares them; resumes what is there.

    Args:
      config: of configs/compare.py.
      workdir: an existing folder.

    Returns:
      ``methods``: of each run its result; ``opened``: how many things of each kind were opened, and
      ``texts``: how many were ``requested`` of encoders and ``embedded``, by this command;
      ``complete``; and once all have ended what `comparison.compare_runs` returns, which also
      writes the tables.
    """
    check_at_least(1, config, "repeats")
    check_at_least(0, config, "latency_questions")
    until = task.deadline(config)
    entries = read_entries(config.methods, config.preset)
    with Pool() as pool:
        configs = _configs(config, entries)
        plans = {name: plan(own, pool) for name, own in configs.items()}
        for name, planned in plans.items():
            _check(name, planned, workdir / name)
        warn_of_seen(plans.values())
        methods = _answer_all(plans, workdir, pool, until)
        complete = all(result["complete"] for result in methods.values()) and (
            _repeat_all(config, plans, workdir, pool, until)
        )
        encoders = pool.encoders()
        texts = {
            "requested": sum(encoder.requested for encoder in encoders),
            "embedded": sum(encoder.embedded for encoder in encoders),
        }
        say(f"{texts['requested']:,} texts were looked up, {texts['embedded']:,} embedded")
        complete = complete and _time_all(config, plans, workdir, pool, until)
        opened = {kind: count for kind, count in pool.opened.items() if kind != "data sets"}
    say("opened: " + ", ".join(f"{count} {kind}" for kind, count in opened.items()))
    result = {"methods": methods, "opened": opened, "texts": texts, "complete": complete}
    if not complete:
        say("stopped before the end; the same command goes on from here")
        return result
    folders = [(name, workdir / name) for name in plans]
    compared = comparison.compare_runs(config, folders, workdir, True, config.repeats)
    return {**result, **compared}


# ---------------------------------------------------------------------------------- what takes part


def read_entries(methods: Any, preset: str | None) -> list[Entry]:
    """The methods that ``config.methods`` names; ``preset``: of those that name none."""
    found = []
    for text in config_files.texts_of(methods, ","):
        match = _ENTRY.fullmatch(text)
        if match is None:
            raise UserError(
                f"config.methods: {text!r} is no method; write METHOD, METHOD:PRESET or "
                "NAME=METHOD:PRESET, with commas between; METHOD may be the path of a config file."
            )
        own = preset if match["preset"] is None else match["preset"]
        name = match["name"] or pathlib.PurePath(match["method"]).stem
        found.append(Entry(name, match["method"], own or ""))
    if not found:
        raise UserError("config.methods is required: --config.methods=direct,native_rag,cirag")
    twice = [n for n, count in collections.Counter(e.name for e in found).items() if count > 1]
    if twice:
        raise UserError(
            f"config.methods has {twice[0]!r} twice; name one of them: other={twice[0]}."
        )
    return found


def _configs(config: Config, entries: Sequence[Entry]) -> dict[str, Config]:
    """Of every entry its method's config with what all share, and what ``config.set`` says."""
    found = {entry.name: task.method_config(entry.method, entry.preset) for entry in entries}
    values = _values(config, found)
    for entry in entries:
        own = task.method_config(entry.method, entry.preset, values[entry.name])
        with own.unlocked():
            for field in _SHARED:
                own[field] = config[field]
            if config.in_flight is not None:
                own.in_flight = config.in_flight
            if config.model is not None and "model" in own:
                own.model = config.model
        found[entry.name] = own
    return found


def _values(config: Config, configs: Mapping[str, Config]) -> dict[str, list[str]]:
    """``KEY=VALUE`` of every entry: what is said of it by name, and of all that have the key."""
    found: dict[str, list[str]] = {name: [] for name in configs}
    for text in config_files.texts_of(config.set):
        match = _VALUE.fullmatch(text)
        if match is None:
            raise UserError(f"config.set: {text!r} must be KEY=VALUE or NAME:KEY=VALUE.")
        key, name = match["key"], match["name"]
        if key.partition(".")[0] in (*_SHARED, "stop_after_minutes"):
            raise UserError(f"config.set: {key} is one for all; give --config.{key}=...")
        if name is not None and name not in configs:
            known = ", ".join(configs)
            raise UserError(f"config.set: {text!r} names none of config.methods, {known}.")
        chosen = (
            [name] if name else [n for n, own in configs.items() if config_files.has_key(own, key)]
        )
        if not chosen:
            raise UserError(f"config.set: none of config.methods has a key {key!r}.")
        for one in chosen:
            found[one].append(text[match.end("name") + 1 :] if name else text)
    return found


def _check(name: str, planned: Plan, folder: pathlib.Path) -> None:
    try:
        opening.check_task(planned.config, planned.task)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    check_settings(folder / JOURNAL, planned.settings)


# -------------------------------------------------------------------------------------- the runs


def _answer_all(
    plans: Mapping[str, Plan], workdir: pathlib.Path, pool: Pool, until: float | None
) -> dict[str, Any]:
    """The result of every run that there was time for; the others have ``complete`` alone."""
    found: dict[str, Any] = {}
    for number, (name, planned) in enumerate(plans.items(), start=1):
        if until is not None and time.monotonic() >= until:
            found[name] = {"complete": False}
            continue
        say(f"{name} ({number} of {len(plans)})")
        found[name] = _answer(planned, workdir / name, pool, until)
    return found


def _answer(planned: Plan, folder: pathlib.Path, pool: Pool, until: float | None) -> Any:
    started = time.monotonic()
    result = cli.run_inside(
        folder, planned.config, lambda: carry_out(planned, folder, pool, started, until)
    )
    pool.release()
    return result


def _repeat_all(
    config: Config,
    plans: Mapping[str, Plan],
    workdir: pathlib.Path,
    pool: Pool,
    until: float | None,
) -> bool:
    """Runs with further seeds, of methods that sample; whether all have ended."""
    if config.repeats == 1:
        return True
    for name, planned in plans.items():
        with JournalReader(workdir / name / JOURNAL) as book:
            is_sampled = book.is_sampled
        if not is_sampled:
            say(f"{name} decodes greedily: its repeats would be equal, and it runs once")
            continue
        for number in range(2, config.repeats + 1):
            say(f"{name}, repeat {number} of {config.repeats}")
            own = planned.config.copy_and_resolve_references()
            with own.unlocked():
                own.seed = config.seed + number - 1
            folder = workdir / name / f"{comparison.REPEAT}{number}"
            if not _answer(plan(own, pool), folder, pool, until)["complete"]:
                return False
    return True


def _time_all(
    config: Config,
    plans: Mapping[str, Plan],
    workdir: pathlib.Path,
    pool: Pool,
    until: float | None,
) -> bool:
    """Asks the same sample of questions of every method one by one; whether all have ended."""
    for name, planned in plans.items():
        if not config.latency_questions:
            return True
        ids = alone.sample(planned.task.questions, config.latency_questions, config.seed)
        say(f"{name}, {len(ids)} questions alone")
        folder = workdir / name / comparison.ALONE
        if not alone.ask_alone(planned, ids, folder, pool, until):
            return False
    return True
