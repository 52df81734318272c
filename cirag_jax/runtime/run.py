"""The lifecycle of a run, which executes programs and records them in a journal.

A command provides its programs (`Job`), a function that opens handlers, and the settings that
determine its results. This module does the rest. It binds the journal to the settings, skips
finished programs, opens handlers when they are first needed, stops at the deadline, and shows a
progress bar. It also saves the wall time regularly, so a killed run loses little of it.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tqdm

from cirag_jax import processes
from cirag_jax.io import Closing
from cirag_jax.runtime import codec
from cirag_jax.runtime.handlers import GenerateHandler
from cirag_jax.runtime.records import JournalReader, Record
from cirag_jax.runtime.scheduler import Handler, Job, Progress, Scheduler
from cirag_jax.runtime.store import JOURNAL, Journal, journal_path, merge_journals

_SAVE_SECONDS = 5.0  # interval for saving the wall time

# Opens handlers, which the stack closes. Usage recorded in the journal counts against budgets.
OpenHandlers = Callable[[contextlib.ExitStack, Journal], Mapping[type | str, Handler]]
# Shows a `Progress` and the number of tokens in incomplete responses.
Show = Callable[[Progress, int], object]


class Runner(Closing):
    """Runs programs and records them in a journal; a context manager.

    Attributes:
      journal: the journal of the run.
      progress: progress of the latest `run`.
      load_seconds: wall time of opening the handlers; 0 if they were not opened.
      run_seconds: wall time of running programs.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any],
        open_handlers: OpenHandlers,
        *,
        in_flight: int = 64,
        until: float | None = None,
        started: float | None = None,
        encode: Callable[[Any], Any] = codec.encode,
        replace: bool = False,
        copy_of: Path | None = None,
    ):
        """Opens the journal, but not the handlers.

        Args:
          path: path of the journal, or `sqlite.MEMORY` for a temporary one.
          settings: settings that determine the results, see `Journal`.
          open_handlers: called once, when the first program must run.
          in_flight: maximum number of programs that run concurrently.
          until: `time.monotonic()` after which no batch starts; None sets no limit.
          started: `time.monotonic()` from which wall time is counted; None is now.
          encode: converts a program's result to JSON.
          replace: see `Journal`.
          copy_of: see `Journal`.
        """
        self._open_handlers, self._in_flight, self._until = open_handlers, in_flight, until
        self._encode = encode
        self._handlers: Mapping[type | str, Handler] | None = None
        self._saved_until = time.monotonic() if started is None else started
        self._stack = contextlib.ExitStack()
        self.journal = Journal(path, settings, replace=replace, copy_of=copy_of)
        self._stack.enter_context(self.journal)
        self.progress, self.load_seconds, self.run_seconds = Progress(), 0.0, 0.0

    def close(self) -> None:
        """Closes the handlers and the journal."""
        self._stack.close()

    def open(self) -> Mapping[type | str, Handler]:
        """Returns the handlers; the first call opens them."""
        if self._handlers is None:
            start = time.monotonic()
            self._handlers = self._open_handlers(self._stack, self.journal)
            self.load_seconds = time.monotonic() - start
            self.journal.add_seconds(self.load_seconds, loading=True)
        return self._handlers

    def run(
        self,
        jobs: Iterable[Job],
        *,
        asks: bool = True,
        unit: str | None = None,
        name: str | None = None,
        show: Show | None = None,
    ) -> bool:
        """Runs the ``jobs`` that have no result yet.

        Args:
          jobs: programs with distinct ids, in the order of their start.
          asks: whether the programs make requests; if not, handlers are not opened.
          unit: name of a program on the progress bar, such as ``question``; None shows no bar.
          name: name of the progress bar.
          show: called after every response and program, if there is no progress bar.

        Returns:
          Whether all have ended; False if the deadline passed or a budget is exhausted.
        """
        jobs = list(jobs)
        self.progress = Progress(total=len(jobs), done=len(jobs))
        if not self.unfinished(jobs):
            return True
        handlers = self.open() if asks else {}
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            if unit is not None:
                show = stack.enter_context(progress_bar(len(jobs), unit, name))
            scheduler = self._scheduler(handlers, show)
            complete = scheduler.run(jobs, deadline=self._until)
        self.run_seconds += time.monotonic() - start
        self.progress = scheduler.progress
        self._save_seconds()
        return complete

    def _scheduler(self, handlers: Mapping[type | str, Handler], show: Show | None) -> Scheduler:
        def on_progress(progress: Progress, new_tokens: int = 0) -> None:
            self._save_seconds(_SAVE_SECONDS)
            if show is not None:
                show(progress, new_tokens)

        scheduler = Scheduler(
            handlers,
            self.journal,
            in_flight=self._in_flight,
            encode=self._encode,
            on_progress=on_progress,
        )
        if show is not None:  # otherwise another run may already show this handler's tokens
            for handler in set(handlers.values()):
                if isinstance(handler, GenerateHandler):
                    handler.on_tokens = lambda tokens: on_progress(scheduler.progress, tokens)
        return scheduler

    def unfinished(self, jobs: Iterable[Job]) -> list[Job]:
        """Returns the ``jobs`` that have no result yet."""
        jobs = list(jobs)
        outcomes = self.journal.outcomes(job.id for job in jobs)
        return [job for job in jobs if job.id not in outcomes]

    def records(self, jobs: Iterable[Job]) -> dict[str, Record]:
        """Returns the records of the ``jobs`` that have started, by id."""
        return {record.id: record for record in self.journal.records(job.id for job in jobs)}

    def seconds(self) -> float:
        """Returns the total wall time of all runs that used this journal, including this one."""
        self._save_seconds()
        return self.journal.seconds

    def _save_seconds(self, every: float = 0.0) -> None:
        """Adds the time since the last save to the journal, if it is at least ``every`` seconds."""
        now = time.monotonic()
        if now - self._saved_until >= every:
            self.journal.add_seconds(now - self._saved_until)
            self._saved_until = now


