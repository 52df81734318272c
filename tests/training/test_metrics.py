import io
import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from tensorboardX.proto import event_pb2

from cirag_jax.training import metrics
from cirag_jax.training.metrics import MetricWriter, StepClock
from tests.training.students import read_metrics

events: Any = event_pb2  # Type checkers cannot resolve its classes.


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock of the module under test."""
    clock_ = Clock()
    monkeypatch.setattr(metrics, "time", clock_)
    return clock_


@pytest.fixture
def stderr(monkeypatch):
    """Replaces the standard error of the module under test."""
    return lambda made: monkeypatch.setattr(metrics, "sys", SimpleNamespace(stderr=made)) or made


@pytest.fixture
def stream(stderr):
    """A standard error that is not a terminal."""
    return stderr(io.StringIO())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def scalars(folder):
    """Returns the (tag, step, value) of every scalar that TensorBoard shows."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = events.Event.FromString(data[at + 12 : at + 12 + length])
            if event.session_log.status == events.SessionLog.START:  # TensorBoard does the same.
                found = [scalar for scalar in found if scalar[1] < event.step]
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 12 + length + 4
    return found


def test_writer_writes_lines_and_events(tmp_path, clock, stream):
    with MetricWriter(tmp_path, 2) as writer:
        clock.now += 1.5
        writer.write(1, {"loss": jnp.float32(0.5)})
        clock.now += 1.0
        writer.write(2, {"loss": 0.25, "norm": math.inf})
        # Lines are written immediately.
        assert len(read_metrics(tmp_path)) == 2
    assert read_metrics(tmp_path) == [
        {"step": 1, "seconds": 1.5, "loss": 0.5},
        {"step": 2, "seconds": 2.5, "loss": 0.25, "norm": None},
    ]
    assert scalars(tmp_path) == [("loss", 1, 0.5), ("loss", 2, 0.25)]


def test_writer_resumed_file_equals_uninterrupted(tmp_path, clock, stream):
    with MetricWriter(tmp_path, 6) as writer:
        for step in range(1, 5):
            clock.now += 1
            writer.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "seconds": NaN, "loss": 2.0}\n')  # damaged
        file.write('{"step": 2, "sec')  # Killed while writing.
    with MetricWriter(tmp_path, 6, 2) as writer:
        for step in range(3, 7):
            clock.now += 1
            writer.write(step, {"loss": float(step)})
    expected = [{"step": s, "seconds": float(s), "loss": float(s)} for s in range(1, 7)]
    assert read_metrics(tmp_path) == expected


def test_writer_new_run_replaces_file(tmp_path, stream):
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "seconds": 9.0}\n')
    with MetricWriter(tmp_path, 6):
        pass
    assert read_metrics(tmp_path) == []


def test_writer_remaining_time_uses_recent_steps(tmp_path, clock, stream, monkeypatch):
    """The estimate excludes old steps and the time before the first step."""
    monkeypatch.setattr(metrics, "_LINE_SECONDS", 0)
    with MetricWriter(tmp_path, 200) as writer:
        clock.now += 500  # Compilation, and the evaluation of the base.
        for step in range(1, 101):
            clock.now += 2 if step <= 50 else 4
            writer.progress(step, 0.5)
    shown = stream.getvalue().splitlines()
    assert shown[0] == "step 1/200, loss 0.5000"
    assert shown[1] == "step 2/200, loss 0.5000, 2.0 s/step, 06:36 left"
    assert shown[-1] == "step 100/200, loss 0.5000, 4.0 s/step, 06:40 left"


