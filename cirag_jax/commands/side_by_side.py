"""A trained adapter beside its untrained base: what the commands that compare them share."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from cirag_jax.commands import backends, task
from cirag_jax.commands.opening import check_prompts
from cirag_jax.errors import UserError
from cirag_jax.evaluation.overlap import Ratio
from cirag_jax.evaluation.significance import differences, intervals
from cirag_jax.io import is_training_workdir, local_path, say
from cirag_jax.llm.types import Usage
from cirag_jax.models.io.peft_format import CONFIG_FILE
from cirag_jax.runtime.cache import ResponseCache
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.journal import Journal
from cirag_jax.runtime.records import Record
from cirag_jax.runtime.scheduler import Job, Scheduler, progress_bar
from cirag_jax.types import Config

STUDENT, BASE = "student", "base"


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model to be scored; ``block`` is of `configs.common.language_model`, ``schemas``
    says whether it is asked for JSON of a schema.

    ``described`` is what its checkpoint says of the conversations it was trained on, ``trained_on``
    the ids of the questions (an extractor: passages); None: not known, since an adapter in PEFT's
    format does not say.
    """

    block: Config
    described: Mapping[str, Any]
    trained_on: frozenset[str] | None = frozenset()
    schemas: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its texts, as JSON."""
        return backends.fingerprint(self.block, self.schemas)


def models_of(config: Config, role: str) -> dict[str, Model]:
    """The language models to compare.

    ``student`` is ``config.<role>`` with the adapter ``config.checkpoint``; ``base`` is the same
    model without one: where ``config.base.run`` asks for it, or all there is without a checkpoint.
    Where ``config.<role>.model`` is null, a checkpoint says what the model is.
    """
    from cirag_jax.models.io import workdir

    block, spec = config[role].copy_and_resolve_references(), config.checkpoint
    if block.adapter is not None:
        raise UserError(f"config.{role}.adapter is not used here; name it as config.checkpoint.")
    found, described, seen = {}, {}, None
    schemas = bool(config.get("constrained"))
    if spec is not None:
        if not is_training_workdir(spec) and not (local_path(spec) / CONFIG_FILE).is_file():
            raise UserError(
                f"{spec} is neither a training workdir (it has no checkpoints/) nor an adapter as "
                f"PEFT writes it (it has no {CONFIG_FILE})."
            )
        meta = workdir.check_role(spec, role)
        if meta:
            check_prompts(spec, meta)
        described = meta.get("prompt") or {}
        seen = workdir.trained_on(spec)
        if is_training_workdir(spec):
            block.model = block.model or meta["model"]
        student = block.copy_and_resolve_references()
        student.adapter = spec
        found[STUDENT] = Model(student, described, seen, schemas)
    if config.base.run or spec is None:
        found[BASE] = Model(block, {}, schemas=schemas)
    return found


def ask(
    config: Config,
    journal: pathlib.Path,
    model: Model,
    settings: Mapping[str, Any],
    asked: tuple[str, int],
    jobs: Sequence[Job],
    until: float | None,
    unit: str,
) -> tuple[dict[str, Record] | None, dict[str, Any]]:
    """Runs programs about one model, which is opened only if one of them is left.

    Args:
      config: with ``in_flight``, ``seed``, and ``cache``, which keeps responses that several runs
        share.
      journal: the model's, named as it; what it has is not asked again.
      model: whose budget also covers what ``journal`` has used.
      settings: what decides the results beside the model.
      asked: role, and most tokens of a response.
      jobs: the programs.
      until: as ``deadline`` of `Scheduler.run`.
      unit: on the progress bar.

    Returns:
      The record of every program by its id, None where the time or a budget ended before the last;
      and what they took: tokens, and the seconds of all runs, as results have it.
    """
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        book = stack.enter_context(Journal(journal, {**model.identity, **settings}))
        known = book.outcomes()
        handler: Any = None
        if any(job.id not in known for job in jobs):
            handler = stack.enter_context(open_model(config, model, dict([asked]), book))
        show = stack.enter_context(progress_bar(len(jobs), unit, journal.stem))
        scheduler = Scheduler(
            {asked[0]: handler}, book, in_flight=config.in_flight, on_progress=show
        )
        records = scheduler.records_of(jobs, deadline=until)
        usage = sum((r.usage for r in book.records(job.id for job in jobs)), start=Usage())
        seconds = book.add_seconds(time.monotonic() - start)
        return records, {**usage.tokens, "seconds": seconds}


def ask_all(
    config: Config,
    workdir: pathlib.Path,
    models: Mapping[str, Model],
    settings: Mapping[str, Any],
    asked: tuple[str, int],
    jobs: Sequence[Job],
    unit: str,
) -> dict[str, tuple[dict[str, Record], dict[str, Any]]]:
    """What `ask` gives of every model that came to the end; their journals are in ``workdir``."""
    until = task.deadline(config)
    told = {
        name: ask(config, workdir / f"{name}.sqlite", model, settings, asked, jobs, until, unit)
        for name, model in models.items()
    }
    return {
        name: (records, usage) for name, (records, usage) in told.items() if records is not None
    }


@contextlib.contextmanager
def open_model(
    config: Config, model: Model, roles: dict[str, int], journal: Journal
) -> Iterator[GenerateHandler]:
    """The handler of one model for ``roles``, each with its most tokens."""
    with contextlib.ExitStack() as stack:
        cache = None
        if config.cache:
            cache = stack.enter_context(contextlib.closing(ResponseCache(config.cache)))
        spent = sum(journal.usage().values(), start=Usage())
        opened = backends.open_backend(model.block, spent=spent)
        backend = stack.enter_context(contextlib.closing(opened))
        yield GenerateHandler(
            backend, roles, seed=config.seed, cache=cache, identity=model.identity
        )


def student_learnt(models: Mapping[str, Model]) -> frozenset[str] | None:
    """What the student was trained on, see `Model`; nothing where there is none."""
    return models[STUDENT].trained_on if STUDENT in models else frozenset()


def count_seen(trained_on: frozenset[str] | None, names: Collection[str], what: str) -> int | None:
    """How many of ``names`` a checkpoint was trained on; a warning says so if there are any.

    None, which is said, too, where the checkpoint does not tell.
    """
    if trained_on is None:
        say(f"the checkpoint does not say whether it was trained on some of these {what}")
        return None
    seen = len(trained_on & set(names))
    if seen:
        say(
            f"WARNING: the checkpoint was trained on {seen} of these {len(names)} {what}; its "
            "figures say nothing about others"
        )
    return seen


def bounded(config: Config, ratios: Mapping[str, Ratio]) -> dict[str, Any]:
    """A system's scores with their intervals, `by_kind`."""
    return by_kind(intervals(ratios, config.bootstrap_samples, config.seed))


def leads(config: Config, scores: Mapping[str, Mapping[str, Ratio]]) -> dict[str, Any]:
    """``student-OTHER``: the student less every other system, where it was scored at all."""
    if STUDENT not in scores:
        return {}
    return {
        f"{STUDENT}-{name}": by_kind(
            differences(scores[STUDENT], ratios, config.bootstrap_samples, config.seed)
        )
        for name, ratios in scores.items()
        if name != STUDENT
    }


def by_kind(scores: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a/b": x, "c": y}`` as ``{"a": {"b": x}, "c": y}``."""
    found: dict[str, Any] = {}
    for name, value in scores.items():
        kind, _, rest = name.rpartition("/")
        (found.setdefault(kind, {}) if kind else found)[rest] = value
    return found
