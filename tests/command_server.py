"""Runs the scripts of launch/ in forks of a process that has imported everything.

A command so costs no start-up: the process touches no device, and every fork does what a process
of its own would do. `CommandServer` starts it; a line on its standard input is a run, a line on its
standard output the exit status.
"""

import importlib
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import traceback
from typing import Any, NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parents[1]


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


class CommandServer:
    """Call it with a script of launch/ and its arguments; a context that ends the process."""

    def __init__(self):
        environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "CIRAG_JAX_CACHE": "0",
            "JAX_NUM_CPU_DEVICES": "1",
        }
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", "tests.command_server"],
            cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate()

    def __call__(self, script: str, *arguments: object) -> Done:
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/out", f"{folder}/err"]
            plan = {"argv": [f"launch/{script}", *map(str, arguments)], "paths": paths}
            self._process.stdin.write(json.dumps(plan) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            return Done(status, *(pathlib.Path(path).read_text("utf-8") for path in paths))


def _import_everything() -> None:
    import transformers.models.auto.tokenization_auto

    transformers.models.auto.tokenization_auto.AutoTokenizer  # noqa: B018
    for path in sorted((_ROOT / "cirag_jax").rglob("*.py")):
        if path.stem not in ("__main__", "transformers_backend"):
            importlib.import_module(".".join(path.relative_to(_ROOT).with_suffix("").parts))


def _run(argv: list[str], paths: list[str]) -> None:
    """In a fork; does not return."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    code = 1
    try:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    _import_everything()
    for line in sys.stdin:
        plan = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(**plan)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
