"""Where a training run's figures go: ``metrics.jsonl``, TensorBoard events, a progress bar."""

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

from cirag_jax.errors import UserError
from cirag_jax.io import Closing, write_text

FILE_NAME = "metrics.jsonl"
_P = TypeVar("_P")
_RECENT = 20  # steps that the time left is judged by
_LINE_SECONDS = 30.0  # between progress lines where standard error is no terminal


def fetch(step: int, metrics: Mapping[str, Any], advice: str) -> dict[str, float]:
    """A step's metrics on the host, which waits for the step."""
    values = {name: float(value) for name, value in metrics.items()}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise UserError(
            f"step {step}: {', '.join(bad)} is not finite; no checkpoint of this step was saved. "
            f"{advice}"
        )
    return values


class StepClock:
    """Seconds of steps each of which is sent to the device while the one before still runs."""

    def __init__(self):
        self._done = -math.inf

    def seconds(self, sent: float) -> float:
        """Of the step that was sent at ``sent`` and has just ended, since the one before ended."""
        now = time.monotonic()
        began, self._done = max(sent, self._done), now
        return max(now - began, 1e-9)


class MetricWriter(Closing):
    """Writes scalars by step, and shows progress on standard error.

    Every line of ``metrics.jsonl`` is an object with ``step``, ``seconds`` (of training, summed
    over restarts) and the scalars given; a value that is not finite is written as null. The same
    scalars go to TensorBoard events under ``tensorboard/``. On a terminal a bar shows the loss, the
    rate and the time left; elsewhere a line says so every 30 seconds.

    A run that starts again from step ``start_step`` drops what was written beyond it, so that the
    file reads as if the run had never been interrupted. Use as a context manager: leaving it, by an
    error too, ends the bar's line and closes the files.

    Args:
      workdir: existing folder.
      total_steps: the run's number of steps.
      start_step: the restored step; 0 for a new run.
      evaluate_every: steps between evaluations, beside the last step's; 0: none but that.
      enabled: False in every process but the first: nothing is written or shown.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        total_steps: int,
        start_step: int = 0,
        *,
        evaluate_every: int = 0,
        enabled: bool = True,
    ):
        self._total_steps = total_steps
        self._enabled = enabled
        self._stream = sys.stderr
        self._started = self._shown = time.monotonic()
        # (step, seconds) of the last steps: what the estimate is made of. Compilation and the first
        # evaluation, before the first of them, are not.
        self._recent: collections.deque[tuple[int, float]] = collections.deque(maxlen=_RECENT)
        self._evaluate_every = evaluate_every
        self._evaluated = start_step  # the last step that was evaluated
        self._evaluation = 0.0  # seconds that took
        self._bar: tqdm.tqdm | None = None
        self._seconds_before = 0.0
        if not enabled:
            return
        path = pathlib.Path(workdir) / FILE_NAME
        self._seconds_before = truncate(path, start_step or -1)
        self._file = path.open("a", encoding="utf-8")
        from tensorboardX import SummaryWriter  # imports torch where there is one: two seconds

        self._events = SummaryWriter(
            str(pathlib.Path(workdir) / "tensorboard"),
            purge_step=start_step + 1 if start_step else 0,
        )
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=total_steps,
                initial=start_step,
                file=self._stream,
                # Rate and time left are ours: tqdm's take evaluations for steps.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            )

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Records scalars of a step; arrays of one element are fetched, which waits for them."""
        if not self._enabled:
            return
        line: dict[str, Any] = {"step": step, "seconds": round(self._seconds(), 3)}
        for name, scalar in scalars.items():
            value = float(scalar)
            line[name] = None
            if math.isfinite(value):
                line[name] = value
                self._events.add_scalar(name, value, step)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def progress(self, step: int, loss: Any = None) -> None:
        """Shows that ``step`` steps are done; ``loss`` is fetched only when it is shown."""
        if not self._enabled:
            return
        now = time.monotonic()
        self._recent.append((step, now))
        last = step >= self._total_steps
        if self._bar is not None:
            if loss is not None and (last or now - self._shown >= 1.0):
                self._bar.set_postfix_str(self._status(step, loss), refresh=False)
                self._shown = now
            self._bar.update(step - self._bar.n)
        elif last or now - self._shown >= _LINE_SECONDS:
            self._shown = now
            status = self._status(step, loss)
            line = f"step {step}/{self._total_steps}" + (f", {status}" if status else "")
            print(line, file=self._stream, flush=True)

    def evaluate(
        self, step: int, evaluation: Callable[[_P], dict[str, float]], params: _P
    ) -> dict[str, float]:
        """Runs ``evaluation(params)``, records what it gives, and returns that.

        Its time is no step's: the rate leaves it out, the time left counts the evaluations to come.
        """
        began = time.monotonic()
        found = evaluation(params)
        self._evaluated, self._evaluation = step, time.monotonic() - began
        self._recent = collections.deque(
            ((done, ended + self._evaluation) for done, ended in self._recent), maxlen=_RECENT
        )
        if found:
            self.write(step, found)
        return found

    def close(self) -> None:
        """Ends the bar's line and closes the files; more calls do nothing."""
        if not self._enabled:
            return
        self._enabled = False
        if self._bar is not None:
            self._bar.close()
        self._file.close()
        self._events.close()

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _status(self, step: int, loss: Any) -> str:
        """Loss, rate and time left, as far as they are known."""
        parts = [] if loss is None else [f"loss {float(loss):.4f}"]
        (first, began), (last, ended) = self._recent[0], self._recent[-1]
        if last == first:
            return ", ".join(parts)
        seconds = max(ended - began, 1e-9) / (last - first)
        rate = f"{seconds:.1f} s/step" if seconds > 1 else f"{1 / seconds:.2f} steps/s"
        coming = seconds * (self._total_steps - step) + self._evaluation * self._evaluations()
        left = tqdm.tqdm.format_interval(coming)
        return ", ".join([*parts, rate, f"{left} left"])

    def _evaluations(self) -> int:
        """How many are still to come."""
        every, done, total = self._evaluate_every, self._evaluated, self._total_steps
        if done >= total or not every:
            return int(done < total)
        return total // every - done // every + bool(total % every)


def truncate(path: pathlib.Path, step: int) -> float:
    """Drops the lines beyond ``step`` and a half-written last one.

    Returns the ``seconds`` of the last line kept, 0 where there is none.
    """
    if not path.exists():
        return 0.0
    kept, seconds = [], 0.0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                if record["step"] > step:
                    continue
                ended = float(record["seconds"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # The process died while it wrote this line.
            if not math.isfinite(ended):
                continue
            seconds = max(seconds, ended)
            kept.append(line if line.endswith("\n") else line + "\n")
    write_text(path, kept)
    return seconds
