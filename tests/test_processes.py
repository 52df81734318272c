"""How the processes of a run share out the GPUs of a node."""

import itertools
from typing import Any

import jax
import pytest
from jax._src import distributed

from cirag_jax import processes
from cirag_jax.errors import InUse, UserError


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "visible": "0,1,2,3"}, [0, 1, 2, 3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "visible": "0,1,2,3"}, [2]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "visible": "0,1,2,3,4,5,6,7"}, [4, 5]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8,4", "SLURM_NODEID": "1", "visible": "0,1,2,3"}, [2]),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2", "visible": "0,1,2,3"},
            [2],
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "visible": "0"}, [0]),  # bound to its own
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_GPUS_PER_TASK": "4", "visible": "0,1,2,3"},
            [0, 1, 2, 3],
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "visible": ""}, None),
    ],
)
def test_the_gpus_of_a_slurm_task(monkeypatch, env, expected):
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


class Service(dict[str, str]):
    """JAX's coordination service, as several processes see it."""

    def key_value_set(self, key: str, text: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self[key] = text

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, text) for key, text in self.items() if key.startswith(prefix)]


def test_who_hangs_is_missed_after_the_time_out_and_who_is_done_is_not():
    service = Service()
    first, second, third = (processes.Watch(service, i, 3, 30.0) for i in range(3))

    def exchange(now: float, *watches: processes.Watch) -> None:
        for watch in (first, second, third):
            watch.now = now
        for watch in (*watches, *watches):  # The second time all have told.
            watch.exchange()

    exchange(0, first, second, third)
    third.stop()
    exchange(20, first, second)
    first.step = 1
    exchange(40, first, second)
    exchange(69, first, second)
    assert first.missed() is None and third.missed() is None
    exchange(71, first, second)
    for watch in (first, second):  # Alive, and 31 s behind.
        assert "process 1 of 3 has been steps behind for 30 s" in str(watch.missed())
    second.step = 1
    exchange(72, first, second)
    exchange(73, first)  # hears the last of the second process
    exchange(101, first)
    assert first.missed() is None and second.missed() is None
    exchange(104, first)
    assert "process 1 of 3 has not been heard of for 30 s" in str(first.missed())
    assert "process 0 of 3 has not answered for 30 s" in str(second.missed())
    assert third.missed() is None


class Told(dict[str, str]):
    """JAX's coordination service, in which whoever has not spoken has nothing to say."""

    key_value_set = dict.__setitem__

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        return self.get(key, "=")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(InUse("in use"), InUse), (UserError("=a"), UserError), (OSError("x"), UserError)],
)
def test_an_error_in_one_process_is_one_of_its_kind_in_all(monkeypatch, error, kind):
    told, here = Told(), [0]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: here[0])
    monkeypatch.setattr(distributed.global_state, "client", told)

    def fail() -> Any:
        raise error

    for index, work, raised in ((0, fail, type(error)), (1, str, kind)):
        here[0] = index
        monkeypatch.setattr(processes, "_meetings", itertools.count())
        with pytest.raises(raised) as caught:
            processes.together(work)
        assert type(caught.value) is raised
    assert str(caught.value) == f"process 0 of 2 failed: {error}"
