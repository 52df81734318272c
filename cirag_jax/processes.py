"""Setup and synchronization of runs with several processes."""

import contextlib
import glob
import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

from cirag_jax.errors import InUse, UserError
from cirag_jax.identity import check_same
from cirag_jax.io import one_line, say

T = TypeVar("T")

_REMEDY = "start all processes with the same command, packages, models and data"

TIMEOUT = 300  # seconds without a heartbeat
_A_YEAR_MS = 1000 * 3600 * 24 * 365
_TEXT_BYTES = 4096  # length of error messages that processes exchange
_barriers = itertools.count()  # calls of `together`; equal in every process

_FAILED = "cirag_jax_failed"  # a key and a barrier of JAX's coordination service
_POLL = 0.5  # seconds until a failure of another process is noticed
_GRACE = 3.0  # seconds in which a process may end with a message of its own
_FAREWELL = 10.0  # seconds that a failed process waits for the others
_JOIN = 60  # seconds that a process that failed at once waits for the others to start
_known_error: BaseException | None = None  # the last error that all processes raise
_watcher: "_Watcher | None" = None


def setup_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = TIMEOUT,
    initialization_timeout: int = TIMEOUT,
) -> tuple[int, int]:
    """Joins the other processes of this run, if any; returns (process index, process count).

    Missing values are read from ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID``. Without these, JAX detects a SLURM step or Open MPI job of several tasks. In
    a SLURM step, the tasks of a node share its GPUs. A single process does not import JAX.

    If a process sends no heartbeat for ``timeout`` seconds, the other processes exit.
    ``initialization_timeout`` is the number of seconds to wait for processes that have not started.
    """
    env = os.environ
    coordinator_address = coordinator_address or env.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _int_or_env(num_processes, "JAX_NUM_PROCESSES")
    process_id = _int_or_env(process_id, "JAX_PROCESS_ID")
    gpus = None
    if coordinator_address is None and num_processes is None and process_id is None:
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
        coordinator_address,
        num_processes,
        process_id,
        gpus,
        heartbeat_timeout_seconds=timeout,
        initialization_timeout=initialization_timeout,
    )
    return jax.process_index(), jax.process_count()


class _Watcher:
    """Ends this process if another process of the run fails."""

    def __init__(self, program: str, index: int, count: int):
        from orbax.checkpoint._src.multihost import multihost

        self._client = multihost.get_jax_distributed_client()
        self._program, self._index, self._count = program, index, count
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def fail(self, message: str, code: int) -> NoReturn:
        """Reports a failure of this process, waits for the others and exits."""
        self._ending.set()
        failure = {"index": self._index, "message": message[:_TEXT_BYTES], "code": code}
        with contextlib.suppress(Exception):  # Another process has failed too.
            self._client.key_value_set(_FAILED, json.dumps(failure))
        self._exit(code)

    def _watch(self) -> None:
        while not self._ending.wait(_POLL):
            try:
                failure = json.loads(self._client.key_value_try_get(_FAILED))
            except Exception:  # No process has failed.
                continue
            if self._ending.wait(_GRACE):
                return
            where = f"process {failure['index']} of {self._count} failed"
            say(f"{self._program}: {where}: {failure['message']}")
            self._exit(failure["code"])

    def _exit(self, code: int) -> NoReturn:
        """Exits without JAX's shutdown, which waits for processes that are busy."""
        with contextlib.suppress(Exception):
            self._client.wait_at_barrier(_FAILED, int(1000 * _FAREWELL))
        if self._index == 0:  # The others abort if the service ends before them.
            time.sleep(1)
        _exit_now(code)


def watch(program: str) -> None:
    """Starts to end this process, with a message, when another process of the run fails."""
    import jax

    global _watcher
    _watcher = _Watcher(program, jax.process_index(), jax.process_count())


def stop_watching() -> None:
    """Stops what `watch` started, before this process ends without an error."""
    if _watcher is not None:
        _watcher.stop()


