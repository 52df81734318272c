"""Tests of ``config.engine=ray`` with a real Ray: two workers on this machine, one of them killed.

If necessary, Ray is installed into an environment that extends the current one. Ray is started on
this machine with two processors. An extraction must give the same store as the local command, even
if one worker or the command itself is killed in the middle of a shard. An index must be
byte-identical to the index of the local command.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import secrets
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from typing import Any

from cirag_jax.triples.store import FILE
from tests import tiny
from tests.commands.model_server import model_server, rules

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WORKERS = ("--config.engine=ray", "--config.workers=2")


def check(folder: pathlib.Path) -> None:
    """Raises AssertionError if a check fails."""
    folder.mkdir()
    python = _install(folder / "environment")
    data = tiny.dataset_folder(folder / "data")
    with _cluster(python):
        _check_extraction(python, folder, data)
        _check_index(python, folder, data)


def _install(folder: pathlib.Path) -> str:
    """Returns the path of a Python with requirements-cluster.txt and this Python's packages."""
    if importlib.util.find_spec("ray"):
        return sys.executable
    print("installing requirements-cluster.txt", flush=True)
    venv.create(folder)
    python = str(folder / "bin" / "python")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    place = folder / "lib" / version / "site-packages" / "outer.pth"
    place.write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    packages = ["--quiet", "--no-compile", "-r", str(_ROOT / "requirements-cluster.txt")]
    subprocess.run([*pip, "install", *packages], check=True)
    return python


@contextlib.contextmanager
def _cluster(python: str) -> Iterator[None]:
    """Runs a cluster on this machine, and sets ``RAY_ADDRESS``."""
    print("starting Ray", flush=True)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    command = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as files:
        command += ["--port=0", "--include-dashboard=false", f"--temp-dir={files}"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as head:
            try:
                matches = (re.search("--address='([^']+)'", line) for line in head.stdout or ())
                os.environ["RAY_ADDRESS"] = next(match[1] for match in matches if match)
                yield
            finally:
                head.terminate()  # it terminates its children


def _start(python: str, name: str, workdir: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
    command = [python, f"launch/{name}.py", *arguments, f"--workdir={workdir}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=_ROOT, stdout=pipe, stderr=pipe, text=True)


def _run(python: str, name: str, workdir: pathlib.Path, *arguments: str) -> tuple[Any, str]:
    """Runs a command, and returns its result and its messages."""
    start = time.monotonic()
    process = _start(python, name, workdir, *arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    print(f"{name} into {workdir.name}: {time.monotonic() - start:.0f} s", flush=True)
    return json.loads(out), err


def _find_worker(workdir: pathlib.Path) -> int:
    """Returns the process id of a worker that is writing a shard's journal in ``workdir``."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
            if any(name.startswith(f"{workdir}/shards/") for name in files):
                return int(process.name)
    raise AssertionError("no worker is writing a shard")


def _killing_responses(count: int, victim: Callable[[], int]) -> Callable[[str, bool], Any]:
    """Returns a response function for a server; call number ``count`` kills a process."""
    num_requests = 0

    def answer(text: str, wants_triples: bool) -> tuple[str, str] | int:
        nonlocal num_requests
        num_requests += 1
        if num_requests == count:
            os.kill(victim(), signal.SIGKILL)
        return rules(text, wants_triples)

    return answer


def _rows(workdir: pathlib.Path) -> list[Any]:
    with contextlib.closing(sqlite3.connect(workdir / FILE)) as db:
        return list(db.execute("SELECT rowid, * FROM passages ORDER BY rowid"))


def _check_extraction(python: str, folder: pathlib.Path, data: pathlib.Path) -> None:
    local, worker_killed, command_killed = (
        folder / name for name in ("local", "worker-killed", "command-killed")
    )
    with model_server() as server:
        arguments = [
            f"--config.data.dir={data}", "--config.extractor.backend=openai",
            f"--config.extractor.base_url={server.url}", "--config.extractor.model=m",
            "--config.block=4", "--config.in_flight=2",
        ]  # fmt: skip
        expected, _ = _run(python, "extract", local, *arguments)
        assert expected["ok"] == 24 and len(server.asked) == expected["calls"] == 48

        server.asked.clear()
        server.answer = _killing_responses(15, lambda: _find_worker(worker_killed))
        result, stderr = _run(python, "extract", worker_killed, *arguments, *_WORKERS)
        assert stderr.count("a worker of the Ray cluster died") == 1, stderr
        assert (worker_killed / FILE).read_bytes() == (local / FILE).read_bytes()
        for name in expected.keys() - {"seconds", "store"}:
            assert result[name] == expected[name], name
        repeated = len(server.asked) - len(set(server.asked))
        assert repeated <= 2  # requests under way in the worker
        print(f"a worker was killed: equal store, {repeated} requests sent twice", flush=True)

        server.asked.clear()
        command = _start(python, "extract", command_killed, *arguments, *_WORKERS)
        server.answer = _killing_responses(15, lambda: command.pid)
        _, stderr = command.communicate()
        assert command.returncode == -signal.SIGKILL, stderr
        server.answer = rules
        result, _ = _run(python, "extract", command_killed, *arguments, *_WORKERS)
        assert (
            result["complete"] and result["calls"] == 48 and _rows(command_killed) == _rows(local)
        )
        repeated = len(server.asked) - len(set(server.asked))
        assert repeated <= 4  # requests under way in the two workers
        print(f"the command was killed: equal rows, {repeated} requests sent twice", flush=True)


def _check_index(python: str, folder: pathlib.Path, data: pathlib.Path) -> None:
    model = tiny.model_folder(folder / "model")
    arguments = [
        f"--config.data.dir={data}",
        f"--config.encoder.model={model}",
        "--config.shard_rows=5",
    ]
    indexes = []
    for name, more in (("index-local", ()), ("index", _WORKERS)):
        _run(python, "index", folder / name, *arguments, *more)
        files = sorted((folder / name / "index").iterdir())
        indexes.append({file.name: file.read_bytes() for file in files})
    assert indexes[0] == indexes[1] and "vectors-00004.npy" in indexes[0]
    print("an index of two workers: equal bytes", flush=True)
