"""Workers on a Ray cluster (``config.engine=ray``). No other module imports Ray, which is optional.

Results come in the order of the tasks, so a command writes the same output as without a cluster.
Ray restarts a worker that dies, and retries its task.
"""

import collections
import itertools
import os
import pathlib
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar

import jax

from cirag_jax import cli
from cirag_jax.errors import UserError, check_at_least, import_optional, parsing
from cirag_jax.io import one_line, say
from cirag_jax.types import Config
from cirag_jax.validation import check_value

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TRIES = 3  # maximum number of attempts at a task whose worker dies
_AHEAD = 8  # maximum number of tasks per worker that start before the oldest is done


class NamedTask(Protocol):
    """A task of a worker."""

    @property
    def name(self) -> str:
        """The name of the task in messages."""
        ...


T = TypeVar("T", bound=NamedTask)
R = TypeVar("R")


def is_chosen(config: Config) -> bool:
    """Returns whether ``config.engine`` is ray; raises `UserError` if Ray is not installed."""
    check_value("config.engine", config.engine, Literal["local", "ray"])
    if config.engine == "local":
        return False
    check_at_least(0, config, "workers")
    if jax.process_count() > 1:
        raise UserError("config.engine=ray starts its own workers; run the command in one process.")
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
    """Yields each task and its result, in the order of the tasks.

    ``RAY_ADDRESS`` names the cluster. If it is not set, Ray starts a cluster on this machine. All
    nodes must have this repository, the current directory and ``workdir`` under the same paths.

    Args:
      make: called once in each worker; returns the function that runs the worker's tasks. The
        objects that ``make`` captures, the tasks and the results are pickled.
      tasks: read lazily; at most `_AHEAD` tasks per worker start before the oldest one is done.
      config: has the number of ``workers``; 0 means one per GPU, or one per node without GPUs.
      workdir: the workdir of the command.
      on_devices: whether each worker uses a GPU if the cluster has any.
    """
    tasks = iter(tasks)
    first = list(itertools.islice(tasks, 1))
    if not first:
        return
    ray = _extra()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_task_oom_retries", str(_TRIES - 1))  # by default without a limit
    with parsing("cannot join or start a Ray cluster"), warnings.catch_warnings():
        # Starting a cluster forks this process. JAX warns that forking is unsafe with threads, but
        # its threads hold no lock that Ray needs.
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
    return import_optional("ray", "config.engine=ray", "cluster")


class _Actor:
    """A worker in a separate process on a node of the cluster."""

    def __init__(self, folders: tuple[pathlib.Path, ...], make: Callable[[], Callable[[Any], Any]]):
        self._folders, self._make = folders, make
        self._work: Callable[[Any], Any] | None = None

    def do(self, task: Any) -> tuple[Any, bool]:
        """Returns the result of a task, and whether this worker replaces one that died.

        The first call changes to the command's current directory (the first folder) and loads the
        model. If the worker loaded it in ``__init__`` and died there, Ray would restart it forever.
        """
        if self._work is not None:
            return self._work(task), False
        for folder in reversed(self._folders):
            if not folder.is_dir():
                raise UserError(
                    f"{folder} does not exist on {socket.gethostname()}, a Ray node; "
                    "put the current directory and --workdir on a file system that all nodes share"
                )
            os.chdir(folder)
        cli.enable_compilation_cache()
        self._work = self._make()
        return self._work(task), _extra().get_runtime_context().was_current_actor_reconstructed


def _actor_options(ray: Any, on_devices: bool) -> tuple[int, dict[str, Any]]:
    """Returns the default number of workers, and Ray's options for a worker."""
    gpus = int(ray.cluster_resources().get("GPU", 0)) if on_devices else 0
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    paths = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
    # The command itself runs without GPUs (`cli`); workers must not inherit this setting.
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
    """Yields tasks and results in the order of the tasks; idle workers start the next task."""
    tasks, idle = iter(tasks), list(workers)
    started: collections.deque[tuple[T, Any]] = collections.deque()  # tasks and calls
    busy: dict[Any, tuple[T, Any]] = {}  # call -> task and worker
    results: dict[Any, Any] = {}
    while True:
        capacity = min(len(idle), _AHEAD * len(workers) - len(started))
        for task in itertools.islice(tasks, capacity):
            worker = idle.pop()
            call = worker.do.remote(task)
            started.append((task, call))
            busy[call] = task, worker
        if not started:
            return
        task, call = started[0]
        if call in results:
            started.popleft()
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
            f"{_TRIES} Ray workers died in {task.name}; the last error: "
            f"{one_line(str(error))[:300]}; progress is saved, run the same command to resume"
        ) from None
    if is_replacement:
        say(f"WARNING: a worker of the Ray cluster died in {task.name}; Ray replaced it")
    return result
