"""Runs Python commands in processes that need no time to import the package."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from cirag_jax.io import Closing

# A fork of a process that has imported everything and used no device behaves like a new process.
# On other systems, libraries may not survive a fork.
_CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_CONTEXT.set_forkserver_preload(["experiments.paths.preload"])


def start(
    words: Sequence[str], cwd: pathlib.Path, output: pathlib.Path, errors: pathlib.Path
) -> BaseProcess:
    """Starts ``python WORDS`` in a folder; it is killed if this process ends.

    Args:
      words: a script or ``-m`` and a module, and the arguments.
      cwd: the folder.
      output: file that receives the standard output.
      errors: file to which the standard error is appended.
    """
    process = _CONTEXT.Process(target=_run, args=(list(words), str(cwd), str(output), str(errors)))
    process.start()
    return process


def _run(words: list[str], cwd: str, output: str, errors: str) -> None:
    _begin()
    _execute(words, cwd, output, errors)


def _begin() -> None:
    os.setsid()  # Otherwise, Ctrl-C would reach the command twice.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs ignore it.
    threading.Thread(target=_die_with_parent, daemon=True).start()


def run_command(words: list[str], cwd: str, output: str, errors: str) -> int:
    """Runs ``python WORDS`` in this process, see `start`; returns its exit code."""
    code = 0
    try:
        _execute(words, cwd, output, errors)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _execute(words: list[str], cwd: str, output: str, errors: str) -> None:
    for path, number, mode in ((output, 1, os.O_TRUNC), (errors, 2, os.O_APPEND)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------- shared processes


class Command:
    """A command in a shared process, with the attributes of a process of its own.

    Attributes:
      pid: of the process.
      sentinel: becomes ready when the command ends.
    """

    def __init__(self, process: BaseProcess, connection: Connection):
        self.pid, self.sentinel = process.pid, connection
        self._process, self._code = process, None

    @property
    def exitcode(self) -> int | None:
        """The exit code, or None while the command runs."""
        if self._code is None and self.sentinel.poll():
            try:
                self._code = self.sentinel.recv()
            except EOFError:  # The process was killed.
                self._process.join()
                self._code = self._process.exitcode or 1
        return self._code


class Workers(Closing):
    """Processes that run one command after another; a context manager.

    The second command of a process needs no time to trace and compile programs that the first one
    used. Commands that leave much in memory should not share a process.
    """

    def __init__(self):
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._last: dict[int, Command] = {}  # by index of the worker

    def start(
        self, words: Sequence[str], cwd: pathlib.Path, output: pathlib.Path, errors: pathlib.Path
    ) -> Command:
        """Starts ``python WORDS`` in an idle process, or in a new one; see `start`."""
        index = next((i for i in range(len(self._workers)) if self._is_idle(i)), None)
        if index is None:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            index = len(self._workers)
            self._workers.append((process, ours))
        process, connection = self._workers[index]
        connection.send((list(words), str(cwd), str(output), str(errors)))
        self._last[index] = Command(process, connection)
        return self._last[index]

    def _is_idle(self, index: int) -> bool:
        process, _ = self._workers[index]
        return process.is_alive() and self._last[index].exitcode is not None

    def close(self) -> None:
        """Ends all processes."""
        for process, _ in self._workers:
            process.kill()
        for process, connection in self._workers:
            process.join()
            connection.close()


def _serve(connection: Any) -> None:
    _begin()
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        code = run_command(*arguments)
        gc.collect()  # Frees models and indexes, which are in reference cycles.
        connection.send(code)
