"""Workers on a Ray cluster (``config.engine=ray``): the one module that knows Ray, an extra.

A command hands out tasks and gets their results in the same order, so that it writes what it would
have written on its own. Ray restarts a worker that dies, and retries its task.
"""

import collections
import itertools
import os
import pathlib
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax

from cirag_jax import cli
from cirag_jax.errors import UserError, check_at_least, check_choice, import_optional, parsing
from cirag_jax.io import one_line, say
from cirag_jax.types import Config

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TRIES = 3  # of a task whose worker dies
_AHEAD = 8  # tasks per worker that may be begun before the oldest is done


class NamedTask(Protocol):
    """What a worker is given; ``name`` is for messages."""

    @property
    def name(self) -> str:
        """See the class."""
        ...


T = TypeVar("T", bound=NamedTask)
R = TypeVar("R")


def is_chosen(config: Config) -> bool:
    """Whether ``config.engine`` is ray, which must then be there."""
    check_choice("config.engine", config.engine, ("local", "ray"))
    if config.engine == "local":
        return False
    check_at_least(0, config, "workers")
    if jax.process_count() > 1:
        raise UserError("config.engine=ray runs in one process; Ray starts the others.")
    _extra()
    return True


def in_order(
    make: Callable[[], Callable[[T], R]],
    tasks: Iterable[T],
    config: Config,
    workdir: pathlib.Path,
    *,
    on_devices: bool,
) -> Iterator[tuple[T, R]]:
    """Yields each task with what a worker made of it, in the order of the tasks.

    The cluster is the one that ``RAY_ADDRESS`` names; without it Ray starts one of this machine
    alone. Its nodes see this repository, the current directory and ``workdir`` under the same
    paths.

    Args:
      make: called once in each worker; returns what does its tasks. What it captures, the tasks and
        their results are pickled.
      tasks: taken one by one, at most `_AHEAD` per worker before the oldest is done.
      config: of the command; ``workers`` of them, by default one a GPU, or one a node.
      workdir: of the command.
      on_devices: whether a worker computes on a GPU, where the cluster has any.
    """
    tasks = iter(tasks)
    first = list(itertools.islice(tasks, 1))
    if not first:
        return
    ray = _extra()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_task_oom_retries", str(_TRIES - 1))  # else without a limit
    with parsing("no Ray cluster could be joined or started"), warnings.catch_warnings():
        # To start one, it forks, and JAX warns of its threads: they hold nothing that it needs.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init(
            os.environ.get("RAY_ADDRESS") or "local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    try:
        count, options = _actor_options(ray, on_devices)
        actor, folders = ray.remote(**options)(_Actor), (pathlib.Path.cwd(), workdir.resolve())
        workers = [actor.remote(folders, make) for _ in range(config.workers or count)]
        say(f"Ray: {len(workers)} workers")
        yield from _run_tasks(ray, workers, itertools.chain(first, tasks))
    finally:
        ray.shutdown()


def _extra() -> Any:
    return import_optional("ray", "config.engine=ray", "requirements-cluster.txt")


class _Actor:
    """Lives in a process of its own on a node of the cluster; Ray restarts one that dies."""

    def __init__(self, folders: tuple[pathlib.Path, ...], make: Callable[[], Callable[[Any], Any]]):
        self._folders, self._make = folders, make
        self._work: Callable[[Any], Any] | None = None

    def do(self, task: Any) -> tuple[Any, bool]:
        """Returns the result of a task, and whether it replaces a worker that died at the task.

        The first task opens the model, in the first folder, which is where the command runs. Were
        it opened in ``__init__``, a worker that dies at that would be restarted forever.
        """
        if self._work is not None:
            return self._work(task), False
        for folder in reversed(self._folders):
            if not folder.is_dir():
                raise UserError(
                    f"{folder} is not there on {socket.gethostname()}, a node of the Ray cluster; "
                    "the command's folder and its --workdir must lie where all nodes see them"
                )
            os.chdir(folder)
        cli.enable_compilation_cache()
        self._work = self._make()
        return self._work(task), _extra().get_runtime_context().was_current_actor_reconstructed


def _actor_options(ray: Any, on_devices: bool) -> tuple[int, dict[str, Any]]:
    """Returns the default number of workers, and what Ray is told about each."""
    gpus = int(ray.cluster_resources().get("GPU", 0)) if on_devices else 0
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    paths = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
    # The command itself keeps off the GPUs (`cli`), and what it starts would inherit that.
    variables = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "" if gpus else "cpu"}
    return gpus or len(nodes) or 1, {
        "num_cpus": 1,
        "num_gpus": 1 if gpus else 0,
        "scheduling_strategy": "SPREAD",
        "runtime_env": {"env_vars": variables},
        "max_restarts": -1,
        "max_task_retries": _TRIES - 1,
    }


def _run_tasks(ray: Any, workers: Sequence[Any], tasks: Iterable[T]) -> Iterator[tuple[T, Any]]:
    """Yields tasks and results in the order of the tasks; a task is begun once a worker is idle."""
    tasks, idle = iter(tasks), list(workers)
    begun: collections.deque[tuple[T, Any]] = collections.deque()  # tasks and calls, oldest first
    busy: dict[Any, tuple[T, Any]] = {}  # by call: its task and worker
    results: dict[Any, Any] = {}
    while True:
        room = min(len(idle), _AHEAD * len(workers) - len(begun))
        for task in itertools.islice(tasks, room):
            worker = idle.pop()
            call = worker.do.remote(task)
            begun.append((task, call))
            busy[call] = task, worker
        if not begun:
            return
        task, call = begun[0]
        if call in results:
            begun.popleft()
            yield task, results.pop(call)
        else:
            (done,), _ = ray.wait(list(busy), num_returns=1)
            task, worker = busy.pop(done)
            results[done] = _result_of_call(ray, task, done)
            idle.append(worker)


def _result_of_call(ray: Any, task: NamedTask, call: Any) -> Any:
    try:
        result, is_replacement = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
        raise UserError(
            f"{_TRIES} workers of the Ray cluster have died at {task.name}, the last so: "
            f"{one_line(str(error))[:300]}; progress is saved: run the same command to resume"
        ) from None
    if is_replacement:
        say(f"WARNING: a worker of the Ray cluster has died at {task.name}; another took its place")
    return result