def test_writer_remaining_time_includes_future_evaluations(tmp_path, clock, stream, monkeypatch):
    monkeypatch.setattr(metrics, "_LINE_SECONDS", 0)

    def evaluation(seconds):
        clock.now += seconds
        return {"dev/loss": 1.0} if seconds > 50 else {}

    with MetricWriter(tmp_path, 10, evaluate_every=4) as writer:
        writer.evaluate(0, evaluation, 60)
        for step in range(1, 7):
            clock.now += 2
            writer.progress(step, 0.5)
            if step == 4:
                assert writer.evaluate(step, evaluation, 100) == {"dev/loss": 1.0}
        writer.evaluate(6, evaluation, 1)
        for step in range(7, 11):
            clock.now += 2
            writer.progress(step, 0.5)
            if step == 8:
                writer.evaluate(step, evaluation, 30)
        writer.evaluate(10, evaluation, 60)
        clock.now += 40
        writer.progress(10, 0.5)
    shown = stream.getvalue().splitlines()
    # Comments: remaining steps and evaluations.
    assert shown[2] == "step 3/10, loss 0.5000, 2.0 s/step, 03:14 left"  # 7 steps, 3 of 60 s
    assert shown[3] == "step 4/10, loss 0.5000, 2.0 s/step, 03:12 left"  # 6 steps, 3 (one due)
    assert shown[5] == "step 6/10, loss 0.5000, 2.0 s/step, 03:28 left"  # 4 steps, 2 of 100 s
    assert shown[9] == "step 10/10, loss 0.5000, 2.0 s/step, 00:30 left"  # the last evaluation
    assert shown[10].endswith(", 00:00 left")
    assert [line["step"] for line in read_metrics(tmp_path)] == [
        0,
        4,
        10,
    ]  # Empty metrics have no line.


def test_writer_bar_shows_own_remaining_time(tmp_path, clock, stderr):
    stream = stderr(Terminal())
    with MetricWriter(tmp_path, 10, evaluate_every=5) as writer:
        for step in range(1, 6):
            clock.now += 2
            writer.progress(step, 0.5)
        writer.evaluate(5, lambda seconds: setattr(clock, "now", clock.now + seconds) or {}, 60)
        clock.now += 2
        writer.progress(6, 0.5)
    assert ", loss 0.5000, 2.0 s/step, 01:08 left]" in stream.getvalue()  # 4 steps, 1 evaluation


def test_writer_run_without_checkpoint_restarts_file(tmp_path, stream):
    for name in ("events.1", "events.2"):  # Runs of the same second would share a file.
        with MetricWriter(tmp_path, 2) as writer:
            writer.write(0, {"loss": 2.0})
        (events_file,) = (tmp_path / "tensorboard").glob("events.out*")
        events_file.rename(events_file.with_name(name))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]
    assert scalars(tmp_path) == [("loss", 0, 2.0)]


def test_writer_without_terminal_prints_lines(tmp_path, clock, stream):
    with MetricWriter(tmp_path, 100, 10) as writer:
        for step in range(11, 101):
            clock.now += 1
            writer.progress(step, 0.5)
    assert stream.getvalue().splitlines() == [
        "step 40/100, loss 0.5000, 1.00 steps/s, 01:00 left",
        "step 70/100, loss 0.5000, 1.00 steps/s, 00:30 left",
        "step 100/100, loss 0.5000, 1.00 steps/s, 00:00 left",
    ]


def test_writer_error_closes_bar(tmp_path, clock, stderr):
    stream = stderr(Terminal())
    with pytest.raises(RuntimeError), MetricWriter(tmp_path, 10) as writer:
        clock.now += 5
        writer.progress(4, 0.5)
        raise RuntimeError
    shown = stream.getvalue()
    assert "4/10 [" in shown and ", loss 0.5000]" in shown
    assert shown.endswith("\n")
    writer.close()


def test_writer_disabled_writes_nothing(tmp_path, stream):
    with MetricWriter(tmp_path, 2, enabled=False) as writer:
        writer.write(1, {"loss": 0.5})
        writer.progress(2, 0.5)
        assert writer.evaluate(2, lambda x: {"dev": x}, 3.0) == {"dev": 3.0}
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_step_clock_measures_from_end_of_previous_step(clock):
    steps = StepClock()
    for now, sent, seconds in (
        (10.0, 4.0, 6.0),  # The first step starts when it is sent.
        (13.0, 9.0, 3.0),  # Sent while the first runs.
        (30.0, 25.0, 5.0),  # Sent after the second ended.
    ):
        clock.now = now
        assert steps.seconds(sent) == seconds
