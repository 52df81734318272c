"""The training loop: the order of its calls, saving, stopping and resuming."""

import math
from typing import NamedTuple

import jax
import pytest
from ml_collections import ConfigDict

from cirag_jax.errors import TryAgain, UserError
from cirag_jax.models.io.checkpoints import Restored
from cirag_jax.training import fit as fit_lib
from cirag_jax.training.fit import BatchIterator, fit
from cirag_jax.training.preemption import PreemptionGuard
from tests.training.students import read_metrics

META = {"component": "test", "run": {"seed": 0}}


class Batch(NamedTuple):
    number: int
    tokens: int = 6
    padded_tokens: int = 8


class State(NamedTuple):
    """A training state: the sum of all batch numbers so far, except those of skipped steps."""

    params: float
    skipped_steps: int = 0


class RecordingCheckpoints:
    """Replaces `Checkpoints`: records saves, and ranks by ``dev/mrr``.

    ``restored`` maps the step of a saved checkpoint to its parameters.
    """

    def __init__(self, log, directory, restored, restored_metrics):
        self.log, self.saved, self.restored = log, {}, restored
        self.directory = directory / "checkpoints"
        self.restored_metrics = restored_metrics

    def latest_step(self):
        return max(self.restored, default=None)

    def meta(self):
        return META

    def restore(self, step, state):
        step = self.latest_step() if step is None else step
        state = state._replace(params=self.restored[step])
        return Restored(step, state, {"step": step}, self.restored_metrics)

    def save(self, step, state, data_state, meta):
        self.log.append(f"save {step}")
        assert meta == META
        self.saved[step] = state.params, data_state, None

    def add_metrics(self, step, metrics):
        self.log.append(f"add {step}")
        saved = self.saved.get(step, (self.restored.get(step), {"step": step}, None))
        self.saved[step] = (*saved[:2], metrics)

    def wait(self):
        self.log.append("wait")

    def best_step(self):
        ranked = [step for step, (*_, metrics) in self.saved.items() if metrics]
        return max(ranked, key=lambda step: self.saved[step][2]["dev/mrr"], default=None)

    def metrics(self, step):
        return self.saved[step][2]


class LateLoss:
    """A loss that logs when the loop fetches it, which waits for the step."""

    def __init__(self, log, step, value):
        self.log, self.step, self.value = log, step, value

    def __float__(self):
        self.log.append(f"finish {self.step}")
        return self.value


class Killed(BaseException):
    pass


class Log(list[str]):
    """A list of events. The process is killed at the event ``killed_at``."""

    killed_at: str | None = None

    def append(self, event):
        super().append(event)
        if event == self.killed_at:
            raise Killed


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture()
def log():
    return Log()


@pytest.fixture()
def run(log, tmp_path, monkeypatch):
    """Returns a function that runs `fit` on a state that sums its batches.

    A stop is requested after step ``stop_at``. The losses of the steps ``bad`` are not finite, and
    ``skipped`` steps were skipped before. ``restored`` has the parameters of earlier checkpoints
    by step, the last with ``restored_metrics``. The process is killed when it writes ``killed_at``
    to the log. Each step takes ``seconds``. Returns the result and the checkpoints.
    """
    clock = Clock()
    monkeypatch.setattr(fit_lib, "time", clock)

    def start(
        total,
        *,
        restored=(),
        restored_metrics=None,
        stop_at=0,
        bad=(),
        skipped=0,
        has_dev=True,
        killed_at=None,
        seconds=1.0,
        **changes,
    ):
        settings = {
            "eval_every": 0, "save_every": 0, "save_minutes": 0.0, "stop_after_minutes": 0.0,
            "max_skipped_steps": 10, **changes,
        }  # fmt: skip
        log.killed_at = killed_at
        checkpoints = RecordingCheckpoints(log, tmp_path, dict(restored), restored_metrics)
        start.checkpoints = checkpoints

        class Guard(PreemptionGuard):
            def should_stop(self, step):
                log.append(f"ask {step}")
                return step == stop_at

        monkeypatch.setattr(fit_lib, "PreemptionGuard", Guard)

        def batch_of(step):
            log.append(f"batch {step}")
            return Batch(step)

        def train_step(state, batch):
            log.append(f"send {batch.number}")
            clock.now += seconds
            is_bad = batch.number in bad
            loss = LateLoss(log, batch.number, math.nan if is_bad else 1.0 / batch.number)
            params = state.params + (0 if is_bad else batch.number)
            state = State(params, state.skipped_steps + is_bad)
            return state, {"loss": loss, "skipped_steps": state.skipped_steps}

        def evaluate(params):
            log.append("evaluate")
            clock.now += 100
            return {"dev/mrr": params} if has_dev else {}

        result = fit(
            ConfigDict(settings),
            tmp_path,
            train_step,
            State(0.0, skipped),
            BatchIterator(batch_of),
            evaluate,
            checkpoints,
            META,
            total_steps=total,
            start=0.0,
            advice="Lower the rate",
        )
        return result, checkpoints

    return start


