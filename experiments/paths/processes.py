"""Runs Python commands in processes that need no time to import the package."""

import multiprocessing
import multiprocessing.connection
import os
import pathlib
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

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
    os.setsid()  # Otherwise, Ctrl-C would reach the command twice.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs ignore it.
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
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
