"""The scheduler, which runs many programs concurrently and batches their requests.

At most ``in_flight`` programs run at a time. Their requests are grouped by the handler that answers
them. Fast handlers (retrieval, ranking) are called first, so that a language model gets the largest
possible batch. Every response is recorded in the journal, then sent to its program. If the handler
accepts further calls while it works, that happens at once, and otherwise after the whole batch.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from cirag_jax.errors import UserError
from cirag_jax.io import one_line, visible
from cirag_jax.runtime.records import RequestKey
from cirag_jax.runtime.requests import (
    Generate,
    Program,
    Request,
    RequestError,
    Response,
    handler_key,
)
from cirag_jax.runtime.store import Journal

log = logging.getLogger(__name__)

# Called by a handler with the index of a call and the response.
Respond = Callable[[int, Response | RequestError], None]


@dataclasses.dataclass(frozen=True)
class Call:
    """A request and its position in its program."""

    key: RequestKey
    request: Any


# Returns the calls queued since the handler started; their indices continue the earlier ones.
MoreCalls = Callable[[], Sequence[Call]]


class Handler(Protocol):
    """Answers requests of one kind in batches.

    If a slow handler has a true attribute ``accepts_more``, it is called with a third argument, a
    `MoreCalls`. The handler calls it whenever it has room for further calls, and answers these,
    too.

    Attributes:
      is_slow: whether other handlers run first, so that this one gets larger batches.
      is_exhausted: whether a budget is exhausted, so that later errors are not the program's.
    """

    is_slow: bool

    @property
    def is_exhausted(self) -> bool:
        """See the class."""
        ...

    def __call__(self, calls: Sequence[Call], respond: Respond) -> None:
        """Calls ``respond(index, response)`` once for every call, as soon as possible."""
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to run.

    Attributes:
      id: id of the program.
      input: description of the program in the journal; JSON.
      start: creates the program.
      place: position among the programs of the journal; None is its position among the jobs.
    """

    id: str
    input: Any
    start: Callable[[], Program[Any]]
    place: int | None = None


