"""Common batches of the requests of many threads, for a server of language models and encoders."""

import collections
import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.llm import types as llm
from cirag_jax.llm.engine.engine import Engine
from cirag_jax.retrieval.encoders import Encoder
from cirag_jax.types import Role

log = logging.getLogger(__name__)

INTERNAL_ERROR = "the server failed to answer; its log has the reason"


class Busy(Exception):
    """Too many requests are waiting."""


class Cancelled(Exception):
    """The client has gone, or the server ends."""


@dataclasses.dataclass
class Update:
    """A response so far, with the tokens that no earlier update had."""

    index: int
    response: llm.Generated
    is_final: bool


class Exchange:
    """The requests of a client that are answered together, and their responses."""

    def __init__(self, count: int, streams: bool):
        """``count`` is the number of requests; ``streams`` is whether parts are wanted."""
        self.streams = streams
        self.is_cancelled = False
        self._changed = threading.Condition()
        self._updates: dict[int, Update] = {}  # newest unread update of each request
        self._tokens_read = [0] * count

    def cancel(self) -> None:
        """Ends the requests after the current chunk, and `updates` at once."""
        with self._changed:
            self.is_cancelled = True
            self._changed.notify()

    def put(self, index: int, part: Callable[[int], llm.Generated], is_final: bool = False) -> None:
        """Adds an update; ``part`` returns the response with the tokens from an index on."""
        with self._changed:
            self._updates[index] = Update(index, part(self._tokens_read[index]), is_final)
            self._changed.notify()

    def updates(self) -> Iterator[Update]:
        """Yields updates until all responses are complete.

        Raises:
          Cancelled: `cancel` was called.
        """
        running = len(self._tokens_read)
        while running:
            with self._changed:
                self._changed.wait_for(lambda: self._updates or self.is_cancelled)
                if self.is_cancelled:
                    raise Cancelled
                updates, self._updates = self._updates, {}
                for update in updates.values():
                    self._tokens_read[update.index] += len(update.response.tokens or ())
            yield from updates.values()
            running -= sum(update.is_final for update in updates.values())


@dataclasses.dataclass
class _Ticket:
    """A request that waits or runs; ``number`` counts all requests."""

    number: int
    exchange: Exchange
    index: int
    request: llm.Generate

    def finish(self, response: llm.Generated) -> None:
        def rest(start: int) -> llm.Generated:
            tokens = response.tokens
            return dataclasses.replace(response, tokens=tokens and tokens[start:])

        self.exchange.put(self.index, rest, is_final=True)


class Batcher:
    """A thread that answers requests to several engines, each engine's in common batches.

    A request joins the running batch of its engine as soon as a row is free. If other engines have
    requests, only the requests that came before the engine's turn join.
    """

    def __init__(self, engines: Mapping[str, Engine], max_waiting: int):
        """At most ``max_waiting`` requests wait; further ones raise `Busy`."""
        self._engines = engines
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting = {name: collections.deque[_Ticket]() for name in engines}
        self._running: dict[int, _Ticket] = {}
        self._count = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def submit(
        self, name: str, requests: Sequence[llm.Generate], streams: bool = False
    ) -> Exchange:
        """Queues requests to the engine ``name``."""
        exchange = Exchange(len(requests), streams)
        with self._changed:
            for other, queue in self._waiting.items():
                alive = (ticket for ticket in queue if not ticket.exchange.is_cancelled)
                self._waiting[other] = collections.deque(alive)
            waiting = sum(map(len, self._waiting.values()))
            if self._is_closed or waiting + len(requests) > self._max_waiting:
                raise Busy
            for index, request in enumerate(requests):
                self._count += 1
                self._waiting[name].append(_Ticket(self._count, exchange, index, request))
            self._changed.notify()
        return exchange

    def close(self, timeout: float = 30.0) -> bool:
        """Cancels all requests; returns whether the thread has ended within ``timeout`` seconds."""
        with self._changed:
            self._is_closed = True
            tickets = [*self._running.values(), *(t for q in self._waiting.values() for t in q)]
            self._changed.notify()
        for ticket in tickets:
            ticket.exchange.cancel()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or any(self._waiting.values()))
                if self._is_closed:
                    return
                _, name = min((q[0].number, name) for name, q in self._waiting.items() if q)
            self._serve(name)

    def _serve(self, name: str) -> None:
        """Answers the requests to an engine until none is left, or until others wait."""
        last, numbers = self._count, 0

        def more() -> Sequence[llm.Generate]:
            nonlocal numbers
            with self._changed:
                queue = self._waiting[name]
                while queue and queue[0].exchange.is_cancelled:
                    queue.popleft()
                others = any(q for other, q in self._waiting.items() if other != name)
                if self._is_closed or not queue or (others and queue[0].number > last):
                    return ()
                # One at a time: requests that wait here are cancelled without cost.
                ticket = self._running[numbers] = queue.popleft()
            numbers += 1
            return (ticket.request,)

        def on_part(index: int, part: Callable[[int], llm.Generated]) -> bool:
            exchange = self._running[index].exchange
            if exchange.streams and not exchange.is_cancelled:
                exchange.put(self._running[index].index, part)
            return not exchange.is_cancelled

        def done(index: int, response: llm.Generated) -> None:
            self._running.pop(index).finish(response)

        try:
            self._engines[name].serve((), done, more, on_part)
        except BaseException:  # Rust panics are not Exceptions
            log.exception("a batch of %s failed", name)
        for index in list(self._running):
            done(index, llm.failed(INTERNAL_ERROR))


@dataclasses.dataclass
class _Texts:
    texts: list[str]
    role: Role
    vectors: "concurrent.futures.Future[np.ndarray]"


class Embedder:
    """A thread that embeds the texts of many threads in common batches."""

    def __init__(self, encoder: Encoder, max_waiting: int):
        """At most ``max_waiting`` requests wait; further ones raise `Busy`."""
        self._encoder = encoder
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: list[_Texts] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="embedder", daemon=True)
        self._thread.start()

    def submit(self, texts: list[str], role: Role) -> "concurrent.futures.Future[np.ndarray]":
        """Queues texts; returns the future of their vectors, float32 [N, D]."""
        vectors: concurrent.futures.Future[np.ndarray] = concurrent.futures.Future()
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._max_waiting:
                raise Busy
            self._waiting.append(_Texts(texts, role, vectors))
            self._changed.notify()
        return vectors

    def close(self, timeout: float = 30.0) -> bool:
        """Cancels waiting texts; returns whether the thread ended within ``timeout`` seconds."""
        with self._changed:
            self._is_closed = True
            for each in self._waiting:
                each.vectors.cancel()
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting)
                if self._is_closed:
                    return
                role = self._waiting[0].role
                batch = [each for each in self._waiting if each.role == role]
                self._waiting = [each for each in self._waiting if each.role != role]
            batch = [each for each in batch if each.vectors.set_running_or_notify_cancel()]
            self._embed([text for each in batch for text in each.texts], role, batch)

    def _embed(self, texts: list[str], role: Role, batch: list[_Texts]) -> None:
        try:
            vectors_ND = self._encoder.encode(texts, role)
        except BaseException as error:  # Rust panics are not Exceptions
            if not isinstance(error, UserError):
                log.exception("a batch of embeddings failed")
            for each in batch:
                each.vectors.set_exception(Exception(INTERNAL_ERROR))
            return
        start = 0
        for each in batch:
            each.vectors.set_result(vectors_ND[start : start + len(each.texts)])
            start += len(each.texts)
