"""Stops training cleanly on a signal or at a time limit."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


def out_of_time(start: float, minutes: float) -> bool:
    """Returns whether ``minutes`` have passed since ``start`` (`time.monotonic`); 0 is no limit."""
    return bool(minutes) and time.monotonic() - start > 60 * minutes


class PreemptionGuard:
    """A context manager that decides, after every step, whether to save and stop.

    In a single process, SIGTERM and SIGINT request a stop instead of ending the process. A second
    SIGINT interrupts immediately. The previous handlers are restored on exit. Outside the main
    thread no handlers are installed; a stop is then requested by setting ``signal_name``.

    Several processes must stop after the same step. If one process receives SIGTERM, JAX's
    coordination service chooses the step. JAX's handler is therefore not replaced, and SIGINT keeps
    Python's handler.

    A stop is also requested ``minutes`` after ``start`` (`time.monotonic`), unless ``minutes`` is
    0. With several processes, the first process at the limit sends itself a SIGTERM.
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
            # None means a handler that was not set in Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def should_stop(self, step: int) -> bool:
        """Returns whether to save and stop after ``step`` steps; call it once per step."""
        time_is_up = out_of_time(*self._time)
        if self._distributed:
            if time_is_up and not self._announced:
                self._announced = True
                signal.raise_signal(signal.SIGTERM)
            if multihost_utils.reached_preemption_sync_point(step):
                self.signal_name = "SIGTERM"
            time_is_up = False  # Clocks differ; only the common step stops training.
        return self.signal_name is not None or time_is_up

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
