"""Clean stopping of a training by a signal or a time limit."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


def out_of_time(start: float, minutes: float) -> bool:
    """Returns whether ``minutes`` (0: no limit) have passed since ``start`` (`time.monotonic`)."""
    return bool(minutes) and time.monotonic() - start > 60 * minutes


class PreemptionGuard:
    """A context manager that decides, after every step, whether to save and stop.

    ::

        with PreemptionGuard(time.monotonic(), minutes) as guard:
            for step in range(first, total):
                ...
                if guard.should_stop(step + 1):
                    save(step + 1)
                    break

    In a single process, SIGTERM and SIGINT request a stop instead of ending the process. A second
    SIGINT interrupts immediately. Several processes must stop after the same step, on which JAX's
    coordination service agrees when one process receives SIGTERM. Its handler is therefore not
    replaced, and SIGINT is left to Python. The previous handlers are restored on exit. Outside the
    main thread there are no handlers, and only setting ``signal_name`` requests a stop.

    A stop is also requested ``minutes`` (0: never) after ``start`` (`time.monotonic`). With several
    processes, the first one to reach the limit sends itself a SIGTERM, so that all agree on a step.
    """

    def __init__(self, start: float = 0.0, minutes: float = 0.0) -> None:
        self.signal_name: str | None = None
        self._time = start, minutes
        self._previous: dict[signal.Signals, Any] = {}
        self._distributed = self._announced = False

    def __enter__(self) -> PreemptionGuard:
        self._distributed = jax.process_count() > 1
        if not self._distributed and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # None is a handler that was not set from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def should_stop(self, step: int) -> bool:
        """Returns whether to save and stop after ``step`` steps. Call it once per step."""
        time_is_up = out_of_time(*self._time)
        if self._distributed:
            if time_is_up and not self._announced:
                self._announced = True
                signal.raise_signal(signal.SIGTERM)
            if multihost_utils.reached_preemption_sync_point(step):
                self.signal_name = "SIGTERM"
            time_is_up = False  # The clocks differ, so that only the agreed step stops training.
        return self.signal_name is not None or time_is_up

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
