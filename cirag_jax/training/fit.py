"""The train loop of all components: steps, metrics, evaluations, checkpoints, preemption."""

import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.training.metrics import MetricWriter, StepClock, fetch
from cirag_jax.training.preemption import PreemptionGuard
from cirag_jax.training.profile import StepProfile
from cirag_jax.training.state import TrainState
from cirag_jax.types import Config

Metrics = dict[str, jax.Array]
Describe = Callable[[dict[str, float], Any, float], None]


class Fitted(NamedTuple):
    """The result of `fit`.

    ``complete`` is False if the training was stopped before its last step. ``best`` has
    ``best_step`` (None without dev metrics) and the dev metrics of that step.
    """

    state: TrainState
    step: int
    complete: bool
    best: dict[str, Any]


def describe_padding(values: dict[str, float], batch: Any, seconds: float) -> None:
    """Adds tokens per second and the share of padding, for a batch that counts its tokens."""
    values["tokens_per_second"] = batch.tokens / seconds
    values["padding"] = 1.0 - batch.tokens / batch.padded_tokens


def fit(
    config: Config,
    workdir: pathlib.Path,
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Iterator[Any],
    evaluate: Callable[[nnx.State], dict[str, float]],
    checkpoints: Checkpoints,
    meta: Mapping[str, Any],
    *,
    first_step: int,
    total_steps: int,
    start: float,
    advice: str,
    describe: Describe = describe_padding,
) -> Fitted:
    """Trains from the step after ``first_step`` up to ``total_steps``.

    A step is sent to the devices while the step before it still runs. The loop waits for a step's
    metrics only after the next step is sent, or before it evaluates or saves.

    Args:
      config: ``eval_every``, ``save_every``, ``stop_after_minutes`` and ``profile_steps`` are read.
      workdir: existing folder for ``metrics.jsonl``, TensorBoard events and the profile.
      train_step: from a state, which it may donate, and a batch to the next state and its metrics.
      state: the state after ``first_step`` steps.
      batches: gives the batch of each step; its ``get_state()`` is saved with every checkpoint.
      evaluate: from parameters to dev metrics; empty if there are no dev examples.
      checkpoints: open checkpoints of this run.
      meta: description saved with every checkpoint.
      first_step: 0 for a new run, else the restored step.
      total_steps: number of the last step.
      start: `time.monotonic` at the start of the process, from which its time limit counts.
      advice: remedy to name when a metric is not finite.
      describe: changes a step's values, given its batch and its seconds.
    """
    step, complete = first_step, True
    with (
        MetricWriter(
            workdir,
            total_steps,
            first_step,
            evaluate_every=config.eval_every,
            enabled=jax.process_index() == 0,
        ) as writer,
        StepProfile(config.get("profile_steps"), workdir) as profile,
        PreemptionGuard(start, config.stop_after_minutes) as preemption,
    ):
        if first_step == 0 and config.eval_every:
            writer.evaluate(0, evaluate, state.params)  # Before training.
        report = _Report(writer, profile, advice, describe)
        for step in range(first_step + 1, total_steps + 1):
            batch = next(batches)
            sent = time.monotonic()
            state, metrics = train_step(state, batch)
            report.sent(step, metrics, batch, sent)

            last, dev = step == total_steps, None
            stop = preemption.should_stop(step)
            if last or _is_due(step, config.eval_every):
                report.finish()
                dev = writer.evaluate(step, evaluate, state.params)
            if dev is not None or stop or _is_due(step, config.save_every):
                report.finish()  # Raises if the state is not finite, so that it is never saved.
                checkpoints.save(step, state, batches, meta, dev or None)
            if stop and not last:
                complete = False
                break
        return Fitted(state, step, complete, _best(checkpoints))


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _best(checkpoints: Checkpoints) -> dict[str, Any]:
    checkpoints.wait()
    step = checkpoints.best_step()
    return {"best_step": step, **((checkpoints.metrics(step) or {}) if step is not None else {})}


class BatchOfStep(Iterator[Any]):
    """Batches that depend only on the number of their step, counted from 1.

    Args:
      make: from the number of a step to its batch.
      first_step: number of steps that are already done.
    """

    def __init__(self, make: Callable[[int], Any], first_step: int):
        self._make, self._step = make, first_step

    def __next__(self) -> Any:
        self._step += 1
        return self._make(self._step)

    def get_state(self) -> dict[str, int]:
        """The position saved with a checkpoint."""
        return {"step": self._step}


class _Report:
    """Writes a step's metrics after the next step is sent, and raises if one is not finite."""

    def __init__(self, writer: MetricWriter, profile: StepProfile, advice: str, describe: Describe):
        self._writer, self._profile = writer, profile
        self._advice, self._describe = advice, describe
        self._clock = StepClock()
        self._pending: tuple[int, Metrics, Any, float] | None = None

    def sent(self, step: int, metrics: Metrics, batch: Any, sent: float) -> None:
        """Finishes the previous step; keeps the device metrics of one that was sent at ``sent``."""
        self.finish()
        self._pending = (step, metrics, batch, sent)
        self._profile.sent(step)

    def finish(self) -> None:
        """Waits for the pending step, if there is one, and writes its metrics."""
        if self._pending is None:
            return
        (step, metrics, batch, sent), self._pending = self._pending, None
        values = fetch(step, metrics, self._advice)
        self._profile.ended(step)
        self._describe(values, batch, self._clock.seconds(sent))
        self._writer.write(step, {f"train/{name}": value for name, value in values.items()})
        self._writer.progress(step, values["loss"])