def test_fit_sends_next_step_before_waiting(run, log):
    run(3)
    sent_and_finished = [event for event in log if event.split()[0] in ("send", "finish")]
    assert sent_and_finished == [
        "send 1", "send 2", "finish 1", "send 3", "finish 2", "finish 3",
    ]  # fmt: skip


def test_fit_waits_then_saves_then_evaluates(run, log):
    result, checkpoints = run(5, eval_every=2)
    assert log == [
        "evaluate",
        "batch 1", "send 1", "ask 1",
        "batch 2", "send 2", "finish 1", "ask 2", "finish 2", "save 2", "evaluate", "add 2",
        "batch 3", "send 3", "ask 3",
        "batch 4", "send 4", "finish 3", "ask 4", "finish 4", "save 4", "evaluate", "add 4",
        "batch 5", "send 5", "ask 5", "finish 5", "save 5", "evaluate", "add 5",
        "wait",
    ]  # fmt: skip
    assert checkpoints.saved[2] == (3.0, {"step": 2}, {"dev/mrr": 3.0})
    assert (result.complete, result.step, result.state.params) == (True, 5, 15.0)
    assert result.best == {"best_step": 5, "dev/mrr": 15.0}


def test_fit_metrics_file_has_each_step_and_evaluation_once(run, tmp_path):
    run(3, eval_every=2)
    lines = read_metrics(tmp_path)
    assert [(line["step"], "dev/mrr" in line) for line in lines] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (3, True),
    ]  # fmt: skip
    assert lines[1]["train/loss"] == 1.0 and lines[1]["train/padding"] == 0.25


def test_fit_save_every_saves_without_metrics(run):
    _, checkpoints = run(5, eval_every=4, save_every=3)
    saved = {step: metrics is not None for step, (*_, metrics) in checkpoints.saved.items()}
    assert saved == {3: False, 4: True, 5: True}


def test_fit_without_dev_examples_saves_last_step(run):
    result, checkpoints = run(2, has_dev=False)
    assert list(checkpoints.saved) == [2] and checkpoints.saved[2][2] is None
    assert result.best == {"best_step": None}


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_fit_consecutive_skipped_steps_stop_with_the_weights_before_them(run, log, limit):
    bad = range(3, 20)
    message = rf"the last {limit + 1} steps up to step {limit + 3} were skipped.* Lower the rate"
    with pytest.raises(TryAgain, match=message):
        run(30, bad=bad, max_skipped_steps=limit)
    assert run.checkpoints.saved == {limit + 3: (3.0, {"step": limit + 3}, None)}
    assert f"send {limit + 4}" not in log and log[-1] == "wait"


def test_fit_skipped_steps_are_counted_and_training_continues(run, tmp_path, capsys):
    result, _ = run(9, bad=(2, 3, 5, 6), max_skipped_steps=2)
    assert result.complete and result.state.params == 1 + 4 + 7 + 8 + 9
    lines = read_metrics(tmp_path)
    counts = {x["step"]: x["train/skipped_steps"] for x in lines if "train/loss" in x}
    assert list(counts.values()) == [0, 1, 2, 2, 3, 4, 4, 4, 4]
    assert [x["step"] for x in lines if x.get("train/loss", 0) is None] == [2, 3, 5, 6]
    assert "step 2 was skipped: loss not finite" in capsys.readouterr().err


def test_fit_most_steps_skipped_is_reported_at_the_end(run):
    message = "4 of 7 steps were skipped.* Lower the rate, and use another --workdir"
    with pytest.raises(UserError, match=message):
        run(7, bad=(1, 2, 4, 5))
    with pytest.raises(UserError, match=message):  # Also if the run is repeated.
        run(7, restored={7: 16.0}, skipped=4)


def test_fit_stopped_by_skipped_steps_resumes_after_them(run, log):
    with pytest.raises(TryAgain):
        run(8, bad=range(3, 7), max_skipped_steps=1)
    log.clear()
    result, _ = run(8, bad=range(3, 6), max_skipped_steps=1, restored={4: 3.0}, skipped=2)
    assert log[0] == "batch 5" and result.state.params == 3 + 6 + 7 + 8


