"""Ray's interface in one process: calls end in any order, and workers may die."""

import pickle
import random
import types
from collections.abc import Callable, Mapping
from typing import Any


class RayTaskError(Exception):
    """A call raised ``cause``."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class RayActorError(Exception):
    """A worker has died."""


class OutOfMemoryError(Exception):
    """A worker took too much memory."""


class Death(BaseException):
    """Raised in a worker, it kills that."""


class FakeRay:
    """What `cirag_jax.commands.cluster` uses of the module.

    A call is made when it is waited for, one of all that are under way, drawn by ``seed``.
    ``before(count)`` is called before the ``count``-th, and may raise what is raised in its worker,
    or a KeyboardInterrupt, which is raised in the command.

    Attributes:
      options: of every kind of worker.
      started: workers so far.
      inside: whether a cluster is joined.
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
        self._calls = self._lost = 0
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
        assert not self._lost, "workers that may live on were not killed"

    def cluster_resources(self) -> Mapping[str, float]:
        return self._resources

    def nodes(self) -> list[Mapping[str, Any]]:
        alive = {"Alive": True, "Resources": {"CPU": 2.0}}
        return [alive, alive, {"Alive": False, "Resources": {"CPU": 2.0}}]

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options.append(options)
        return lambda kind: types.SimpleNamespace(remote=lambda: self._start(kind))

    def _start(self, kind: type) -> Any:
        self.started += 1
        return _Handle(kind())

    def wait(self, calls: list["_Call"], num_returns: int) -> tuple[list["_Call"], list["_Call"]]:
        assert self.inside and num_returns == 1
        self._calls += 1
        call = self._random.choice(calls)
        try:
            self._before(self._calls)
            call.result = pickle.loads(pickle.dumps(call.make()))
        except OutOfMemoryError as error:
            self._lost += 1
            call.error = error
        except (Death, BaseExceptionGroup) as error:  # a task group's, with a death in it
            self._lost += 1
            call.error = RayActorError(repr(error))
        except Exception as error:
            call.error = RayTaskError(error)
        return [call], [other for other in calls if other is not call]

    def get(self, call: "_Call") -> Any:
        if call.error is not None:
            raise call.error
        return call.result

    def kill(self, actor: "_Handle") -> None:
        assert not actor.is_dead
        actor.is_dead = True
        self._lost -= 1


class _Call:
    def __init__(self, actor: "_Handle", make: Callable[[], Any]):
        self.actor, self.make = actor, make
        self.result: Any = None
        self.error: Exception | None = None


class _Handle:
    """Of a worker: ``handle.method.remote(...)``."""

    def __init__(self, actor: Any):
        self._actor = actor
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> _Call:
            assert not self.is_dead
            text = pickle.dumps(arguments)
            return _Call(self, lambda: getattr(self._actor, name)(*pickle.loads(text)))

        return types.SimpleNamespace(remote=remote)