@dataclasses.dataclass
class Progress:
    """The progress of a run, which the scheduler updates in place.

    Attributes:
      total: number of programs.
      done: programs that have ended.
      failed: programs that ended with an error.
      replayed: responses from the journal.
      calls: responses of handlers.
      generated: generated texts among ``calls``.
      prompt_tokens: prompt tokens of language models.
      generated_tokens: generated tokens of language models.
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
    """Runs programs and records them in a journal.

    Args:
      handlers: handlers by `handler_key`; one may have several keys.
      journal: records responses and results.
      in_flight: maximum number of programs that run at a time.
      encode: converts a program's result to JSON.
      on_progress: called after every response and at every end of a program.
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
        """Runs all jobs that have no result yet, and returns whether all have ended.

        Jobs have distinct ids and start in this order. Returns False after ``deadline`` (of
        `time.monotonic`), when no further batch starts, or if a budget is exhausted.
        """
        jobs = list(jobs)
        outcomes = self._journal.outcomes(job.id for job in jobs)
        pending = [(place, job) for place, job in enumerate(jobs) if job.id not in outcomes]
        self.progress = Progress(total=len(jobs), done=len(jobs) - len(pending))
        self._pending, self._deadline = collections.deque(pending), deadline
        self._running, self._waiting = {}, {}
        try:
            return self._run()
        finally:
            for running in self._running.values():
                running.program.close()

    def _run(self) -> bool:
        while self._pending or self._running:
            if self._is_past_deadline():
                return False
            self._start_programs()
            handler = self._next_handler()
            if handler is None:
                continue
            calls = self._call(handler)
            if handler.is_exhausted and any(c.key.program in self._running for c in calls):
                return False
        return True

    def _is_past_deadline(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _start_programs(self) -> None:
        while self._pending and len(self._running) < self._in_flight:
            self._start(*self._pending.popleft())

    def _next_handler(self) -> Handler | None:
        """Returns the handler with most waiting calls, preferring fast ones; None without calls."""
        handlers = {id(handler): handler for handler in self._handlers.values()}

        def rank(key: int) -> tuple[bool, int]:
            return (not handlers[key].is_slow, len(self._waiting[key]))

        return handlers[max(self._waiting, key=rank)] if self._waiting else None

    def _call(self, handler: Handler) -> list[Call]:
        """Calls a handler with all calls that wait for it; returns these and further ones."""
        calls = self._waiting.pop(id(handler))
        unanswered = set(range(len(calls)))
        answered: set[str] = set()  # programs

        def respond(index: int, response: Response | RequestError) -> None:
            unanswered.remove(index)
            if isinstance(response, RequestError) and handler.is_exhausted:
                return  # the request was not sent; a later run repeats it
            call = calls[index]
            self._journal.record(call.key, call.request, response)
            self._count(call, response)
            running = self._running[call.key.program]
            running.responses[call.key.part] = response
            answered.add(call.key.program)
            self._on_progress(self.progress)

        def more() -> list[Call]:
            if handler.is_exhausted or self._is_past_deadline():
                return []
            self._resume(answered)
            self._call_fast_handlers()
            new = self._waiting.pop(id(handler), [])
            unanswered.update(range(len(calls), len(calls) + len(new)))
            calls.extend(new)
            return new

        call_handler: Any = handler
        if getattr(handler, "accepts_more", False):
            call_handler(calls[:], respond, more)
        else:
            call_handler(calls, respond)
        if unanswered:
            raise RuntimeError(
                f"{handler!r} left {len(unanswered)} of {len(calls)} calls unanswered"
            )
        # Programs resume only after the whole batch, so that their next requests form one batch.
        self._resume(answered)
        return calls

    def _call_fast_handlers(self) -> None:
        """Starts programs, and answers their requests until all wait for a slow handler."""
        self._start_programs()
        while (handler := self._next_handler()) is not None and not handler.is_slow:
            self._call(handler)
            self._start_programs()

    def _count(self, call: Call, response: Response | RequestError) -> None:
        self.progress.calls += 1
        usage = getattr(response, "usage", None)
        if isinstance(call.request, Generate):
            self.progress.generated += 1
        if usage is not None:
            self.progress.prompt_tokens += usage.prompt_tokens
            self.progress.generated_tokens += usage.generated_tokens

    def _start(self, place: int, job: Job) -> None:
        if job.id in self._running:
            raise ValueError(f"two jobs have the id {job.id!r}")
        place = place if job.place is None else job.place
        self._journal.open_program(job.id, place, job.input)
        running = _Running(job, job.start(), time.monotonic())
        self._running[job.id] = running
        self._advance(running, None)

    def _resume(self, answered: set[str]) -> None:
        """Resumes those programs that have all their responses; empties ``answered``."""
        for running in [r for r in self._running.values() if r.job.id in answered]:
            if len(running.responses) == len(running.requests):
                responses = [running.responses[part] for part in range(len(running.requests))]
                self._advance(running, responses)
        answered.clear()

    def _advance(self, running: _Running, responses: list[Response | RequestError] | None) -> None:
        """Runs a program to its end, or to a request that the journal cannot answer."""
        while True:
            try:
                request = _send(running, responses)
            except StopIteration as end:
                self._finish(running, end.value, None)
                return
            except UserError:
                raise
            except Exception as error:  # the other programs continue
                if not isinstance(error, RequestError):
                    log.warning("%s failed", running.job.id, exc_info=True)
                self._finish(running, None, _error_text(error))
                return
            running.ordinal += 1
            running.is_list = isinstance(request, Sequence)
            running.requests = tuple(request) if isinstance(request, Sequence) else (request,)
            running.responses = {}
            self._replay_or_queue(running)
            if len(running.responses) < len(running.requests):
                return
            responses = [running.responses[part] for part in range(len(running.requests))]

    def _replay_or_queue(self, running: _Running) -> None:
        for part, request in enumerate(running.requests):
            key = RequestKey(running.job.id, running.ordinal, part)
            response = self._journal.replay(key, request)
            if response is not None:
                running.responses[part] = response
                self.progress.replayed += 1
                continue
            name = handler_key(request)
            if name not in self._handlers:
                raise UserError(f"the method requests {name!r}, which its needs do not declare.")
            handler = self._handlers[name]
            self._waiting.setdefault(id(handler), []).append(Call(key, request))

    def _finish(self, running: _Running, result: Any, error: str | None) -> None:
        outcome = None if error is not None else self._encode(result)
        seconds = time.monotonic() - running.started
        self._journal.close_program(running.job.id, outcome, error, seconds)
        del self._running[running.job.id]
        self.progress.done += 1
        self.progress.failed += error is not None
        self._on_progress(self.progress)


def _send(running: _Running, responses: list[Response | RequestError] | None) -> Any:
    """Resumes a program with its responses, or starts it, and returns its next request."""
    if responses is None:
        return next(running.program)
    for response in responses:
        if isinstance(response, RequestError):
            return running.program.throw(response)
    return running.program.send(responses if running.is_list else responses[0])


def _error_text(error: Exception) -> str:
    text = visible(one_line(str(error)))
    if isinstance(error, RequestError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
