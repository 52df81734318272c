"""Several processes of one run: how they find each other, act together, and miss one that hangs."""

import atexit
import contextlib
import glob
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from cirag_jax.errors import InUse, UserError
from cirag_jax.io import one_line, say

T = TypeVar("T")

TIMEOUT = 300  # seconds
_A_YEAR_MS = 1000 * 3600 * 24 * 365
_ALIVE = "cirag_jax/alive/"  # INDEX: what a process tells of itself
_watch: "Watch | None" = None
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

    From then on a process that hangs for ``timeout`` seconds ends the run, see `Watch`.
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

    # JAX's own heartbeat ends a run too, by an abort that names no process: after ours.
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        gpus,
        heartbeat_timeout_seconds=timeout + 60,
    )
    if jax.process_count() > 1:
        global _watch
        _watch = Watch(_client(), jax.process_index(), jax.process_count(), timeout)
        _watch.start()
    return jax.process_index(), jax.process_count()


def _client() -> Any:
    """Of JAX's coordination service: unlike a collective, it can wait for hours."""
    from jax._src import distributed

    return distributed.global_state.client


def together(work: Callable[[], T]) -> T:
    """Runs ``work`` in every process of this run and waits for all; an error in one is one in all.

    Returns what this process's ``work`` returned.
    """
    import jax

    if jax.process_count() == 1:
        return work()
    client = _client()
    place = f"cirag_jax/together/{next(_meetings)}"
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    text = "" if error is None else one_line(str(error)) or type(error).__name__
    kind = InUse.__name__ if isinstance(error, InUse) else ""
    client.key_value_set(f"{place}/{jax.process_index()}", f"{kind}={text}")
    count = jax.process_count()
    told = [client.blocking_key_value_get(f"{place}/{i}", _A_YEAR_MS) for i in range(count)]
    if error is not None:
        raise error
    for index, (kind, _, text) in enumerate(one.partition("=") for one in told):
        if text:
            raised = InUse if kind == InUse.__name__ else UserError
            raise raised(f"process {index} of {count} failed: {text}")
    return cast(T, result)


def arrived(step: int) -> None:
    """Tells the others, if there are any, that this process has done ``step`` steps."""
    if _watch is not None:
        _watch.step = step


class Watch:
    """Ends this process, with exit code 2, where another of the run hangs, and says which.

    Each process tells all others, over JAX's coordination service, that it is alive and how many
    steps it has done. One is missed that has told nothing for ``seconds``, its host down or itself
    stopped; and one that has lagged behind the steps of another for as long, while it is alive. A
    process whose main thread waits for such a one in a collective would wait for ever.

    Checkpoints are renamed when they are whole, journals written line by line: to end anywhere
    loses what came after them.
    """

    def __init__(self, client: Any, index: int, count: int, seconds: float):
        self.step = 0
        self._client, self._index, self._count, self._seconds = client, index, count, seconds
        self._pause = min(seconds / 10, 10.0)
        self._beats, self._lock, self._ended = itertools.count(), threading.Lock(), False
        self.now = 0.0  # Seconds; those that this process itself stood still do not count.
        self._answered = 0.0  # when the service did
        self._told = {i: ("", 0.0) for i in range(count)}  # what each told, and since when
        self._behind: dict[int, float] = {}  # since when

    def start(self) -> None:
        """Begins; until the process exits."""
        atexit.register(self.stop)
        for work in (self._beat, self._look):
            threading.Thread(target=work, daemon=True).start()

    def stop(self) -> None:
        """Tells that this process has come to its end, and misses nobody any more."""
        with contextlib.suppress(Exception), self._lock:  # The service may be gone already.
            self._ended = True
            self._tell("done")
        self._seconds = float("inf")

    def exchange(self) -> None:
        """Tells of this process, unless it has ended, and hears of all."""
        if self._ended:
            return
        self._tell(f"{next(self._beats)} {self.step}")
        for key, text in self._client.key_value_dir_get(_ALIVE):
            index = int(key.rpartition("/")[2])
            if text != self._told[index][0]:
                self._told[index] = text, self.now
        self._answered = self.now
        steps = {i: int(text.split()[1]) for i, (text, _) in self._told.items() if " " in text}
        ahead = max(steps.values(), default=0)
        since = self._behind
        self._behind = {i: since.get(i, self.now) for i, step in steps.items() if step < ahead}

    def missed(self) -> str | None:
        """Says which process is missed, if one is."""
        told = f"for {self._seconds:g} s (--process_timeout)"
        if self._index and self.now - self._answered > self._seconds:
            return f"process 0 of {self._count} has not answered {told}"
        for index, (text, since) in self._told.items():
            if text != "done" and self.now - since > self._seconds:
                return f"process {index} of {self._count} has not been heard of {told}"
        for index, since in self._behind.items():
            if self.now - since > self._seconds:
                return f"process {index} of {self._count} has been steps behind {told}"
        return None

    def _tell(self, text: str) -> None:
        self._client.key_value_set(f"{_ALIVE}{self._index}", text, allow_overwrite=True)

    def _beat(self) -> None:
        while not self._ended:
            with contextlib.suppress(Exception), self._lock:  # Away, the service does not answer.
                self.exchange()
            time.sleep(self._pause)

    def _look(self) -> None:
        # Beside the beats: they wait for a service that is stopped.
        last = time.monotonic()
        while (missed := self.missed()) is None:
            time.sleep(self._pause)
            passed, last = time.monotonic() - last, time.monotonic()
            self.now += min(passed, 2 * self._pause)
        say(
            f"{os.path.basename(sys.argv[0])}: {missed}: it hangs, or its host is down; this "
            "process ends, and the same command goes on from what was saved"
        )
        if self._index == 0:  # The others need its service until they have missed the same one.
            time.sleep(3 * self._pause)
        os._exit(2)


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
