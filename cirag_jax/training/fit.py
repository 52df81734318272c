"""The training loop of all components, with metrics, evaluations, checkpoints and preemption."""

import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from cirag_jax import processes
from cirag_jax.errors import TryAgain, UserError
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.training.metrics import MetricWriter, StepClock
from cirag_jax.training.preemption import PreemptionGuard
from cirag_jax.training.profile import StepProfile
from cirag_jax.training.state import TrainState, announce, restore
from cirag_jax.types import Config

Metrics = dict[str, jax.Array]
Describe = Callable[[dict[str, float], Any, float], None]


class FitResult(NamedTuple):
    """The final state and step, and the best step.

    ``best`` has ``best_step`` (None without dev metrics) and the dev metrics of that step.
    """

    state: TrainState
    step: int
    total_steps: int
    best: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether training reached its last step."""
        return self.step >= self.total_steps

    def summary(self) -> dict[str, Any]:
        """Returns the entries that the results of all trainers have in common."""
        steps = {"step": self.step, "total_steps": self.total_steps}
        return {"complete": self.complete, **steps, **self.best}


def describe_padding(values: dict[str, float], batch: Any, seconds: float) -> None:
    """Adds tokens per second and the share of padding to the metrics of a step."""
    values["tokens_per_second"] = batch.tokens / seconds
    values["padding"] = 1.0 - batch.tokens / batch.padded_tokens


def fit(
    config: Config,
    workdir: pathlib.Path,
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Any,
    evaluate: Callable[[nnx.State], dict[str, float]],
    checkpoints: Checkpoints,
    meta: Mapping[str, Any],
    *,
    total_steps: int,
    start: float,
    advice: str,
    describe: Describe = describe_padding,
    synchronous: bool = False,
) -> FitResult:
    """Trains up to ``total_steps``, starting from the latest checkpoint if there is one.

    Each step is sent to the devices while the previous step runs. The loop waits for a step's
    metrics only after sending the next step, or before it evaluates or saves. A step is saved
    before it is evaluated, so that a process killed during the evaluation loses no steps; the
    next process repeats the evaluation.

    Args:
      config: config with the fields of `configs.common.training_loop`.
      workdir: existing folder for ``metrics.jsonl``, the tracker's files and the profile.
      train_step: maps a state, which it may donate, and a batch to the next state and metrics. It
        skips an update that is not finite, see `state.apply_gradient`.
      state: the initial state.
      batches: iterator over the batches of the steps, with ``get_state`` and ``set_state``; its
        state is saved in checkpoints.
      evaluate: maps parameters to dev metrics; returns {} without dev examples.
      checkpoints: open checkpoints of this run.
      meta: metadata of every checkpoint; ``meta["run"]`` must match the latest checkpoint.
      total_steps: number of the last step.
      start: start of the time limit, on the clock `time.monotonic`.
      advice: remedy to suggest if too many consecutive steps are skipped.
      describe: edits the metrics of a step in place, given its batch and duration in seconds.
      synchronous: whether ``train_step`` waits for its result, which is then reported at once.

    All processes must have the same ``meta["run"]``.

    Raises:
      TryAgain: more than ``config.max_skipped_steps`` consecutive steps were skipped. The last
        checkpoint has the weights from before these steps; a new run continues after these steps.
    """
    processes.check_equal(meta["run"])
    state, first_step, saved_metrics = restore(checkpoints, state, meta, total_steps, batches)
    step = first_step

    def should_evaluate(step: int) -> bool:
        return step == total_steps or _is_due(step, config.eval_every)

    is_evaluated = saved_metrics is not None or not should_evaluate(first_step)
    with (
        MetricWriter(
            workdir,
            total_steps,
            first_step,
            evaluate_every=config.eval_every,
            start_evaluated=is_evaluated,
            tracker=config.get("tracker", "tensorboard"),
            config=config,
            enabled=jax.process_index() == 0,
        ) as writer,
        StepProfile(config.get("profile_steps"), workdir) as profile,
        PreemptionGuard(start, config.stop_after_minutes) as preemption,
    ):

        def evaluate_checkpoint(step: int) -> None:
            if metrics := writer.evaluate(step, evaluate, state.params):
                checkpoints.add_metrics(step, metrics)

        if first_step == 0 and config.eval_every:
            writer.evaluate(0, evaluate, state.params)  # Before training.
        elif first_step and not is_evaluated:
            evaluate_checkpoint(first_step)
        report = _StepReporter(
            writer, profile, describe, int(state.skipped_steps), config.max_skipped_steps
        )
        timer = _SaveTimer(config.save_minutes, first_step)
        for step in range(first_step + 1, total_steps + 1):
            batch = next(batches)
            sent_at = time.monotonic()
            state, metrics = train_step(state, batch)
            report.sent(step, metrics, batch, sent_at)
            if synchronous:
                report.finish()
            if report.consecutive_skips > config.max_skipped_steps:
                checkpoints.save(step, state, batches.get_state(), meta)
                checkpoints.wait()
                raise TryAgain(
                    f"the last {report.consecutive_skips} steps up to step {step} were skipped, "
                    "because their loss, gradient or update was not finite; the checkpoint of step "
                    f"{step} has the weights from before. {advice}, or run the same command to "
                    "continue with the next batches"
                )

            stop = preemption.should_stop(step)
            evaluates = should_evaluate(step)
            if stop or evaluates or _is_due(step, config.save_every) or timer.is_due(step):
                report.finish()
                checkpoints.save(step, state, batches.get_state(), meta)
                if evaluates:
                    evaluate_checkpoint(step)
                timer.restart(step)
            if stop:
                break
        skipped = int(state.skipped_steps)
        if step == total_steps and skipped > total_steps / 2:
            raise UserError(
                f"{skipped} of {total_steps} steps were skipped, because their loss, gradient or "
                f"update was not finite. {advice}, and use another --workdir"
            )
        return FitResult(state, step, total_steps, _best(checkpoints))


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _best(checkpoints: Checkpoints) -> dict[str, Any]:
    checkpoints.wait()
    step = checkpoints.best_step()
    return {"best_step": step, **((checkpoints.metrics(step) or {}) if step is not None else {})}


class _SaveTimer:
    """Tells whether ``minutes`` (0: never) have passed since the last save.

    Several processes must save after the same step, so all use the clock of the first process. To
    read this clock, processes wait for each other. It is therefore read after 1, 2, 4, ... steps,
    or earlier if the time is expected to be up.
    """

    def __init__(self, minutes: float, step: int):
        self._seconds = 60 * minutes
        self.restart(step)

    def restart(self, step: int) -> None:
        """Restarts the measurement after ``step``."""
        self._start, self._first, self._next = time.monotonic(), step, step + 1

    def is_due(self, step: int) -> bool:
        """Returns whether to save after ``step``, the same in all processes."""
        if not self._seconds or step < self._next:
            return False
        elapsed = max(time.monotonic() - self._start, 1e-9)
        if jax.process_count() > 1:
            elapsed = float(multihost_utils.broadcast_one_to_all(np.float32(elapsed)))
        steps = step - self._first
        steps_left = int(steps * (self._seconds / elapsed - 1))
        self._next = step + min(max(steps_left, 1), steps)
        return elapsed >= self._seconds


class BatchIterator(Iterator[Any]):
    """An iterator over the batches ``make(1)``, ``make(2)``, ... of the steps."""

    def __init__(self, make: Callable[[int], Any]):
        self._make, self._step = make, 0

    def __next__(self) -> Any:
        self._step += 1
        return self._make(self._step)

    def get_state(self) -> dict[str, int]:
        """Returns the position, as saved in checkpoints."""
        return {"step": self._step}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continues after the step of ``state``."""
        self._step = state["step"]


