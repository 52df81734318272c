"""Several processes of one run: how they find each other and act together."""

import glob
import itertools
import os
import re
from collections.abc import Callable
from typing import TypeVar, cast

from cirag_jax.errors import InUse, UserError
from cirag_jax.io import one_line

T = TypeVar("T")

TIMEOUT = 300  # seconds
_A_YEAR_MS = 1000 * 3600 * 24 * 365
_TEXT_BYTES = 4096  # Of an error that `together` passes on.
_meetings = itertools.count()  # of `together`: the same number in every process


def setup_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = TIMEOUT,
) -> tuple[int, int]:
    """Joins the other processes of this run, if there are any; returns (index, count).

    Values not given are taken from ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID``. Without them, a SLURM step or Open MPI job of several tasks is found by JAX
    itself; the GPUs of a node are shared out among its tasks in a SLURM step. A single process
    initialises nothing and does not import JAX.

    A process that sends JAX no heartbeat for ``timeout`` seconds (it is stopped, or its host down)
    ends the others.
    """
    env = os.environ
    coordinator_address = coordinator_address or env.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _int_or_env(num_processes, "JAX_NUM_PROCESSES")
    process_id = _int_or_env(process_id, "JAX_PROCESS_ID")
    given = [coordinator_address, num_processes, process_id]
    gpus = None
    if all(value is None for value in given):
        tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("OMPI_COMM_WORLD_SIZE") or "1"
        if int(tasks) <= 1:
            return 0, 1
        gpus = _slurm_gpus(_count_gpus())
    elif coordinator_address is None or num_processes is None or process_id is None:
        raise UserError(
            "--coordinator_address, --num_processes and --process_id (or JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID) must be given together"
        )
    elif process_id >= num_processes:
        raise UserError(
            f"--process_id={process_id} must be less than --num_processes={num_processes}"
        )
    import jax

    jax.distributed.initialize(
        coordinator_address, num_processes, process_id, gpus, heartbeat_timeout_seconds=timeout
    )
    return jax.process_index(), jax.process_count()


def together(work: Callable[[], T]) -> T:
    """Runs ``work`` in every process of this run and waits for all; an error in one is one in all.

    Returns what this process's ``work`` returned.
    """
    import jax

    if jax.process_count() == 1:
        return work()
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    text = "" if error is None else one_line(str(error)) or type(error).__name__
    kind = InUse.__name__ if isinstance(error, InUse) else ""
    outcomes = _exchange(f"{kind}={text}")
    if error is not None:
        raise error
    for index, (kind, _, text) in enumerate(one.partition("=") for one in outcomes):
        if text:
            raised = InUse if kind == InUse.__name__ else UserError
            raise raised(f"process {index} of {len(outcomes)} failed: {text}")
    return cast(T, result)


def _exchange(text: str) -> list[str]:
    """The texts of all processes, by index, once each has given its own."""
    import numpy as np
    from jax.experimental import multihost_utils
    from orbax.checkpoint import multihost

    # A collective times out where one process works for hours: all meet at a barrier first.
    meet = multihost.get_barrier_sync_fn()
    meet(key=f"cirag_jax_together_{next(_meetings)}", timeout_ms=_A_YEAR_MS)
    encoded = text.encode()[:_TEXT_BYTES]
    bytes_B = np.zeros(_TEXT_BYTES, np.uint8)
    bytes_B[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    rows_PB = np.asarray(multihost_utils.process_allgather(bytes_B))
    return [row_B.tobytes().rstrip(b"\0").decode(errors="replace") for row_B in rows_PB]


def _count_gpus() -> int:
    """GPUs of this node that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _slurm_gpus(count: int) -> list[int] | None:
    """Which of so many visible GPUs a task of a SLURM step takes; None: as JAX thinks best.

    JAX would take one, by the task's number: one of eight where a node has one task, and none where
    SLURM shows each task its own alone.
    """
    env = os.environ
    if not count or "SLURM_LOCALID" not in env:
        return None
    tasks = _slurm_tasks(env.get("SLURM_STEP_TASKS_PER_NODE") or "1")
    if "SLURM_GPUS_PER_TASK" in env or count < tasks:
        return list(range(count))  # its own
    share, place = count // tasks, int(env["SLURM_LOCALID"])
    return list(range(place * share, (place + 1) * share))


def _slurm_tasks(per_node: str) -> int:
    """Tasks of this node: ``4(x2),3`` are 4 on each of the first two nodes and 3 on the third."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        counts += [int(tasks)] * int(times or 1)
    node = int(os.environ.get("SLURM_NODEID") or 0)
    return counts[min(node, len(counts) - 1)]


def _int_or_env(value: int | None, name: str) -> int | None:
    text = os.environ.get(name)
    if value is not None or text is None:
        return value
    if not text.isdigit():
        raise UserError(f"environment variable {name}={text} is not a number")
    return int(text)