def test_fit_stop_between_evaluations_saves_the_step(run, log):
    result, checkpoints = run(6, eval_every=4, stop_at=3)
    assert (result.complete, result.step) == (False, 3)
    assert checkpoints.saved == {3: (6.0, {"step": 3}, None)}
    assert log[-4:] == ["ask 3", "finish 3", "save 3", "wait"]


def test_fit_stop_at_evaluation_saves_metrics(run):
    result, checkpoints = run(6, eval_every=2, stop_at=2)
    assert (result.complete, result.step) == (False, 2)
    assert checkpoints.saved[2][2] == {"dev/mrr": 3.0}


def test_fit_stop_after_last_step_is_complete(run):
    result, _ = run(3, stop_at=3)
    assert (result.complete, result.step) == (True, 3)


def test_fit_resumes_with_next_step(run, log):
    _, checkpoints = run(6, stop_at=3)
    log.clear()
    result, checkpoints = run(6, restored={3: checkpoints.saved[3][0]}, eval_every=6)
    assert log[:2] == ["batch 4", "send 4"]  # No evaluation before it.
    assert checkpoints.saved == {6: (21.0, {"step": 6}, {"dev/mrr": 21.0})}
    assert result.step == 6


@pytest.mark.parametrize("killed_at", ["evaluate", "add 4"])
@pytest.mark.parametrize("total", [4, 6])
def test_fit_killed_during_evaluation_repeats_only_the_evaluation(
    run, log, tmp_path, total, killed_at
):
    with pytest.raises(Killed):
        run(total, eval_every=4, killed_at=killed_at, restored={3: 6.0})
    assert run.checkpoints.saved == {4: (10.0, {"step": 4}, None)}
    log.clear()
    result, checkpoints = run(total, restored={4: 10.0}, eval_every=4)
    assert log[:2] == ["evaluate", "add 4"] and result.step == total
    assert checkpoints.saved[4] == (10.0, {"step": 4}, {"dev/mrr": 10.0})
    evaluated = [line["step"] for line in read_metrics(tmp_path) if "dev/mrr" in line]
    assert evaluated == [4, 6][: total // 2 - 1]
    trained = [line["step"] for line in read_metrics(tmp_path) if "train/loss" in line]
    assert trained == list(range(4, total + 1))


def test_fit_saves_after_minutes_of_training(run, log):
    _, checkpoints = run(40, save_minutes=1.0, seconds=7.0, has_dev=False)
    assert [*checkpoints.saved] == [9, 18, 27, 36, 40]  # 63 seconds are the first above a minute.
    assert {metrics for *_, metrics in checkpoints.saved.values()} == {None}


def test_save_timer_saves_of_two_processes_follow_the_first_clock(monkeypatch):
    clock, elapsed = Clock(), []
    monkeypatch.setattr(fit_lib, "time", clock)
    timers = [fit_lib._SaveTimer(1.0, 0) for _ in range(2)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def broadcast(value):  # The first process calls it first.
        elapsed.append(float(value))
        return elapsed[-2 + len(elapsed) % 2]

    monkeypatch.setattr(fit_lib.multihost_utils, "broadcast_one_to_all", broadcast)
    saved = []
    for step in range(1, 100):
        clock.now += 1.0
        is_due = timers[0].is_due(step)
        clock.now += 0.5
        assert timers[1].is_due(step) == is_due
        if is_due:
            saved.append(step)
            for timer in timers:
                timer.restart(step)
    assert saved == [41, 82] and len(elapsed) < 50


def test_fit_save_minutes_do_not_include_evaluations(run):
    _, checkpoints = run(20, save_minutes=1.0, seconds=10.0, eval_every=4)
    assert [*checkpoints.saved] == [4, 8, 12, 16, 20]


def test_fit_finished_run_does_nothing(run, log):
    metrics = {"dev/mrr": 10.0}
    result, checkpoints = run(4, restored={4: 10.0}, restored_metrics=metrics, eval_every=2)
    assert log == ["wait"] and not checkpoints.saved
    assert (result.complete, result.step) == (True, 4)


def test_batch_iterator_state_is_last_step():
    batches = BatchIterator(lambda step: 10 * step)
    assert batches.get_state() == {"step": 0} and next(batches) == 10
    batches.set_state({"step": 2})
    assert batches.get_state() == {"step": 2}
    assert next(batches) == 30
    assert batches.get_state() == {"step": 3}
