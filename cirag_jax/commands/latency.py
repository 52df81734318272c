"""Latency of a method: seconds per question when it answers one question at a time."""

import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cirag_jax.commands import opening
from cirag_jax.commands.answer import PlannedRun
from cirag_jax.commands.online import OnlineExtractHandler
from cirag_jax.commands.pool import Pool
from cirag_jax.io import say
from cirag_jax.runtime.requests import Extract
from cirag_jax.runtime.run import Runner, progress_bar
from cirag_jax.runtime.scheduler import Job
from cirag_jax.runtime.store import JOURNAL
from cirag_jax.types import Question

_ATTEMPTS = 4  # maximum number of runs per question, until one compiles nothing


def sample(questions: Sequence[Question], count: int, seed: int) -> list[str]:
    """Returns the ids of at most ``count`` random questions, in the order of ``questions``."""
    drawn = np.random.default_rng(seed).permutation(len(questions))[:count]
    return [questions[index].id for index in sorted(drawn)]


def measure(
    planned: PlannedRun, ids: Sequence[str], folder: pathlib.Path, pool: Pool, until: float | None
) -> bool:
    """Answers the questions ``ids`` one at a time; returns whether all have ended.

    Vectors, prompt prefixes, responses and extracted triples are not reused between questions. A
    question is repeated if JAX compiled something for it, so the seconds in
    ``folder/journal.sqlite`` exclude compilation. For ``pool`` and ``until``, see `answer.execute`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = planned.config.copy_and_resolve_references()
    with config.unlocked():
        config.in_flight, config.cache = 1, None
    jobs = {job.id: job for job in planned.jobs}
    open_all = functools.partial(opening.open_handlers, config, planned.task, rows=1, pool=pool)
    settings = {**planned.settings, "alone": True}
    with Runner(folder / JOURNAL, settings, open_all, in_flight=1, until=until) as runner:
        # The seconds of an interrupted question are incomplete, so it restarts.
        journal = runner.journal
        journal.forget([record.id for record in journal.records() if not record.has_succeeded])
        remaining = runner.unfinished([jobs[name] for name in ids])
        if not remaining:
            return True
        extractor = runner.open().get(Extract)

        def forget() -> None:
            pool.forget()
            if isinstance(extractor, OnlineExtractHandler):
                extractor.forget()

        with progress_bar(len(ids), "question") as show:
            for number, job in enumerate(remaining, start=len(journal.outcomes()) + 1):
                if not _run_until_compiled(job, runner, forget):
                    return False
                runner.progress.done = number
                show(runner.progress, 0)
    return True


def _run_until_compiled(job: Job, runner: Runner, forget: Callable[[], None]) -> bool:
    for attempt in range(_ATTEMPTS):
        if attempt:
            runner.journal.forget([job.id])
        forget()
        before = _compilations()[0]
        if not runner.run([job]):
            return False
        if _compilations()[0] == before:
            return True
    say(f"WARNING: JAX compiled in every attempt at {job.id}; its latency includes compilation")
    return True


@functools.cache
def _compilations() -> list[int]:
    """Returns a list whose one item counts JAX's traces and compilations from now on."""
    count = [0]

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs  # JAX passes them by name
        count[0] += event.startswith("/jax/core/compile")

    jax.monitoring.register_event_duration_secs_listener(listen)
    return count