class RunResult(NamedTuple):
    """The state of a workdir after `run_jobs`.

    Attributes:
      records: records of the jobs that have started, by id.
      complete: whether all jobs have ended.
      load_seconds: wall time of this process before its first request.
      seconds: wall time of all runs in this workdir.
      num_ended: number of jobs that have ended in all runs in this workdir.
    """

    records: Mapping[str, Record]
    complete: bool
    load_seconds: float
    seconds: float
    num_ended: int


def run_jobs(
    jobs: Sequence[Job],
    open_handlers: OpenHandlers,
    workdir: Path,
    settings: Mapping[str, Any],
    in_flight: int,
    started: float,
    until: float | None,
    replace: bool = False,
) -> RunResult | None:
    """Runs unfinished ``jobs``, and records them in ``workdir/journal.sqlite``.

    If there are several processes, the jobs are divided among them by id, and each process has its
    own journal. After all processes have finished, the first one merges the journals; the others
    return None. `Runner` explains the arguments.
    """
    index, count = jax.process_index(), jax.process_count()
    if count > 1:
        questions = codec.dump([[job.id, job.input] for job in jobs])
        processes.check_equal({**settings, "questions": codec.digest(questions)})

    def work() -> tuple[bool, float]:
        path = journal_path(workdir, index, count)
        options: dict[str, Any] = {"in_flight": in_flight, "until": until, "started": started}
        options["replace"] = replace
        with Runner(path, settings, open_handlers, **options) as runner:
            complete = runner.run(_share(jobs, index, count), unit="question")
            runner.seconds()
            return complete, runner.load_seconds

    complete, load_seconds = processes.together(work)
    if index:
        return None
    if count > 1:
        parts = [journal_path(workdir, number, count) for number in range(count)]
        merge_journals(parts, workdir / JOURNAL)
    with JournalReader(workdir / JOURNAL) as journal:
        records = {record.id: record for record in journal.records(job.id for job in jobs)}
        seconds, (_, num_ended) = journal.seconds, journal.counts()
    complete = complete and all(job.id in records and records[job.id].has_ended for job in jobs)
    return RunResult(records, complete, load_seconds, seconds, num_ended)


def _share(jobs: Sequence[Job], index: int, count: int) -> list[Job]:
    """Returns the jobs of process ``index``; the assignment of a job only depends on its id."""
    return [
        dataclasses.replace(job, place=place)
        for place, job in enumerate(jobs)
        if int(codec.digest(job.id)[:8], 16) % count == index
    ]


@contextlib.contextmanager
def progress_bar(total: int, unit: str, name: str | None = None) -> Iterator[Show]:
    """Shows the numbers of programs, calls and tokens on standard error."""
    with tqdm.tqdm(
        total=total,
        desc=name,
        unit=unit,
        file=sys.stderr,
        mininterval=0.5 if sys.stderr.isatty() else 30,
        smoothing=0,
        miniters=0,  # new tokens also update the bar
    ) as bar:
        start = time.monotonic()

        def show(progress: Progress, new_tokens: int = 0) -> None:
            tokens = progress.generated_tokens + new_tokens
            rate = tokens / max(time.monotonic() - start, 1e-9)
            parts = [f"{progress.generated} generations", f"{tokens:,} tokens"]
            parts.append(f"{rate:.1f} tokens/s")
            if progress.replayed:
                parts.append(f"{progress.replayed} replayed")
            if progress.failed:
                parts.append(f"{progress.failed} failed")
            bar.set_postfix_str(", ".join(parts), refresh=False)
            bar.update(progress.done - bar.n)

        yield show