def fail(
    error: BaseException, code: int, program: str, join: Callable[[int], tuple[int, int]] | None
) -> None:
    """Ends all processes of this run because of ``error``; returns if this is the only one.

    Also returns if all processes raise the error, as after `together`.

    Args:
      error: the error, which this process has already printed.
      code: the exit code of all processes.
      program: name of the command.
      join: joins the other processes if that has not been done, see `setup_distributed`. It is
        called with the number of seconds to wait for them. None if they are unknown.
    """
    cause: BaseException | None = error
    while cause is not None:
        if cause is _known_error:
            stop_watching()
            return
        cause = cause.__cause__ or cause.__context__
    if _watcher is None and join is not None:
        try:
            if join(_JOIN)[1] == 1:
                return
            watch(program)
        except UserError:  # The flags are wrong, so there is no other process.
            return
        except Exception:  # The others have not started.
            _exit_now(code)
    if _watcher is not None:
        _watcher.fail(one_line(str(error)) or type(error).__name__, code)


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _known(error: T) -> T:
    """Remembers that all processes raise ``error``."""
    global _known_error
    _known_error = cast(BaseException, error)
    return error


def together(work: Callable[[], T]) -> T:
    """Runs ``work`` in every process and waits for all; if it fails in one, all processes raise.

    Returns the result of this process.
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
        raise _known(error)
    for index, outcome in enumerate(outcomes):
        kind, _, text = outcome.partition("=")
        if text:
            exception = InUse if kind == InUse.__name__ else UserError
            raise _known(exception(f"process {index} of {len(outcomes)} failed: {text}"))
    return cast(T, result)


def check_equal(fields: Mapping[str, Any]) -> None:
    """Raises `UserError` in all processes if their ``fields`` (JSON) differ.

    The message names the first field that differs.
    """
    import jax

    if jax.process_count() == 1:
        return
    text = json.dumps(fields)
    size = max(map(int, _exchange(str(len(text)))))
    parts = [_exchange(text[i : i + _TEXT_BYTES]) for i in range(0, size, _TEXT_BYTES)]
    first, *others = (json.loads("".join(texts)) for texts in zip(*parts, strict=True))
    for index, other in enumerate(others, 1):
        try:
            check_same(f"process {index} of {len(others) + 1}", other, first, _REMEDY)
        except UserError as error:
            raise _known(error) from None


def _exchange(text: str) -> list[str]:
    """Returns the texts of all processes, by index."""
    import numpy as np
    from jax.experimental import multihost_utils
    from orbax.checkpoint import multihost

    # Collectives time out if one process works for hours, so all wait at a barrier first.
    barrier = multihost.get_barrier_sync_fn()
    barrier(key=f"cirag_jax_together_{next(_barriers)}", timeout_ms=_A_YEAR_MS)
    encoded = text.encode()[:_TEXT_BYTES]
    bytes_B = np.zeros(_TEXT_BYTES, np.uint8)
    bytes_B[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    rows_PB = np.asarray(multihost_utils.process_allgather(bytes_B))
    return [row_B.tobytes().rstrip(b"\0").decode(errors="replace") for row_B in rows_PB]


def _count_gpus() -> int:
    """Counts the GPUs of this node that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _slurm_gpus(count: int) -> list[int] | None:
    """Returns this task's share of ``count`` visible GPUs in a SLURM step; None lets JAX choose.

    JAX would choose the GPU with the task's number: only one of eight GPUs if a node has one task,
    and a GPU that does not exist if SLURM shows each task only its own GPUs.
    """
    env = os.environ
    if not count or "SLURM_LOCALID" not in env:
        return None
    tasks = _slurm_tasks(env.get("SLURM_STEP_TASKS_PER_NODE") or "1")
    if "SLURM_GPUS_PER_TASK" in env or count < tasks:
        return list(range(count))  # SLURM shows only this task's GPUs
    share, task = count // tasks, int(env["SLURM_LOCALID"])
    return list(range(task * share, (task + 1) * share))


def _slurm_tasks(per_node: str) -> int:
    """Returns the number of tasks on this node; ``4(x2),3`` means 4, 4 and 3 on three nodes."""
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
