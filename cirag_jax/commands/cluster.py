"""Workers on a Ray cluster (``config.engine=ray``): the one module that knows Ray, an extra.

A command hands tasks out and gets them back in the order in which it gave them, so that what it
writes is what it would have written alone. A worker that dies is replaced, and its task done again
by whichever worker is free.
"""

import collections
import dataclasses
import itertools
import os
import pathlib
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import jax

from cirag_jax import cli
from cirag_jax.errors import UserError, check_at_least, check_choice, extra, parsing
from cirag_jax.io import one_line, say
from cirag_jax.types import Config

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TRIES = 3  # Of a task, and of opening a model, until it is what kills the workers.
_AHEAD = 8  # Tasks a worker that may be begun before the oldest has come back.


class Task(Protocol):
    """What a worker is given; ``name`` is for messages."""

    @property
    def name(self) -> str:
        """See the class."""
        ...


T = TypeVar("T", bound=Task)
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
      tasks: taken one by one, `_AHEAD` a worker ahead of the oldest that has not come back.
      config: of the command; ``workers`` of them, by default one a GPU, or one a node.
      workdir: of the command.
      on_devices: whether a worker computes on a GPU, where the cluster has any.
    """
    ray = _extra()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
        yield from _Crew(ray, make, config.workers, workdir.resolve(), on_devices).run(tasks)
    finally:
        ray.shutdown()


def _extra() -> Any:
    return extra("ray", "config.engine=ray", "requirements-cluster.txt")


class _Worker:
    """Lives in a process of its own on a node of the cluster."""

    def open(self, folders: Iterable[pathlib.Path], make: Callable[[], Any]) -> None:
        """Opens what does the tasks, in the first folder, which is where the command runs."""
        for folder in reversed(list(folders)):
            if not folder.is_dir():
                raise UserError(
                    f"{folder} is not there on {socket.gethostname()}, a node of the Ray cluster; "
                    "the command's folder and its --workdir must lie where all nodes see them"
                )
            os.chdir(folder)
        cli.enable_compilation_cache()
        self._work = make()

    def do(self, task: Any) -> Any:
        """Returns what becomes of the task."""
        return self._work(task)


@dataclasses.dataclass(eq=False)
class _Entry:
    """A task, the workers that died of it, and what became of it."""

    task: Any
    deaths: int = 0
    is_done: bool = False
    result: Any = None


class _Crew:
    """The workers of a command, and what each of them does."""

    def __init__(
        self,
        ray: Any,
        make: Callable[[], Any],
        count: int,
        workdir: pathlib.Path,
        on_devices: bool,
    ):
        self._ray, self._make = ray, make
        self._folders = (pathlib.Path.cwd(), workdir)
        gpus = int(ray.cluster_resources().get("GPU", 0)) if on_devices else 0
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        self._count = count or gpus or len(nodes) or 1
        paths = filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
        # The command itself keeps off the GPUs (`cli`), and what it starts would inherit that.
        variables = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "" if gpus else "cpu"}
        self._actor = ray.remote(
            num_cpus=1,
            num_gpus=1 if gpus else 0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": variables},
        )(_Worker)
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, _Entry | None]] = {}  # None: it opens its model
        self._stillborn = 0  # workers that died at that, one after the other

    def run(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yields tasks and results, in the order of the tasks."""
        tasks = iter(tasks)
        under_way: collections.deque[_Entry] = collections.deque()  # the oldest first
        todo: collections.deque[_Entry] = collections.deque()  # those that no worker has
        while True:
            wanted = max(len(self._idle) - len(todo), 0 if under_way else 1)
            room = _AHEAD * self._count - len(under_way)
            new = [_Entry(task) for task in itertools.islice(tasks, min(wanted, room))]
            under_way.extend(new)
            todo.extend(new)
            while self._idle and todo:
                actor, entry = self._idle.pop(), todo.popleft()
                self._busy[actor.do.remote(entry.task)] = actor, entry
            if not under_way:
                return
            if not self._idle and not self._busy:
                say(f"Ray: {self._count} workers")
                for _ in range(self._count):
                    self._start()
            if under_way[0].is_done:
                done = under_way.popleft()
                yield done.task, done.result
            else:
                todo.extendleft(self._wait())

    def _start(self) -> None:
        actor = self._actor.remote()
        self._busy[actor.open.remote(self._folders, self._make)] = actor, None

    def _wait(self) -> list[_Entry]:
        """Waits until a worker is free; returns what one that died instead leaves to others."""
        errors = self._ray.exceptions
        (call,), _ = self._ray.wait(list(self._busy), num_returns=1)
        actor, entry = self._busy.pop(call)
        try:
            result = self._ray.get(call)
        except errors.RayTaskError as error:
            raise error.cause from error
        except (errors.RayActorError, errors.OutOfMemoryError) as error:
            self._ray.kill(actor)  # Ray may have lost sight of it only
            self._mourn(entry, one_line(str(error)))
            self._start()
            return [entry] if entry else []
        self._idle.append(actor)
        if entry:
            entry.result, entry.is_done = result, True
        else:
            self._stillborn = 0
        return []

    def _mourn(self, entry: _Entry | None, why: str) -> None:
        """Says that a worker has died; raises `UserError` where that goes on and on."""
        if entry:
            entry.deaths += 1
        else:
            self._stillborn += 1
        at, deaths = (entry.task.name, entry.deaths) if entry else ("its start", self._stillborn)
        if deaths == _TRIES:
            raise UserError(
                f"{deaths} workers of the Ray cluster have died at {at}, the last so: {why[:300]}; "
                "what is done is kept, and the same command goes on from there"
            )
        say(f"WARNING: a worker of the Ray cluster has died at {at}; another takes its place")
