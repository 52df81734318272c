"""Runs a command in a process of its own and presses Ctrl-C once enough is in its journal."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[1]

# Writes a byte to a pipe for every response that stands in a journal.
_TELLING = """
import os, runpy, signal, sys

from cirag_jax.runtime.journal import Journal

record, pipe = Journal.record, int(sys.argv[1])

def telling(self, *arguments):
    record(self, *arguments)
    os.write(pipe, b".")

Journal.record = telling
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclasses.dataclass
class Ended:
    """How a command ended, and how many responses it recorded."""

    code: int
    out: str
    err: str
    recorded: int


def run(folder: pathlib.Path, script: str, *arguments: object, after: int = 0) -> Ended:
    """Runs a script of launch/.

    Args:
      folder: keeps the standard error.
      script: for instance ``answer.py``.
      *arguments: of the command line.
      after: responses until SIGINT is sent; 0: never.
    """
    path = str(_ROOT / "launch" / script)
    reading, writing = os.pipe()
    settings = {"CIRAG_JAX_CACHE": "0", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(_ROOT)}
    with (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", _TELLING, str(writing), path, *map(str, arguments)],
            cwd=_ROOT, env={**os.environ, **settings}, pass_fds=[writing],
            stdout=subprocess.PIPE, stderr=err, text=True,
        )  # fmt: skip
    try:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            recorded = len(pipe.read(after))
            if after:
                process.send_signal(signal.SIGINT)
            recorded += len(pipe.read())
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    return Ended(process.returncode, out, (folder / "stderr").read_text("utf-8"), recorded)


def is_one_sentence(ended: Ended, script: str) -> bool:
    """Whether a command ended as one that was interrupted ends, and said so."""
    said = f"{script}: interrupted; what is recorded is kept, and the same command resumes"
    assert ended.code == 130, ended.err
    assert ended.out == "" and "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith(said)
    return True
