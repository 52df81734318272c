"""Runs the scripts of launch/ in forks of a process that has imported everything.

This avoids the start-up time of commands. The process uses no device, so a fork behaves like a new
process. `CommandServer` starts the process. Each line of the standard input describes runs, and
each line of the standard output contains the exit statuses of these runs. A run's hooks are
functions of `tests.hooks` with arguments; they are called in the fork before the script starts.
"""

import importlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.paths import processes
from tests import hooks

_ROOT = pathlib.Path(__file__).resolve().parents[1]


class Done(NamedTuple):
    """The exit status (negative after a signal) and output of a command."""

    returncode: int
    stdout: str
    stderr: str


class CommandServer:
    """Runs scripts of launch/ when called. As a context manager, it ends the server process."""

    def __init__(self):
        environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "CIRAG_JAX_CACHE": "0",
            "JAX_NUM_CPU_DEVICES": "1",
        }
        environment.pop("NPROC", None)  # tests/conftest.py sets it for eight devices
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", "tests.command_server"],
            cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate()

    def __call__(self, script: str, *arguments: object, hooks: Sequence[list] = ()) -> Done:
        """Runs a script in one process. Each of the ``hooks`` is a list ``[name, *arguments]``."""
        return self._run([[script, *arguments]], [hooks])[0]

    def together(
        self,
        script: str,
        *arguments: object,
        count: int = 2,
        last: Sequence[object] = (),
        hooks: Sequence[list] = (),
    ) -> list[Done]:
        """Runs a script in several processes of one distributed run.

        The last process has the additional arguments ``last`` and the ``hooks``.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"--coordinator_address=127.0.0.1:{probe.getsockname()[1]}"
        several = [*arguments, f"--num_processes={count}", address]
        commands = [[script, *several, f"--process_id={i}"] for i in range(count)]
        commands[-1] += last
        return self._run(commands, [*[()] * (count - 1), hooks])

    def _run(self, commands: list[list[object]], hooks: Sequence[Sequence[list]]) -> list[Done]:
        with tempfile.TemporaryDirectory() as folder:
            plans = [
                {
                    "words": [f"launch/{script}", *map(str, arguments)],
                    "paths": [f"{folder}/{index}.out", f"{folder}/{index}.err"],
                    "hooked": list(hooks[index]),
                }
                for index, (script, *arguments) in enumerate(commands)
            ]
            self._process.stdin.write(json.dumps(plans) + "\n")
            self._process.stdin.flush()
            statuses = json.loads(self._process.stdout.readline())
            return [
                Done(status, *(pathlib.Path(path).read_text("utf-8") for path in plan["paths"]))
                for status, plan in zip(statuses, plans, strict=True)
            ]


def _fork(words: list[str], paths: list[str], hooked: list[list]) -> int:
    """Forks the server process to run a command."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name, *arguments in hooked:
            getattr(hooks, name)(*arguments)
        code = processes.run_command(words, str(_ROOT), *paths)
    except BaseException:  # of a hook
        traceback.print_exc()
    os._exit(code)


def main() -> None:
    importlib.import_module("experiments.paths.preload")
    for line in sys.stdin:
        children = [_fork(**plan) for plan in json.loads(line)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
