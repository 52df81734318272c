"""Seconds a question alone: the latency of a method, where `answer` shows its throughput."""

import contextlib
import functools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from cirag_jax.commands import opening
from cirag_jax.commands.answer import Plan
from cirag_jax.commands.pool import Pool
from cirag_jax.io import say
from cirag_jax.runtime.run import Runner, progress_bar
from cirag_jax.runtime.scheduler import Handler, Job
from cirag_jax.runtime.store import JOURNAL, Journal
from cirag_jax.types import Question

_TRIES = 4  # Of one question, until nothing is compiled for it any more.


def sample(questions: Sequence[Question], count: int, seed: int) -> list[str]:
    """Ids of ``count`` questions drawn by ``seed``, in their order; all where there are fewer."""
    drawn = np.random.default_rng(seed).permutation(len(questions))[:count]
    return [questions[index].id for index in sorted(drawn)]


def ask_alone(
    plan: Plan, ids: Sequence[str], folder: pathlib.Path, pool: Pool, until: float | None
) -> bool:
    """Asks questions one after the other, each with nothing beside it and nothing remembered.

    No vector, prefix or response of earlier questions is reused, and what had to be compiled is
    asked again, so that the seconds in ``folder/journal.sqlite`` are those of a program at work.

    Args:
      plan: the run.
      ids: of the questions.
      folder: made where absent.
      pool: what is open already.
      until: as in `answer.carry_out`.

    Returns:
      Whether all have ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = plan.config.copy_and_resolve_references()
    with config.unlocked():
        config.in_flight, config.cache = 1, None
    jobs = {job.id: job for job in plan.jobs}

    def open_all(stack: contextlib.ExitStack, book: Journal) -> Mapping[type | str, Handler]:
        return opening.open_handlers(config, plan.task, book, stack, rows=1, pool=pool)

    settings = {**plan.settings, "alone": True}
    with Runner(folder / JOURNAL, settings, open_all, in_flight=1, until=until) as runner:
        # Half of a question says nothing: it is asked from its beginning.
        book = runner.journal
        book.forget([record.id for record in book.records() if record.outcome is None])
        left = runner.unfinished([jobs[name] for name in ids])
        if not left:
            return True
        runner.open()
        with progress_bar(len(ids), "question") as show:
            for number, job in enumerate(left, start=len(book.outcomes()) + 1):
                if not _ask(job, runner, pool):
                    return False
                runner.progress.done = number
                show(runner.progress, 0)
    return True


def _ask(job: Job, runner: Runner, pool: Pool) -> bool:
    for left in reversed(range(_TRIES)):
        pool.forget()
        before = _compilations()[0]
        if not runner.run([job]):
            return False
        if _compilations()[0] == before:
            return True
        if left:
            runner.journal.forget([job.id])
    say(f"WARNING: something was compiled each time that {job.id} was asked; its time has that")
    return True


@functools.cache
def _compilations() -> list[int]:
    """How often JAX has traced or compiled something since this was first called."""
    count = [0]

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs  # JAX names them
        count[0] += event.startswith("/jax/core/compile")

    jax.monitoring.register_event_duration_secs_listener(listen)
    return count
