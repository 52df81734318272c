"""The training loop: the order of its calls, saving, stopping and resuming."""

from typing import NamedTuple

import pytest
from ml_collections import ConfigDict

from cirag_jax.errors import UserError
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
    """A training state that is the sum of all batch numbers so far."""

    params: float


class RecordingCheckpoints:
    """Replaces `Checkpoints`: records saves, and ranks by ``dev/mrr``.

    ``restored`` maps the step of a saved checkpoint to its parameters.
    """

    def __init__(self, log, directory, restored):
        self.log, self.saved, self.restored = log, {}, restored
        self.directory = directory / "checkpoints"

    def latest_step(self):
        return max(self.restored, default=None)

    def meta(self):
        return META

    def restore(self, step, state, data):
        step = self.latest_step() if step is None else step
        data.set_state({"step": step})
        return Restored(step, state._replace(params=self.restored[step]), None, META, None)

    def save(self, step, state, data, meta, metrics=None):
        self.log.append(f"save {step}")
        assert meta == META
        self.saved[step] = state.params, data.get_state(), metrics

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


@pytest.fixture()
def log():
    return []


@pytest.fixture()
def run(log, tmp_path, monkeypatch):
    """Returns a function that runs `fit` on a state that sums its batches.

    A stop is requested after step ``stop_at``. The loss of step ``bad`` is not finite. ``restored``
    has the parameters of earlier checkpoints by step. Returns the result and the checkpoints.
    """

    def start(total, *, restored=(), stop_at=0, bad=0, has_dev=True, **changes):
        settings = {"eval_every": 0, "save_every": 0, "stop_after_minutes": 0.0, **changes}
        checkpoints = RecordingCheckpoints(log, tmp_path, dict(restored))

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
            loss = float("nan") if batch.number == bad else 1.0 / batch.number
            return State(state.params + batch.number), {"loss": LateLoss(log, batch.number, loss)}

        def evaluate(params):
            log.append("evaluate")
            return {"dev/mrr": params} if has_dev else {}

        result = fit(
            ConfigDict(settings),
            tmp_path,
            train_step,
            State(0.0),
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


def test_fit_waits_then_evaluates_then_saves(run, log):
    result, checkpoints = run(5, eval_every=2)
    assert log == [
        "evaluate",
        "batch 1", "send 1", "ask 1",
        "batch 2", "send 2", "finish 1", "ask 2", "finish 2", "evaluate", "save 2",
        "batch 3", "send 3", "ask 3",
        "batch 4", "send 4", "finish 3", "ask 4", "finish 4", "evaluate", "save 4",
        "batch 5", "send 5", "ask 5", "finish 5", "evaluate", "save 5",
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


@pytest.mark.parametrize("settings", [{"save_every": 1}, {"eval_every": 3}, {"stop_at": 3}])
def test_fit_state_that_is_not_finite_is_not_saved(run, log, settings):
    with pytest.raises(UserError, match=r"step 3: loss is not finite.* Lower the rate"):
        run(6, bad=3, **settings)
    assert "send 3" in log and "save 3" not in log
    assert "send 4" not in log


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


def test_fit_finished_run_does_nothing(run, log):
    result, checkpoints = run(4, restored={4: 10.0}, eval_every=2)
    assert log == ["wait"] and not checkpoints.saved
    assert (result.complete, result.step) == (True, 4)


def test_batch_iterator_state_is_last_step():
    batches = BatchIterator(lambda step: 10 * step)
    assert batches.get_state() == {"step": 0} and next(batches) == 10
    batches.set_state({"step": 2})
    assert batches.get_state() == {"step": 2}
    assert next(batches) == 30
    assert batches.get_state() == {"step": 3}
