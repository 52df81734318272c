"""The scheduler: many programs advance together, their requests run as batches.

Programs are started until ``in_flight`` of them run. What they wait for is grouped by the handler
that answers it; cheap groups (retrieval, ranking) go first, so that by the time a language model is
asked, everyone who can be waiting for it is. Every response is journalled, then sent on: at once
where the handler takes more calls while it works, else when it has answered its whole group.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from cirag_jax.errors import UserError
from cirag_jax.io import one_line, visible
from cirag_jax.runtime.records import Key
from cirag_jax.runtime.requests import (
    Generate,
    Program,
    Request,
    RequestError,
    Response,
    addressee,
)
from cirag_jax.runtime.store import Journal

log = logging.getLogger(__name__)

# How a handler gives back a response: the index of its call, and the response.
Done = Callable[[int, Response | RequestError], None]


@dataclasses.dataclass(frozen=True)
class Call:
    """A request with the place it has in its program."""

    key: Key
    request: Any


# What has come to wait for a handler since it was asked; indices go on from those before.
More = Callable[[], Sequence[Call]]


class Handler(Protocol):
    """Answers requests of one kind, many at a time.

    Attributes:
      is_slow: whether it pays to let others go first and ask it once, with more.
      is_exhausted: whether a budget has ended; what it refuses then is not the program's failure.

    A slow one may have ``takes_more`` (absent: False): it is then called with a third argument, a
    `More` that it calls whenever it has room for further calls, and which it answers as well.
    """

    is_slow: bool

    @property
    def is_exhausted(self) -> bool:
        """See the class."""
        ...

    def __call__(self, calls: Sequence[Call], done: Done) -> None:
        """Calls ``done(index, response)`` once for every call, as soon as it is known."""
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to run.

    Attributes:
      id: of the program.
      input: what it is, as the journal says it; JSON.
      start: begins it.
      place: among the programs of the journal; None: its place among the jobs that are run.
    """

    id: str
    input: Any
    start: Callable[[], Program[Any]]
    place: int | None = None


@dataclasses.dataclass
class Progress:
    """Where a run stands; the same object is updated and shown.

    Of ``total`` programs those ``done`` ended, ``failed`` ones with an error. ``replayed``
    responses were taken from the journal, ``calls`` were answered by handlers; ``generated`` of
    these are language models', and have the tokens.
    """

    total: int = 0
    done: int = 0
    failed: int = 0
    replayed: int = 0
    calls: int = 0
    generated: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclasses.dataclass
class _Running:
    job: Job
    program: Program[Any]
    started: float
    ordinal: int = -1
    is_list: bool = False
    requests: tuple[Request, ...] = ()
    responses: dict[int, Response | RequestError] = dataclasses.field(default_factory=dict)


