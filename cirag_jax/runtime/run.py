"""The lifecycle of a run: programs over a journal, and what answers their requests.

A command states its programs (`Job`), how its handlers are opened, and which settings decide its
results. The rest is the same for all commands and happens here: the journal bound to its settings,
programs that have ended skipped, handlers opened once something is left to run, the deadline, the
progress bar, and notes of the time that a kill does not lose.
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

_NOTE_SECONDS = 5.0  # between two notes of the time

# Opens handlers; the stack closes them, and what the journal has used counts against budgets.
OpenHandlers = Callable[[contextlib.ExitStack, Journal], Mapping[type | str, Handler]]
# Shows a `Progress`, and the tokens of responses that it does not count yet.
Show = Callable[[Progress, int], object]


class Runner(Closing):
    """Runs programs over one journal, which it opens; a context manager.

    Attributes:
      book: the journal.
      progress: of the latest `run`.
      load_seconds: wall time in which the handlers were opened, 0 if they were not.
      run_seconds: wall time in which programs ran.
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
        """Opens the journal, and nothing else yet.

        Args:
          path: of the journal; `sqlite.MEMORY`: of one that is not kept.
          settings: what decides the results, see `Journal`.
          open_handlers: called once, when a program is left to run.
          in_flight: programs that run at once.
          until: `time.monotonic()` after which no batch is begun; None: never.
          started: `time.monotonic()` from which on wall time counts; None: now.
          encode: makes JSON of a program's result.
          replace: as in `Journal`.
          copy_of: as in `Journal`.
        """
        self._open_handlers, self._in_flight, self._until = open_handlers, in_flight, until
        self._encode = encode
        self._handlers: Mapping[type | str, Handler] | None = None
        self._noted = time.monotonic() if started is None else started
        self._stack = contextlib.ExitStack()
        self.book = Journal(path, settings, replace=replace, copy_of=copy_of)
        self._stack.enter_context(self.book)
        self.progress, self.load_seconds, self.run_seconds = Progress(), 0.0, 0.0

    def close(self) -> None:
        """Closes the handlers and the journal."""
        self._stack.close()

    def open(self) -> Mapping[type | str, Handler]:
        """The handlers, opened at the first call."""
        if self._handlers is None:
            start = time.monotonic()
            self._handlers = self._open_handlers(self._stack, self.book)
            self.load_seconds = time.monotonic() - start
            self.book.add_seconds(self.load_seconds, loading=True)
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
        """Runs to their ends those of ``jobs`` that have no result yet.

        Args:
          jobs: programs with distinct ids, begun in this order.
          asks: whether they make requests; if not, no handler is opened.
          unit: of the programs on a progress bar; None: there is no bar.
          name: of the progress bar.
          show: called after every response and every ended program, where there is no bar.

        Returns:
          Whether all have ended; False after the deadline or once a budget is exhausted.
        """
        jobs = list(jobs)
        self.progress = Progress(total=len(jobs), done=len(jobs))
        if not self.left(jobs):
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
        self._note()
        return complete

    def _scheduler(self, handlers: Mapping[type | str, Handler], show: Show | None) -> Scheduler:
        def on_progress(progress: Progress, new_tokens: int = 0) -> None:
            self._note(_NOTE_SECONDS)
            if show is not None:
                show(progress, new_tokens)

        scheduler = Scheduler(
            handlers,
            self.book,
            in_flight=self._in_flight,
            encode=self._encode,
            on_progress=on_progress,
        )
        if show is not None:  # else another run may show the tokens of the same handler
            for handler in set(handlers.values()):
                if isinstance(handler, GenerateHandler):
                    handler.on_tokens = lambda tokens: on_progress(scheduler.progress, tokens)
        return scheduler

    def left(self, jobs: Iterable[Job]) -> list[Job]:
        """Those of ``jobs`` that have no result yet."""
        jobs = list(jobs)
        known = self.book.outcomes(job.id for job in jobs)
        return [job for job in jobs if job.id not in known]

    def records(self, jobs: Iterable[Job]) -> dict[str, Record]:
        """The records of those of ``jobs`` that were begun, by id."""
        return {record.id: record for record in self.book.records(job.id for job in jobs)}

    def seconds(self) -> float:
        """Wall time of all runs on this journal until now."""
        self._note()
        return self.book.seconds

    def _note(self, every: float = 0.0) -> None:
        """Adds to the journal's wall time what has passed, if that is ``every`` seconds or more."""
        now = time.monotonic()
        if now - self._noted >= every:
            self.book.add_seconds(now - self._noted)
            self._noted = now


class RunResult(NamedTuple):
    """What a workdir holds after `run_jobs`.

    Attributes:
      records: of the jobs that were begun, by id.
      complete: whether all jobs have ended.
      load_seconds: until the first request of this process.
      seconds: wall time of all runs on this workdir.
    """

    records: Mapping[str, Record]
    complete: bool
    load_seconds: float
    seconds: float


def run_jobs(
    jobs: Sequence[Job],
    open_handlers: OpenHandlers,
    workdir: Path,
    settings: Mapping[str, Any],
    in_flight: int,
    started: float,
    until: float | None,
) -> RunResult | None:
    """Runs what is left of ``jobs`` about questions, recorded in ``workdir/journal.sqlite``.

    Several processes deal the jobs out among themselves by their ids, each with a journal of its
    own, which the first merges once all have ended. Arguments are those of `Runner`.

    Returns:
      None in all processes but the first.
    """
    index, count = jax.process_index(), jax.process_count()

    def work() -> tuple[bool, float]:
        path = journal_path(workdir, index, count)
        options: dict[str, Any] = {"in_flight": in_flight, "until": until, "started": started}
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
    with JournalReader(workdir / JOURNAL) as book:
        records = {record.id: record for record in book.records(job.id for job in jobs)}
        seconds = book.seconds
    complete = complete and all(job.id in records and records[job.id].has_ended for job in jobs)
    return RunResult(records, complete, load_seconds, seconds)


def _share(jobs: Sequence[Job], index: int, count: int) -> list[Job]:
    """The jobs of one of the processes: whatever else is asked, a question stays with its own."""
    return [
        dataclasses.replace(job, place=place)
        for place, job in enumerate(jobs)
        if int(codec.digest(job.id)[:8], 16) % count == index
    ]


@contextlib.contextmanager
def progress_bar(total: int, unit: str, name: str | None = None) -> Iterator[Show]:
    """Programs done, calls, tokens and time left, on standard error."""
    with tqdm.tqdm(
        total=total,
        desc=name,
        unit=unit,
        file=sys.stderr,
        mininterval=0.5 if sys.stderr.isatty() else 30,
        smoothing=0,
        miniters=0,  # tokens count as progress, too
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
