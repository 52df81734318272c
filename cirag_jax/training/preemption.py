"""Leaving in good order when the scheduler, or the user, asks for it."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


def out_of_time(start: float, minutes: float) -> bool:
    """Whether ``minutes`` (0: no limit) have passed since ``start`` (`time.monotonic`)."""
    return bool(minutes) and time.monotonic() - start > 60 * minutes


class PreemptionGuard:
    """Tells the train loop, after every step, whether to save and leave.

    ::

        with PreemptionGuard(time.monotonic(), minutes) as guard:
            for step in range(first, total):
                ...
                if guard.should_stop(step + 1):
                    save(step + 1)
                    break

    In a single process SIGTERM and SIGINT raise a flag instead of ending the process; a second
    SIGINT interrupts at once. With several processes each must stop after the same step: JAX's
    coordination service sees the SIGTERM that one of them gets and agrees on that step with the
    others, so its handler is left in place (and SIGINT is left to Python).

    The former handlers are back once the block is left. Outside the main thread, where Python
    allows no handlers, only setting ``signal_name`` raises the flag.

    Time is up, too, ``minutes`` (0: never) after ``start`` (`time.monotonic`). Of several processes
    the first whose time is up sends itself a SIGTERM, so that all agree on a step.
    """

    def __init__(self, start: float = 0.0, minutes: float = 0.0) -> None:
        self.signal_name: str | None = None
        self._time = start, minutes
        self._former: dict[signal.Signals, Any] = {}
        self._distributed = self._announced = False

    def __enter__(self) -> PreemptionGuard:
        self._distributed = jax.process_count() > 1
        if not self._distributed and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            # None stands for a handler that was not set from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()

    def should_stop(self, step: int) -> bool:
        """Whether to save and leave now that ``step`` steps are done; call it once a step."""
        time_is_up = out_of_time(*self._time)
        if self._distributed:
            if time_is_up and not self._announced:
                self._announced = True
                signal.raise_signal(signal.SIGTERM)
            if multihost_utils.reached_preemption_sync_point(step):
                self.signal_name = "SIGTERM"
            time_is_up = False  # The clocks differ: only the step they agree on ends it.
        return self.signal_name is not None or time_is_up

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
