"""Evaluates the checkpoints of a training one by one, also while it runs."""

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
from cirag_jax.models.io.checkpoints import Checkpoints, keep_step, steps_in
from cirag_jax.types import Config

TRAINING = "training.json"  # the settings of the training that is followed
_SECONDS = 5.0  # between two looks at its folder


def follow(
    config: Config,
    workdir: pathlib.Path,
    evaluate: Callable[[Config, pathlib.Path], dict[str, Any]],
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Evaluates every checkpoint that it finds in the training workdir ``config.checkpoint``.

    Each is linked into ``workdir/step_N`` before it is read, so that the training may delete it;
    what ``evaluate`` leaves is there, too. The link of the best so far stays: its folder opens as a
    training workdir does. Ends when the training has come to its end, on SIGINT and SIGTERM, and
    after ``config.stop_after_minutes``; the same command goes on from there. Only the trained model
    is evaluated, and what ``config.systems`` names beside it.

    Args:
      config: of an evaluation, with ``metric``.
      workdir: gets ``table.md`` and ``result.json`` after every checkpoint.
      evaluate: takes the config of one checkpoint and its folder.
      wait: takes seconds; called where there is nothing to do.

    Returns:
      ``checkpoints``: of each its ``step`` and `series.figures`; ``metric``, ``best_step``, the
      ``best`` value and ``best_checkpoint``, a folder; ``complete``: whether the training has ended
      and all that it left is evaluated.
    """
    follower = _Follower(config, workdir, evaluate)
    complete = False
    with contextlib.suppress(KeyboardInterrupt), _interrupted_by_signals():
        complete = follower.watch(wait)
    if not complete:
        say("stopped before the end of the training; the same command goes on from here")
    return follower.report(complete)


class _Follower:
    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        evaluate: Callable[[Config, pathlib.Path], dict[str, Any]],
    ):
        if not config.checkpoint:
            raise UserError("config.checkpoint is required: the workdir of the training to follow.")
        self._training = pathlib.Path(config.checkpoint).expanduser()
        described = read_object(self._training / "config.json", optional=True)
        if described and "optimizer" not in described and not self._steps():
            raise UserError(f"{self._training} is no workdir of launch/train.py.")
        self._workdir, self._evaluate = workdir, evaluate
        self._config, self._metric = _of_one(config), series.metric_of(config)
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
        return steps_in(self._training / "checkpoints")

    def watch(self, wait: Callable[[float], None]) -> bool:
        """Evaluates until the training ends, or the time; returns whether it was the training."""
        waiting = bool(self._rows)
        while True:
            # Looked at first: a training's last checkpoint is there before it says that it ended.
            ended = read_object(self._training / "result.json", optional=True).get("complete")
            begun = {int(path.name) for path in self._workdir.glob("step_*/checkpoints/[0-9]*")}
            for step in sorted({*self._steps(), *begun} - self._rows.keys()):
                if self._is_late() or not self._add(step):
                    return False
            if ended is True:
                return True
            if self._is_late():
                return False
            if not self._rows and not waiting:
                say(f"waiting for the first checkpoint of {self._training}")
                waiting = True
            wait(_SECONDS)

    def _is_late(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until

    def _add(self, step: int) -> bool:
        """Evaluates a step, if it is still there; returns False where that was not finished."""
        folder, copy = self._folder(step), self._copy(step)
        if not keep_step(self._training / "checkpoints" / copy.name, copy):
            say(f"step {step} was deleted before it could be evaluated")
            return True
        self._check_training(folder)
        own = self._config.copy_and_resolve_references()
        with own.unlocked():
            own.checkpoint = str(folder)
            if self._until is not None:
                own.stop_after_minutes = max(self._until - time.monotonic(), 1.0) / 60
        result = cli.run_inside(folder, self._config, lambda: self._evaluate(own, folder))
        if result.get("complete") is False:
            return False
        self._rows[step] = series.figures(result, self._metric)
        self.report(complete=False, say_step=step)
        return True

    def _check_training(self, checkpoints: pathlib.Path) -> None:
        """Refuses the checkpoints of another training than those of before."""
        try:
            with Checkpoints(checkpoints, read_only=True) as opened:
                training = opened.meta().get("run", {})
        except UserError:
            return  # there is none yet, or none any more
        file = self._workdir / TRAINING
        if file.exists():
            check_same(self._workdir, read_object(file), training)
        else:
            write_json(file, training)

    def report(self, complete: bool, say_step: int | None = None) -> dict[str, Any]:
        """Writes what is known, and keeps the best checkpoint alone."""
        steps = sorted(self._rows)
        values = {step: next(iter(self._rows[step].values())) for step in steps}
        best = series.best_of(values, self._metric)
        for step in steps:
            if step != best:
                shutil.rmtree(self._folder(step) / "checkpoints", ignore_errors=True)
        kept = None
        if best is not None and self._copy(best).is_dir():
            kept = str(self._folder(best))
        result = {
            "metric": self._metric,
            "checkpoints": [{"step": step, **self._rows[step]} for step in steps],
            "best_step": best,
            "best": None if best is None else values[best],
            "best_checkpoint": kept,
            "complete": complete,
        }
        text = f"{self._metric} is best at step {best}.\n\n" + series.table(
            {(str(step),): self._rows[step] for step in steps}, ("step",)
        )
        write_text(self._workdir / "table.md", (text, "\n"))
        write_json(self._workdir / "result.json", result)
        if say_step is not None:
            value, most = series.cell(values[say_step]), series.cell(result["best"])
            say(f"step {say_step}: {self._metric} {value}; best so far {most} at step {best}")
        return result


def _of_one(config: Config) -> Config:
    """The config of one evaluation, of the trained model alone."""
    one = config.copy_and_resolve_references()
    with one.unlocked():
        one.follow, one.checkpoint = False, str(pathlib.Path(one.checkpoint).expanduser().resolve())
        if "systems" in one and not one.systems:
            one.systems = ("trained",)
        if "base" in one:
            one.base.run = False
    return one


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGINT where a shell has switched it off, raise `KeyboardInterrupt`."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