class Scheduler:
    """Runs programs over handlers (by `addressee`; one may serve several), recording in a journal.

    At most ``in_flight`` programs run at once; ``encode`` makes JSON of a program's result;
    ``on_progress`` is called with the `Progress` after every response and every ended program.
    """

    def __init__(
        self,
        handlers: Mapping[type | str, Handler],
        journal: Journal,
        *,
        in_flight: int = 64,
        encode: Callable[[Any], Any] = lambda result: result,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ):
        if in_flight < 1:
            raise UserError("in_flight must be at least 1.")
        self._handlers = handlers
        self._journal = journal
        self._in_flight = in_flight
        self._encode = encode
        self._on_progress = on_progress
        self._running: dict[str, _Running] = {}
        self._waiting: dict[int, list[Call]] = {}
        self.progress = Progress()

    def run(self, jobs: Iterable[Job], *, deadline: float | None = None) -> bool:
        """Runs all jobs to their ends; those that have a result already are not begun.

        Jobs have distinct ids and are begun in this order. After ``deadline`` (of `time.monotonic`)
        no further batch is begun. Returns whether all have ended; False after the deadline or when
        a budget is exhausted.
        """
        jobs = list(jobs)
        known = self._journal.outcomes(job.id for job in jobs)
        todo = [(place, job) for place, job in enumerate(jobs) if job.id not in known]
        self.progress = Progress(total=len(jobs), done=len(jobs) - len(todo))
        self._todo, self._deadline = collections.deque(todo), deadline
        self._running, self._waiting = {}, {}
        try:
            return self._run()
        finally:
            for running in self._running.values():
                running.program.close()

    def _run(self) -> bool:
        while self._todo or self._running:
            if self._is_late():
                return False
            self._begin_programs()
            handler = self._next_handler()
            if handler is None:
                continue
            calls = self._answer(handler)
            if handler.is_exhausted and any(c.key.program in self._running for c in calls):
                return False
        return True

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _begin_programs(self) -> None:
        while self._todo and len(self._running) < self._in_flight:
            self._begin(*self._todo.popleft())

    def _next_handler(self) -> Handler | None:
        """That of the largest group, a slow one only when nothing else waits; None: none does."""
        handlers = {id(handler): handler for handler in self._handlers.values()}

        def rank(key: int) -> tuple[bool, int]:
            return (not handlers[key].is_slow, len(self._waiting[key]))

        return handlers[max(self._waiting, key=rank)] if self._waiting else None

    def _answer(self, handler: Handler) -> list[Call]:
        """Has a handler answer what waits for it, and what comes meanwhile; returns those calls."""
        calls = self._waiting.pop(id(handler))
        left = set(range(len(calls)))
        answered: set[str] = set()

        def done(index: int, response: Response | RequestError) -> None:
            left.remove(index)
            if isinstance(response, RequestError) and handler.is_exhausted:
                return  # not asked: the budget ended before; a later run asks again
            call = calls[index]
            self._journal.record(call.key, call.request, response)
            self._count(call, response)
            running = self._running[call.key.program]
            running.responses[call.key.part] = response
            answered.add(call.key.program)
            self._on_progress(self.progress)

        def more() -> list[Call]:
            if handler.is_exhausted or self._is_late():
                return []
            self._go_on(answered)
            self._answer_quick()
            new = self._waiting.pop(id(handler), [])
            left.update(range(len(calls), len(calls) + len(new)))
            calls.extend(new)
            return new

        ask: Any = handler
        if getattr(handler, "takes_more", False):
            ask(calls[:], done, more)
        else:
            ask(calls, done)
        if left:
            raise RuntimeError(f"{handler!r} left {len(left)} of {len(calls)} calls unanswered")
        # Of other handlers, programs go on only now: what they ask next then waits together.
        self._go_on(answered)
        return calls

    def _answer_quick(self) -> None:
        """Begins programs and has their requests answered until all wait for a slow handler."""
        self._begin_programs()
        while (handler := self._next_handler()) is not None and not handler.is_slow:
            self._answer(handler)
            self._begin_programs()

    def _count(self, call: Call, response: Response | RequestError) -> None:
        self.progress.calls += 1
        usage = getattr(response, "usage", None)
        if isinstance(call.request, Generate):
            self.progress.generated += 1
        if usage is not None:
            self.progress.prompt_tokens += usage.prompt_tokens
            self.progress.generated_tokens += usage.generated_tokens

    # ---------------------------------------------------------------------------- one program

    def _begin(self, place: int, job: Job) -> None:
        if job.id in self._running:
            raise ValueError(f"two jobs have the id {job.id!r}")
        place = place if job.place is None else job.place
        self._journal.open_program(job.id, place, job.input)
        running = _Running(job, job.start(), time.monotonic())
        self._running[job.id] = running
        self._advance(running, None)

    def _go_on(self, answered: set[str]) -> None:
        """Sends programs their responses where they have all of them; empties ``answered``."""
        for running in [r for r in self._running.values() if r.job.id in answered]:
            if len(running.responses) == len(running.requests):
                responses = [running.responses[part] for part in range(len(running.requests))]
                self._advance(running, responses)
        answered.clear()

    def _advance(self, running: _Running, responses: list[Response | RequestError] | None) -> None:
        """Runs a program to its next request that the journal cannot answer, or to its end."""
        while True:
            try:
                asked = _resume(running, responses)
            except StopIteration as end:
                self._end(running, end.value, None)
                return
            except UserError:
                raise
            except Exception as error:  # isolated: the other questions finish
                if not isinstance(error, RequestError):
                    log.warning("%s failed", running.job.id, exc_info=True)
                self._end(running, None, _cause(error))
                return
            running.ordinal += 1
            running.is_list = isinstance(asked, Sequence)
            running.requests = tuple(asked) if isinstance(asked, Sequence) else (asked,)
            running.responses = {}
            self._ask(running)
            if len(running.responses) < len(running.requests):
                return
            responses = [running.responses[part] for part in range(len(running.requests))]

    def _ask(self, running: _Running) -> None:
        for part, request in enumerate(running.requests):
            key = Key(running.job.id, running.ordinal, part)
            found = self._journal.replay(key, request)
            if found is not None:
                running.responses[part] = found
                self.progress.replayed += 1
                continue
            who = addressee(request)
            if who not in self._handlers:
                raise UserError(f"the method asks {who!r}, which it does not declare as a need.")
            handler = self._handlers[who]
            self._waiting.setdefault(id(handler), []).append(Call(key, request))

    def _end(self, running: _Running, result: Any, error: str | None) -> None:
        outcome = None if error is not None else self._encode(result)
        seconds = time.monotonic() - running.started
        self._journal.close_program(running.job.id, outcome, error, seconds)
        del self._running[running.job.id]
        self.progress.done += 1
        self.progress.failed += error is not None
        self._on_progress(self.progress)


def _resume(running: _Running, responses: list[Response | RequestError] | None) -> Any:
    if responses is None:
        return next(running.program)
    for response in responses:
        if isinstance(response, RequestError):
            return running.program.throw(response)
    return running.program.send(responses if running.is_list else responses[0])


def _cause(error: Exception) -> str:
    text = visible(one_line(str(error)))
    if isinstance(error, RequestError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
