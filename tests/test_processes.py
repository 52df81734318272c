"""Sharing a node's GPUs, and reporting errors, among processes."""

import concurrent.futures
import itertools
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from cirag_jax import processes
from cirag_jax.errors import InUse, UserError


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "visible": "0,1,2,3"}, [0, 1, 2, 3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "visible": "0,1,2,3"}, [2]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "visible": "0,1,2,3,4,5,6,7"}, [4, 5]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8,4", "SLURM_NODEID": "1", "visible": "0,1,2,3"}, [2]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2", "visible": "0,1,2,3"}, [2]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "visible": "0"}, [0]),  # sees only its own
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_GPUS_PER_TASK": "4", "visible": "0,1,2,3"},
            [0, 1, 2, 3],
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "visible": ""}, None),
    ],
)
def test_slurm_gpus_are_divided_among_tasks(monkeypatch, env, expected):
    told = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **_: told.append(given))
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    alone = env["SLURM_STEP_TASKS_PER_NODE"].startswith("1")
    monkeypatch.setenv("SLURM_LOCALID", "0" if alone else "2")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    for name, value in env.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES" if name == "visible" else name, value)
    processes.setup_distributed()
    assert told == [(None, None, None, expected)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(InUse("in use"), InUse), (UserError("=a"), UserError), (OSError("x"), UserError)],
)
def test_together_error_has_same_type_in_all_processes(monkeypatch, error, kind):
    outcomes, met, here = np.zeros((2, processes._TEXT_BYTES), np.uint8), [], [0]

    def gather(bytes_B):
        outcomes[here[0]] = bytes_B
        return outcomes

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(multihost, "get_barrier_sync_fn", lambda: lambda **key: met.append(key))

    def fail() -> Any:
        raise error

    for index, work, raised in ((0, fail, type(error)), (1, str, kind)):
        here[0] = index
        monkeypatch.setattr(processes, "_barriers", itertools.count())
        with pytest.raises(raised) as caught:
            processes.together(work)
        assert type(caught.value) is raised
    assert str(caught.value) == f"process 0 of 2 failed: {error}"
    assert met[0] == met[1] and len(met) == 2


def gathers(monkeypatch, count):
    """Imitates ``count`` processes: each gather waits until all of them have called it."""
    rows, barrier = np.zeros((count, processes._TEXT_BYTES), np.uint8), threading.Barrier(count)
    here = threading.local()

    def gather(bytes_B):
        rows[here.index] = bytes_B
        barrier.wait()
        gathered = rows.copy()
        barrier.wait()
        return gathered

    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(multihost, "get_barrier_sync_fn", lambda: lambda **key: None)

    def run(work, *arguments):
        def start(index):
            here.index = index
            try:
                return work(arguments[index])
            except UserError as error:
                return str(error)

        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            return list(threads.map(start, range(count)))

    return run


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"config": {"rate": 0.1, "long": "y" * 9000}}, "config.rate=0.1, not 0.2; start all"),
        ({"config": {"rate": 0.2, "long": "x" * 9001}}, 'config.long="xxx'),
        ({"corpus.jsonl": "b" * 64}, "other content of corpus.jsonl; start all processes"),
        ({"more": "ä"}, 'more="ä", not null'),
    ],
)
def test_check_equal_first_difference_is_named_in_all_processes(monkeypatch, changed, words):
    fields = {"config": {"rate": 0.2, "long": "x" * 9000}, "corpus.jsonl": "a" * 64}
    run = gathers(monkeypatch, 3)
    outcomes = run(processes.check_equal, fields, dict(fields), {**fields, **changed})
    assert len(set(outcomes)) == 1
    if words is None:
        assert outcomes[0] is None
    else:
        assert str(outcomes[0]).startswith(f"process 2 of 3 was started with {words}")
