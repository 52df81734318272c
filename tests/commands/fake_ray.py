"""A fake Ray in one process: calls end in random order, and workers may die."""

import functools
import pickle
import random
import types
from collections.abc import Callable, Mapping
from typing import Any


class RayTaskError(Exception):
    """Raised if a call raised ``cause``."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class RayActorError(Exception):
    """Raised if a worker died."""


class OutOfMemoryError(Exception):
    """Raised if a worker used too much memory."""


class Death(BaseException):
    """Simulates the death of the worker in which it is raised."""


class FakeRay:
    """The parts of Ray that `cirag_jax.commands.cluster` uses.

    `wait` runs one of the pending calls, drawn by ``seed``. ``before(count)`` runs before call
    number ``count``. It may raise an exception of the worker, or a KeyboardInterrupt in the
    command. Workers that die are restarted, and their calls are retried, according to the options.

    Attributes:
      options: options of each kind of worker.
      started: number of worker starts, including restarts.
      inside: whether the command is connected to the cluster.
    """

    def __init__(
        self,
        resources: Mapping[str, float] | None = None,
        before: Callable[[int], Any] = lambda count: None,
        seed: int = 0,
    ):
        self._resources = dict(resources or {})
        self._before = before
        self._random = random.Random(seed)
        self._calls = 0
        self._is_restarted = False  # whether the current worker was restarted
        self.options: list[Mapping[str, Any]] = []
        self.started = 0
        self.inside = False
        self.exceptions = types.SimpleNamespace(
            RayTaskError=RayTaskError,
            RayActorError=RayActorError,
            OutOfMemoryError=OutOfMemoryError,
        )

    def init(self, address: str, **options: Any) -> None:
        assert not self.inside and address
        self.inside = True

    def shutdown(self) -> None:
        self.inside = False

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(was_current_actor_reconstructed=self._is_restarted)

    def cluster_resources(self) -> Mapping[str, float]:
        return self._resources

    def nodes(self) -> list[Mapping[str, Any]]:
        alive = {"Alive": True, "Resources": {"CPU": 2.0}}
        return [alive, alive, {"Alive": False, "Resources": {"CPU": 2.0}}]

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options.append(options)
        retries = options["max_task_retries"]
        assert options["max_restarts"] == -1

        def start(kind: type, *arguments: Any) -> "_Handle":
            text = pickle.dumps(arguments)
            return _Handle(self, lambda: kind(*pickle.loads(text)), retries)

        return lambda kind: types.SimpleNamespace(remote=functools.partial(start, kind))

    def wait(self, calls: list["_Call"], num_returns: int) -> tuple[list["_Call"], list["_Call"]]:
        assert self.inside and num_returns == 1
        while True:
            self._calls += 1
            call = self._random.choice(calls)
            if self._is_ended(call):
                return [call], [other for other in calls if other is not call]

    def _is_ended(self, call: "_Call") -> bool:
        """Runs a call; returns False if it killed its worker and must be retried."""
        self._is_restarted = call.handle.is_restarted
        try:
            self._before(self._calls)
            call.result = pickle.loads(pickle.dumps(call.make()))
        except (OutOfMemoryError, Death, BaseExceptionGroup) as error:  # of a task group
            call.handle.start(is_restarted=True)
            call.retries -= 1
            is_memory = isinstance(error, OutOfMemoryError)
            call.error = error if is_memory else RayActorError(repr(error))
            return call.retries < 0
        except Exception as error:
            call.error = RayTaskError(error)
        else:
            call.error = None
        return True

    def get(self, call: "_Call") -> Any:
        if call.error is not None:
            raise call.error
        return call.result


class _Call:
    def __init__(self, handle: "_Handle", make: Callable[[], Any], retries: int):
        self.handle, self.make, self.retries = handle, make, retries
        self.result: Any = None
        self.error: Exception | None = None


class _Handle:
    """A handle of a worker, for ``handle.method.remote(...)``."""

    def __init__(self, ray: FakeRay, make: Callable[[], Any], retries: int):
        self._ray, self._make, self._retries = ray, make, retries
        self.start(is_restarted=False)

    def start(self, is_restarted: bool) -> None:
        self._actor, self.is_restarted = self._make(), is_restarted
        self._ray.started += 1

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> _Call:
            text = pickle.dumps(arguments)

            def make() -> Any:
                return getattr(self._actor, name)(*pickle.loads(text))

            return _Call(self, make, self._retries)

        return types.SimpleNamespace(remote=remote)
