"""The evaluation of language models: a student and its base, and systems to compare with.

Every component's ``evaluate`` goes the same way: `models_of` opens the models, `ask_models` runs
the programs that ask them, the component scores the responses, and `report` writes the result.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cirag_jax.commands import backends, identity, task
from cirag_jax.commands.opening import check_prompts
from cirag_jax.errors import UserError
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.significance import differences as paired_differences
from cirag_jax.evaluation.significance import intervals
from cirag_jax.io import is_training_workdir, local_path, say, write_lines
from cirag_jax.llm.types import Usage
from cirag_jax.models.io.peft_format import CONFIG_FILE
from cirag_jax.reports.tables import write_table
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.run import Runner
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.runtime.store import Journal, ResponseCache
from cirag_jax.types import Config

STUDENT, BASE = "student", "base"


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model to evaluate.

    Attributes:
      block: its config, as of `configs.common.language_model`.
      described: what its checkpoint says of the conversations it was trained on.
      trained_on: ids of the questions (for an extractor: passages) it was trained on; None if
        unknown, since an adapter in PEFT's format does not say.
      schemas: whether it is asked for JSON of a schema.
    """

    block: Config
    described: Mapping[str, Any]
    trained_on: frozenset[str] | None = frozenset()
    schemas: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its texts, as JSON."""
        return identity.of_language_model(self.block, self.schemas)


class System(NamedTuple):
    """A system that was evaluated: a language model, or a baseline without one.

    Attributes:
      scores: by name; ``a/b`` is nested in the result.
      counts: what the result says of it in addition: tokens, failures.
      rows: its records, a line each.
    """

    scores: Mapping[str, Ratio]
    counts: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = ()


def models_of(config: Config, role: str) -> dict[str, Model]:
    """Returns the language models to compare.

    ``student`` is ``config.<role>`` with the adapter ``config.checkpoint``; ``base`` is the same
    model without one, if ``config.base.run`` or without a checkpoint. Where
    ``config.<role>.model`` is null, the checkpoint names the model.
    """
    from cirag_jax.models.io import workdir

    block, spec = config[role].copy_and_resolve_references(), config.checkpoint
    if block.adapter is not None:
        raise UserError(f"config.{role}.adapter is not used here; name it as config.checkpoint.")
    schemas = bool(config.get("constrained"))
    models: dict[str, Model] = {}
    if spec is not None:
        if not is_training_workdir(spec) and not (local_path(spec) / CONFIG_FILE).is_file():
            raise UserError(
                f"{spec} is neither a training workdir (it has no checkpoints/) nor an adapter as "
                f"PEFT writes it (it has no {CONFIG_FILE})."
            )
        meta = workdir.check_role(spec, role)
        if meta:
            check_prompts(spec, meta)
        if is_training_workdir(spec):
            block.model = block.model or meta["model"]
        student = block.copy_and_resolve_references()
        student.adapter = spec
        models[STUDENT] = Model(
            student, meta.get("prompt") or {}, workdir.trained_on(spec), schemas
        )
    if config.base.run or spec is None:
        models[BASE] = Model(block, {}, schemas=schemas)
    return models


def learnt(models: Mapping[str, Model]) -> frozenset[str] | None:
    """Returns the ids the student was trained on, see `Model`; none without a student."""
    return models[STUDENT].trained_on if STUDENT in models else frozenset()


def count_seen(trained_on: frozenset[str] | None, ids: Collection[str], subject: str) -> int | None:
    """Counts the ``ids`` that a checkpoint was trained on, and warns if there are any.

    Returns None, and says so, if the checkpoint does not tell.
    """
    if trained_on is None:
        say(f"the checkpoint does not say whether it was trained on some of these {subject}")
        return None
    seen = len(trained_on & set(ids))
    if seen:
        say(
            f"WARNING: the checkpoint was trained on {seen} of these {len(ids)} {subject}; its "
            "figures say nothing about others"
        )
    return seen


# -------------------------------------------------------------------------------------- the asking


def ask_models(
    config: Config,
    workdir: pathlib.Path,
    models: Mapping[str, Model],
    asked: tuple[str, int],
    programs: Callable[[str], tuple[Sequence[Job], Mapping[str, Any]]],
    unit: str,
) -> dict[str, tuple[dict[str, Record] | None, dict[str, Any]]]:
    """Runs the programs that ask each model; the same call on the same workdir resumes.

    Args:
      config: with ``in_flight``, ``seed``, ``stop_after_minutes``, and ``cache``, which keeps
        responses that several runs share.
      workdir: has each model's journal, NAME.sqlite.
      models: by name. One is opened only if its programs have not all ended; its budget also
        covers what its journal has used.
      asked: role, and most tokens of a response.
      programs: returns a model's programs, and what decides their results in addition to it.
      unit: on the progress bars.

    Returns:
      Of each model the record of every program by its id, None if the time or a budget ended before
      the last; and tokens and seconds of all runs, as results list them.
    """
    until = task.deadline(config)
    return {
        name: _ask(config, workdir / f"{name}.sqlite", model, asked, *programs(name), until, unit)
        for name, model in models.items()
    }


def _ask(
    config: Config,
    journal: pathlib.Path,
    model: Model,
    asked: tuple[str, int],
    jobs: Sequence[Job],
    bound: Mapping[str, Any],
    until: float | None,
    unit: str,
) -> tuple[dict[str, Record] | None, dict[str, Any]]:
    role, max_tokens = asked

    def open_handlers(stack: contextlib.ExitStack, book: Journal) -> dict[type | str, Handler]:
        return {role: stack.enter_context(open_model(config, model, {role: max_tokens}, book))}

    settings = {**model.identity, **bound}
    with Runner(
        journal, settings, open_handlers, in_flight=config.in_flight, until=until
    ) as runner:
        complete = runner.run(jobs, unit=unit, name=journal.stem)
        records = runner.records(jobs)
        usage = sum((record.usage for record in records.values()), start=Usage())
        costs = {**usage.tokens, "seconds": runner.seconds()}
        return records if complete else None, costs


@contextlib.contextmanager
def open_model(
    config: Config, model: Model, roles: dict[str, int], journal: Journal
) -> Iterator[GenerateHandler]:
    """Opens the handler of one model for ``roles``, each with its most tokens."""
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(ResponseCache(config.cache)) if config.cache else None
        spent = sum(journal.usage().values(), start=Usage())
        opened = backends.open_backend(model.block, spent=spent)
        backend = stack.enter_context(contextlib.closing(opened))
        yield GenerateHandler(
            backend, roles, seed=config.seed, cache=cache, identity=model.identity
        )


# -------------------------------------------------------------------------------------- the result


def report(
    config: Config,
    workdir: pathlib.Path,
    systems: Mapping[str, System],
    facts: Mapping[str, Any],
    table_of: Callable[[Mapping[str, Any]], str],
    file: str,
    differences: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the records of all systems to ``file`` and the table of the result to ``table.md``.

    Returns:
      The result: ``systems`` with their scores, 95 % intervals and counts; ``differences``, by
      default the `leads` of the student; and ``facts``.
    """
    scores = {name: system.scores for name, system in systems.items()}
    result = {
        "systems": {
            name: {
                **by_kind(intervals(system.scores, config.bootstrap_samples, config.seed)),
                **system.counts,
            }
            for name, system in systems.items()
        },
        "differences": leads(config, scores, [STUDENT]) if differences is None else differences,
        **facts,
    }
    write_lines(workdir / file, (row for system in systems.values() for row in system.rows))
    write_table(table_of(result), workdir)
    return result


def leads(
    config: Config, scores: Mapping[str, Mapping[str, Ratio]], leading: Sequence[str]
) -> dict[str, Any]:
    """Compares each of the ``leading`` systems with all that are not before it.

    Returns:
      ``FIRST-SECOND``: the first less the second with intervals, `by_kind`.
    """
    compared: dict[str, Any] = {}
    for place, first in enumerate(leading):
        for second, ratios in scores.items():
            if first in scores and second not in leading[: place + 1]:
                compared[f"{first}-{second}"] = by_kind(
                    paired_differences(scores[first], ratios, config.bootstrap_samples, config.seed)
                )
    return compared


def by_kind(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``{"a/b": x, "c": y}`` as ``{"a": {"b": x}, "c": y}``."""
    nested: dict[str, Any] = {}
    for name, value in scores.items():
        kind, _, rest = name.rpartition("/")
        (nested.setdefault(kind, {}) if kind else nested)[rest] = value
    return nested
