"""Writes training metrics to ``metrics.jsonl``, a tracker and a progress bar."""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import tqdm

from cirag_jax.io import Closing, write_text
from cirag_jax.training.trackers import open_tracker
from cirag_jax.types import Config

FILE_NAME = "metrics.jsonl"
_P = TypeVar("_P")
_RECENT = 20  # Number of recent steps from which the remaining time is estimated.
_LINE_SECONDS = 30.0  # Interval of progress lines if standard error is not a terminal.


class StepClock:
    """Measures the duration of steps that are sent to the device while earlier steps run."""

    def __init__(self):
        self._previous_end = -math.inf

    def seconds(self, sent_at: float) -> float:
        """Returns the duration of a step that ends now.

        It started when it was sent or, if later, when the previous step ended.
        """
        now = time.monotonic()
        start, self._previous_end = max(sent_at, self._previous_end), now
        return max(now - start, 1e-9)


class MetricWriter(Closing):
    """A context manager that writes scalars by step and shows progress on standard error.

    Every line of ``metrics.jsonl`` is an object with ``step``, ``seconds`` (training time, summed
    over restarts) and scalars; values that are not finite are null. The tracker receives the same
    scalars. A terminal shows a bar with the loss, the rate and the remaining time. Without a
    terminal, these values are printed every 30 seconds.

    When a run resumes from ``start_step``, the lines of later steps are deleted, so the file looks
    as if the run had not been interrupted.

    Args:
      workdir: existing folder.
      total_steps: number of steps of the run.
      start_step: the restored step; 0 for a new run.
      evaluate_every: steps between evaluations; 0 evaluates only after the last step.
      start_evaluated: whether ``start_step`` needs no evaluation. If False, its evaluation was
        interrupted, and its line is deleted, too.
      tracker: one of `trackers.TRACKERS`.
      config: the config that the tracker records.
      enabled: False disables all output; used in all processes except the first.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        total_steps: int,
        start_step: int = 0,
        *,
        evaluate_every: int = 0,
        start_evaluated: bool = True,
        tracker: str = "tensorboard",
        config: Config | None = None,
        enabled: bool = True,
    ):
        self._total_steps = total_steps
        self._enabled = enabled
        self._stream = sys.stderr
        self._started = self._shown = time.monotonic()
        # (step, time) of recent steps; compilation and the first evaluation are excluded.
        self._recent: collections.deque[tuple[int, float]] = collections.deque(maxlen=_RECENT)
        self._evaluate_every = evaluate_every
        self._evaluated_step = start_step
        self._evaluation_seconds = 0.0
        self._bar: tqdm.tqdm | None = None
        self._seconds_before = 0.0
        if not enabled:
            return
        path = pathlib.Path(workdir) / FILE_NAME
        self._seconds_before = truncate(path, start_step or -1, start_evaluated)
        self._tracker = open_tracker(tracker, workdir, start_step, config)
        self._file = path.open("a", encoding="utf-8")
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=total_steps,
                initial=start_step,
                file=self._stream,
                # tqdm's own rate and remaining time would include evaluations.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            )

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes the scalars of a step; fetches device arrays."""
        if not self._enabled:
            return
        seconds = self._seconds_before + time.monotonic() - self._started
        line: dict[str, Any] = {"step": step, "seconds": round(seconds, 3)}
        values = {name: float(scalar) for name, scalar in scalars.items()}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._tracker.log(step, {n: value for n, value in values.items() if math.isfinite(value)})

    def progress(self, step: int, loss: float) -> None:
        """Shows that ``step`` steps are done, and the loss of the last one."""
        if not self._enabled:
            return
        now = time.monotonic()
        self._recent.append((step, now))
        last = step >= self._total_steps
        if self._bar is not None:
            if last or now - self._shown >= 1.0:
                self._bar.set_postfix_str(self._status(step, loss), refresh=False)
                self._shown = now
            self._bar.update(step - self._bar.n)
        elif last or now - self._shown >= _LINE_SECONDS:
            self._shown = now
            line = f"step {step}/{self._total_steps}, {self._status(step, loss)}"
            print(line, file=self._stream, flush=True)

    def evaluate(
        self, step: int, evaluation: Callable[[_P], dict[str, float]], params: _P
    ) -> dict[str, float]:
        """Runs ``evaluation(params)``, and writes and returns the metrics.

        The displayed rate excludes evaluations; the remaining time includes future evaluations.
        """
        start = time.monotonic()
        metrics = evaluation(params)
        self._evaluated_step, self._evaluation_seconds = step, time.monotonic() - start
        self._recent = collections.deque(
            ((done, end + self._evaluation_seconds) for done, end in self._recent), maxlen=_RECENT
        )
        if metrics:
            self.write(step, metrics)
        return metrics

    def close(self) -> None:
        """Ends the progress bar and closes the files; further calls do nothing."""
        if not self._enabled:
            return
        self._enabled = False
        if self._bar is not None:
            self._bar.close()
        self._file.close()
        self._tracker.close()

    def _status(self, step: int, loss: float) -> str:
        """Returns the loss, and the rate and remaining time if known."""
        (first, start), (last, end) = self._recent[0], self._recent[-1]
        if last == first:
            return f"loss {loss:.4f}"
        seconds = max(end - start, 1e-9) / (last - first)
        rate = f"{seconds:.1f} s/step" if seconds > 1 else f"{1 / seconds:.2f} steps/s"
        evaluating = self._evaluation_seconds * self._remaining_evaluations()
        left = tqdm.tqdm.format_interval(seconds * (self._total_steps - step) + evaluating)
        return f"loss {loss:.4f}, {rate}, {left} left"

    def _remaining_evaluations(self) -> int:
        every, done, total = self._evaluate_every, self._evaluated_step, self._total_steps
        if done >= total or not every:
            return int(done < total)
        return total // every - done // every + bool(total % every)


def truncate(path: pathlib.Path, step: int, evaluated: bool = True) -> float:
    """Deletes incomplete lines and lines of steps after ``step``.

    Without ``evaluated``, also deletes an evaluation of ``step``. Returns ``seconds`` of the last
    line, or 0 if no line is left.
    """
    if not path.exists():
        return 0.0
    kept, seconds = [], 0.0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                is_deleted = record["step"] == step and not evaluated and "train/loss" not in record
                keep = record["step"] <= step and math.isfinite(float(record["seconds"]))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # The process was killed while writing this line.
            if keep and not is_deleted:
                seconds = max(seconds, float(record["seconds"]))
                kept.append(line if line.endswith("\n") else line + "\n")
    write_text(path, kept)
    return seconds