class _StepReporter:
    """Writes a step's metrics after the next step is sent.

    Attributes:
      consecutive_skips: number of skipped steps since the last step that was not skipped.
    """

    def __init__(
        self,
        writer: MetricWriter,
        profile: StepProfile,
        describe: Describe,
        skipped_steps: int,
        max_skipped_steps: int,
    ):
        self._writer, self._profile, self._describe = writer, profile, describe
        self._skipped_steps, self._max_skipped_steps = skipped_steps, max_skipped_steps
        self.consecutive_skips = 0
        self._clock = StepClock()
        self._pending: tuple[int, Metrics, Any, float] | None = None

    def sent(self, step: int, metrics: Metrics, batch: Any, sent_at: float) -> None:
        """Finishes the previous step, and records this step as pending."""
        self.finish()
        self._pending = (step, metrics, batch, sent_at)
        self._profile.sent(step)
        if self.consecutive_skips >= self._max_skipped_steps:  # This may be the last step.
            self.finish()

    def finish(self) -> None:
        """Waits for the pending step, if any, and writes its metrics."""
        if self._pending is None:
            return
        (step, metrics, batch, sent_at), self._pending = self._pending, None
        values = {name: float(value) for name, value in metrics.items()}
        self._count_skips(step, values)
        self._profile.ended(step)
        self._describe(values, batch, self._clock.seconds(sent_at))
        self._writer.write(step, {f"train/{name}": value for name, value in values.items()})
        self._writer.progress(step, values["loss"])

    def _count_skips(self, step: int, values: Mapping[str, float]) -> None:
        before, self._skipped_steps = self._skipped_steps, int(values["skipped_steps"])
        if self._skipped_steps == before:
            self.consecutive_skips = 0
            return
        self.consecutive_skips += 1
        names = [name for name, value in values.items() if not math.isfinite(value)]
        announce(f"step {step} was skipped: {', '.join(names)} not finite")
