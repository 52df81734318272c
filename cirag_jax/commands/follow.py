"""Evaluation of every checkpoint of a training run, even while the run continues."""

import contextlib
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from cirag_jax import cli
from cirag_jax.commands import series, task
from cirag_jax.errors import UserError
from cirag_jax.identity import check_same
from cirag_jax.io import read_object, say, write_json, write_text
from cirag_jax.models.io.checkpoint_folders import folder_of, keep_step, steps_in
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.types import Config

TRAINING = "training.json"  # the settings of the training run
_SECONDS = 5.0  # between checks for new checkpoints


def follow(
    config: Config,
    workdir: pathlib.Path,
    evaluate: Callable[[Config, pathlib.Path], dict[str, Any]],
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Evaluates every checkpoint in the training workdir ``config.checkpoint``.

    Each checkpoint is linked into ``workdir/step_N``, so it remains if training deletes its own
    link. The outputs of ``evaluate`` are written to the same folder. After the evaluation, only the
    folder of the best checkpoint keeps its link, and can be used like a training workdir. By
    default, only the trained model is evaluated; ``config.systems`` adds other systems.

    Ends when training ends, on SIGINT or SIGTERM, or after ``config.stop_after_minutes``. Run the
    same command to resume.

    Args:
      config: the config of an evaluation, with ``metric``.
      workdir: ``table.md`` and ``result.json`` are written here after every checkpoint.
      evaluate: evaluates one checkpoint, given its config and folder.
      wait: sleeps for the given number of seconds.

    Returns:
      ``metric``; ``checkpoints``, each with its ``step`` and `series.figures`; ``best_step``, the
      ``best`` value and ``best_checkpoint``, a folder; and ``complete``: whether training has ended
      and all checkpoints are evaluated.
    """
    follower = _Follower(config, workdir, evaluate)
    complete = False
    with contextlib.suppress(KeyboardInterrupt), _interrupted_by_signals():
        complete = follower.watch(wait)
    if not complete:
        say("stopped before the end of training; run the same command to resume")
    return follower.report(complete)


class _Follower:
    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        evaluate: Callable[[Config, pathlib.Path], dict[str, Any]],
    ):
        if not config.checkpoint:
            raise UserError("config.checkpoint is required: the workdir of a training run.")
        self._training = pathlib.Path(config.checkpoint).expanduser()
        recorded = read_object(self._training / "config.json", optional=True)
        if recorded and "optimizer" not in recorded and not self._steps():
            raise UserError(f"{self._training} is not a workdir of launch/train.py.")
        self._workdir, self._evaluate = workdir, evaluate
        self._config, self._metric = _single_config(config), series.metric_of(config)
        self._until = task.deadline(config) if "stop_after_minutes" in config else None
        self._rows: dict[int, series.Figures] = {}
        for step in sorted(int(path.name[5:]) for path in workdir.glob("step_[0-9]*")):
            result = series.finished(self._folder(step), self._config)
            if result is not None:
                self._rows[step] = series.figures(result, self._metric)
        self._check_training(self._training)

    def _folder(self, step: int) -> pathlib.Path:
        return self._workdir / f"step_{step}"

    def _copy(self, step: int) -> pathlib.Path:
        return self._folder(step) / "checkpoints" / str(step)

    def _steps(self) -> list[int]:
        return steps_in(folder_of(self._training))

    def watch(self, wait: Callable[[float], None]) -> bool:
        """Evaluates until training ends or the time is up; returns whether training has ended."""
        is_waiting = bool(self._rows)
        while True:
            # Training writes the result after the last checkpoint, so the result is read first.
            result = read_object(self._training / "result.json", optional=True)
            linked = {int(path.name) for path in self._workdir.glob("step_*/checkpoints/[0-9]*")}
            for step in sorted({*self._steps(), *linked} - self._rows.keys()):
                if self._is_late() or not self._add(step):
                    return False
            if result.get("complete") is True:
                return True
            if self._is_late():
                return False
            if not self._rows and not is_waiting:
                say(f"waiting for the first checkpoint of {self._training}")
                is_waiting = True
            wait(_SECONDS)

    def _is_late(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until

    def _add(self, step: int) -> bool:
        """Evaluates a step if it still exists; returns False if the evaluation was stopped."""
        folder, copy = self._folder(step), self._copy(step)
        if not keep_step(folder_of(self._training) / copy.name, copy):
            say(f"step {step} was deleted before it could be evaluated")
            return True
        self._check_training(folder)
        config = self._config.copy_and_resolve_references()
        with config.unlocked():
            config.checkpoint = str(folder)
            if self._until is not None:
                config.stop_after_minutes = max(self._until - time.monotonic(), 1.0) / 60
        result = cli.run_inside(folder, self._config, lambda: self._evaluate(config, folder))
        if result.get("complete") is False:
            return False
        self._rows[step] = series.figures(result, self._metric)
        self.report(complete=False, new_step=step)
        return True

    def _check_training(self, checkpoints: pathlib.Path) -> None:
        """Raises `UserError` if earlier checkpoints are from a different training run."""
        try:
            with Checkpoints(checkpoints, read_only=True) as opened:
                training = opened.meta().get("run", {})
        except UserError:
            return  # no checkpoint yet, or all deleted
        file = self._workdir / TRAINING
        if file.exists():
            check_same(self._workdir, read_object(file), training)
        else:
            write_json(file, training)

    def report(self, complete: bool, new_step: int | None = None) -> dict[str, Any]:
        """Writes the table and the result; of the linked checkpoints, keeps only the best one."""
        steps = sorted(self._rows)
        values = {step: next(iter(self._rows[step].values())) for step in steps}
        best = series.best_of(values, self._metric)
        for step in steps:
            if step != best:
                shutil.rmtree(self._folder(step) / "checkpoints", ignore_errors=True)
        best_folder = None
        if best is not None and self._copy(best).is_dir():
            best_folder = str(self._folder(best))
        result = {
            "metric": self._metric,
            "checkpoints": [{"step": step, **self._rows[step]} for step in steps],
            "best_step": best,
            "best": None if best is None else values[best],
            "best_checkpoint": best_folder,
            "complete": complete,
        }
        note = series.recall_note(self._config)
        text = f"{self._metric} is best at step {best}.{note}\n\n" + series.table(
            {(str(step),): self._rows[step] for step in steps}, ("step",)
        )
        write_text(self._workdir / "table.md", (text, "\n"))
        write_json(self._workdir / "result.json", result)
        if new_step is not None:
            value, best_value = series.cell(values[new_step]), series.cell(result["best"])
            say(f"step {new_step}: {self._metric} {value}; best so far {best_value} at step {best}")
        return result


def _single_config(config: Config) -> Config:
    """Returns the config to evaluate one checkpoint, by default without other systems."""
    single = config.copy_and_resolve_references()
    with single.unlocked():
        single.follow = False
        single.checkpoint = str(pathlib.Path(config.checkpoint).expanduser().resolve())
        if "systems" in single and not single.systems:
            single.systems = ("trained",)
        if "base" in single:
            single.base.run = False
    return single


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raises `KeyboardInterrupt` on SIGTERM and SIGINT, even if the shell ignores SIGINT."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
