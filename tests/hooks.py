"""Hooks that tests install in a command's process; see `tests.command_server`."""

import json
import os
import signal
import threading
import time


def watch_backends(log: str) -> None:
    """Records the requests to the backends of launch/answer.py, batch by batch."""
    from cirag_jax.runtime import handlers

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def watched(cls) -> None:
        answer = cls.__call__

        def note(calls):
            places = [[c.key.program, c.key.ordinal, c.key.part] for c in calls]
            os.write(file, (json.dumps([cls.__name__, places]) + "\n").encode())
            return calls

        def call(self, calls, done, *more):
            answer(self, note(calls), done, *[lambda m=m: note(m()) for m in more])

        cls.__call__ = call

    for name in ("RetrieveHandler", "ExtractHandler", "RankHandler", "GenerateHandler"):
        watched(getattr(handlers, name))


def signal_at_write(number: int, when: str, signum: int = signal.SIGKILL) -> None:
    """Sends a signal "before" or "after" the journal writes response or end ``number``."""
    from cirag_jax.runtime.store import Journal

    # Background jobs of a shell, and their children, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    count = 0

    def watched(name: str) -> None:
        write = getattr(Journal, name)

        def wrapped(self, *arguments):
            nonlocal count
            count += 1
            if count == number and when == "before":
                os.kill(os.getpid(), signum)
            write(self, *arguments)
            if count == number and when == "after":
                os.kill(os.getpid(), signum)

        setattr(Journal, name, wrapped)

    watched("record")
    watched("close_program")


def signal_at_step(step: int, signum: int) -> None:
    """Sends a signal when the training loss of ``step`` has been written."""
    from cirag_jax.training.metrics import MetricWriter

    write = MetricWriter.write

    def watched(self, at, scalars):
        write(self, at, scalars)
        if at == step and "train/loss" in scalars:
            os.kill(os.getpid(), signum)

    setattr(MetricWriter, "write", watched)  # noqa: B010


def signal_in_evaluation(step: int, signum: int) -> None:
    """Sends a signal when the evaluation of ``step`` begins."""
    from cirag_jax.training.metrics import MetricWriter

    evaluate = MetricWriter.evaluate

    def watched(self, at, *arguments):
        if at == step:
            os.kill(os.getpid(), signum)
        return evaluate(self, at, *arguments)

    setattr(MetricWriter, "evaluate", watched)  # noqa: B010


def read_instead(folder: str, other: str) -> None:
    """Reads ``other`` in place of a dataset folder, as if this host had another disk."""
    from cirag_jax.datasets import jsonl

    read = jsonl.read_dataset

    def watched(path, **options):
        return read(other if str(path) == folder else path, **options)

    setattr(jsonl, "read_dataset", watched)  # noqa: B010


def limit_files(size: int) -> None:
    """Limits the size of files in bytes, so that writes fail as on a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def signal_at_cpu(seconds: float, signum: int) -> None:
    """Sends a signal when the process has used this many seconds of processor time."""
    _when_used(lambda used: used >= seconds and os.kill(os.getpid(), signum))


def note_cpu(file: str) -> None:
    """Repeatedly writes the process's processor time, in seconds, to a file."""
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.pwrite(out, b"0.000000", 0)
    _when_used(lambda used: os.pwrite(out, f"{used:08.3f}".encode(), 0))


def _when_used(call) -> None:
    def watch():
        while True:
            call(time.process_time())
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
