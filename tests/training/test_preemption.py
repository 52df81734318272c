import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from cirag_jax.training.preemption import PreemptionGuard


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_guard_signal_stops_after_step(number):
    with PreemptionGuard() as guard:
        assert not guard.should_stop(1)
        os.kill(os.getpid(), number)
        assert guard.should_stop(2)
        assert guard.signal_name == number.name


def test_guard_second_sigint_interrupts():
    with PreemptionGuard() as guard, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        assert guard.should_stop(1)
        signal.raise_signal(signal.SIGINT)


def test_guard_second_sigterm_does_not_interrupt():
    with PreemptionGuard() as guard:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert guard.should_stop(1)


def test_guard_restores_handlers_after_error():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(RuntimeError), PreemptionGuard():
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise RuntimeError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_guard_outside_main_thread_ignores_signals():
    stopped = []

    def work():
        with PreemptionGuard() as guard:
            stopped.append(guard.should_stop(1))
            guard.signal_name = "request"
            stopped.append(guard.should_stop(2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stopped == [False, True]


@pytest.mark.parametrize(("minutes", "stops"), [(0, False), (1, True), (1000, False)])
def test_guard_time_limit_stops(minutes, stops):
    with PreemptionGuard(time.monotonic() - 120, minutes) as guard:
        assert guard.should_stop(1) is stops


WORKER = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jax.experimental import multihost_utils
from cirag_jax.training.preemption import PreemptionGuard

by_signal, second = sys.argv[4] == "signal", jax.process_index() == 1
# Only the second process has a time limit, which is over.
start = time.monotonic() - (120 if second else 0)
with PreemptionGuard(start, 0 if by_signal else 1) as guard:
    for step in range(1, 2000):
        multihost_utils.process_allgather(jax.numpy.ones(1))  # Synchronizes like a train step.
        if step == 3 and second and by_signal:
            os.kill(os.getpid(), signal.SIGTERM)
        if guard.should_stop(step):
            print(step, guard.signal_name)
            break
"""


@pytest.mark.parametrize("why", ["signal", "time"])
def test_guard_processes_stop_after_same_step(repository, why):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(repository), address, str(index), why],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [out.splitlines()[-1] for out, _ in outputs]  # Gloo prints a line first.
    assert lines[0] == lines[1], outputs
    step, name = lines[0].split()
    assert int(step) >= (3 if why == "signal" else 1) and name == "SIGTERM"
