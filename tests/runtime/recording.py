"""Handlers that record their calls, and whose responses depend only on the request."""

import collections
from collections.abc import Callable
from typing import Any

from cirag_jax.llm.types import Message, Usage
from cirag_jax.runtime.requests import (
    Extract,
    Extracted,
    Fetch,
    Generate,
    Generated,
    Rank,
    Ranked,
    RequestError,
    Retrieve,
    Retrieved,
)
from cirag_jax.types import Passage, Triple

USAGE = Usage(prompt_tokens=7, cached_tokens=2, generated_tokens=3, seconds=0.5)


class Recording:
    """A handler that answers with `response_to`.

    Args:
      is_slow: see `Handler`.
      refuse: called with each call; if it returns a text, the call fails with that error.
      budget: number of calls until the budget is exhausted.
      log: list to which (name, number of calls) is added.
      name: name in the log.
    """

    def __init__(
        self,
        is_slow: bool = False,
        refuse: Callable[[Any], str | None] = lambda call: None,
        budget: int | None = None,
        log: list[tuple[str, int]] | None = None,
        name: str = "",
    ):
        self.is_slow = is_slow
        self.batches: list[list[Any]] = []
        self._refuse, self._budget = refuse, budget
        self._log, self._name = log, name

    @property
    def is_exhausted(self) -> bool:
        return self._budget is not None and self._budget < 0

    @property
    def requests(self) -> list[Any]:
        return [call.request for batch in self.batches for call in batch]

    def __call__(self, calls, done) -> None:
        self.batches.append(list(calls))
        if self._log is not None:
            self._log.append((self._name, len(calls)))
        for index, call in reversed(list(enumerate(calls))):  # the order does not matter
            if self._budget is not None:
                self._budget -= 1
                if self._budget < 0:
                    done(index, RequestError("the budget has ended"))
                    continue
            cause = self._refuse(call)
            done(index, response_to(call.request) if cause is None else RequestError(cause))


class Streaming(Recording):
    """Accepts more calls while it works on ``rows`` calls, and answers the latest one first.

    ``answered`` lists the texts of answered calls in order. It dies after ``lives`` answers.
    """

    accepts_more = True

    def __init__(self, rows: int = 2, lives: int | None = None, **fields: Any):
        super().__init__(is_slow=True, **fields)
        self.answered: list[str] = []
        self._rows, self._lives = rows, lives

    def __call__(self, calls, done, more) -> None:
        self.batches.append(list(calls))
        queue, count = collections.deque(enumerate(calls)), len(calls)
        slots: list[tuple[int, Any]] = []
        while True:
            while len(slots) < self._rows:
                if not queue:
                    new = more()
                    if new:
                        self.batches.append(list(new))
                    queue.extend(enumerate(new, count))
                    count += len(new)
                if not queue:
                    break
                slots.append(queue.popleft())
            if not slots:
                return
            if len(self.answered) == self._lives:
                raise Killed
            index, call = slots.pop()
            self.answered.append(call.request.messages[-1].text)
            cause = self._refuse(call)
            done(index, response_to(call.request) if cause is None else RequestError(cause))


class Killed(BaseException):
    """Simulates a kill of the process."""


def passage(name: str) -> Passage:
    return Passage(name, f"Title {name}", f"Text {name}. More.", None)


def response_to(request: Any) -> Any:
    """Returns a response that depends only on the request."""
    match request:
        case Retrieve(query, k):
            return Retrieved(
                tuple(passage(f"{query}{i}") for i in range(k)),
                tuple(1.0 / (i + 1) for i in range(k)),
            )
        case Fetch(ids):
            return Retrieved(tuple(map(passage, ids)), (1.0,) * len(ids))
        case Extract(passages):
            return Extracted(tuple((Triple(p.id, "is", "x", p.id, 0),) for p in passages))
        case Rank(_, texts, n):
            best = texts[::-1][: n or None]
            return Ranked(best, tuple(float(i) for i in range(len(best))))
        case Generate(messages, role):
            return Generated(f"{role}: {messages[-1].text}", "stop", USAGE)
    raise AssertionError(request)


def say(text: str, role: Any = "reader", **fields: Any) -> Generate:
    return Generate((Message("user", text),), role, **fields)
