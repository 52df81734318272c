"""``config.engine=ray`` on a real Ray: two workers on this machine, one of them killed.

Where it is missing, Ray is installed into an environment of its own, over the packages of this one.
It is started on this machine with two processors. An extraction must leave the store of the local
command though one worker is killed in the middle of a shard, and again though the whole command is
killed there; an index has the bytes of the local command's.
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
    """Raises AssertionError where something is not so."""
    folder.mkdir()
    python = _install(folder / "environment")
    data = tiny.dataset_folder(folder / "data")
    with _cluster(python):
        _check_extraction(python, folder, data)
        _check_index(python, folder, data)


def _install(folder: pathlib.Path) -> str:
    """A Python with what requirements-cluster.txt names, and with all that this one has."""
    if importlib.util.find_spec("ray"):
        return sys.executable
    print("installing requirements-cluster.txt", flush=True)
    venv.create(folder)
    python = str(folder / "bin" / "python")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    place = folder / "lib" / version / "site-packages" / "outer.pth"
    place.write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    wanted = ["--quiet", "--no-compile", "-r", str(_ROOT / "requirements-cluster.txt")]
    subprocess.run([*pip, "install", *wanted], check=True)
    return python


@contextlib.contextmanager
def _cluster(python: str) -> Iterator[None]:
    """What ``RAY_ADDRESS`` names: this machine."""
    print("starting Ray", flush=True)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    words = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as files:
        words += ["--port=0", "--include-dashboard=false", f"--temp-dir={files}"]
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdout=pipe, stderr=subprocess.STDOUT, text=True) as head:
            try:
                said = (re.search("--address='([^']+)'", line) for line in head.stdout or ())
                os.environ["RAY_ADDRESS"] = next(found[1] for found in said if found)
                yield
            finally:
                head.terminate()  # it ends what it has started


def _start(python: str, name: str, workdir: pathlib.Path, *given: str) -> subprocess.Popen[str]:
    words = [python, f"launch/{name}.py", *given, f"--workdir={workdir}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=_ROOT, stdout=pipe, stderr=pipe, text=True)


def _run(python: str, name: str, workdir: pathlib.Path, *given: str) -> tuple[Any, str]:
    """The result of a command, and what it said."""
    begun = time.monotonic()
    process = _start(python, name, workdir, *given)
    out, err = process.communicate()
    assert process.returncode == 0, err
    print(f"{name} into {workdir.name}: {time.monotonic() - begun:.0f} s", flush=True)
    return json.loads(out), err


def _worker(workdir: pathlib.Path) -> int:
    """The process of a worker that has a shard's journal in ``workdir`` open."""
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            opened = [os.readlink(file) for file in (place / "fd").iterdir()]
            if any(name.startswith(f"{workdir}/shards/") for name in opened):
                return int(place.name)
    raise AssertionError("no worker has a shard")


def _killing(count: int, victim: Callable[[], int]) -> Callable[[str, bool], Any]:
    """A server's answers; with the ``count``-th it kills a process."""
    asked = 0

    def answer(text: str, wants_triples: bool) -> tuple[str, str] | int:
        nonlocal asked
        asked += 1
        if asked == count:
            os.kill(victim(), signal.SIGKILL)
        return rules(text, wants_triples)

    return answer


def _rows(workdir: pathlib.Path) -> list[Any]:
    with contextlib.closing(sqlite3.connect(workdir / FILE)) as db:
        return list(db.execute("SELECT rowid, * FROM passages ORDER BY rowid"))


def _check_extraction(python: str, folder: pathlib.Path, data: pathlib.Path) -> None:
    local, hurt, cut = (folder / name for name in ("local", "worker-killed", "command-killed"))
    with model_server() as server:
        given = [
            f"--config.data.dir={data}", "--config.extractor.backend=openai",
            f"--config.extractor.base_url={server.url}", "--config.extractor.model=m",
            "--config.block=4", "--config.in_flight=2",
        ]  # fmt: skip
        wanted, _ = _run(python, "extract", local, *given)
        assert wanted["ok"] == 24 and len(server.asked) == wanted["calls"] == 48

        server.asked.clear()
        server.answer = _killing(15, lambda: _worker(hurt))
        found, said = _run(python, "extract", hurt, *given, *_WORKERS)
        assert said.count("a worker of the Ray cluster has died") == 1, said
        assert (hurt / FILE).read_bytes() == (local / FILE).read_bytes()
        for name in wanted.keys() - {"seconds", "store"}:
            assert found[name] == wanted[name], name
        again = len(server.asked) - len(set(server.asked))
        assert again <= 2  # what was under way in the worker
        print(f"a worker was killed: the same store, {again} requests sent twice", flush=True)

        server.asked.clear()
        command = _start(python, "extract", cut, *given, *_WORKERS)
        server.answer = _killing(15, lambda: command.pid)
        _, said = command.communicate()
        assert command.returncode == -signal.SIGKILL, said
        server.answer = rules
        found, _ = _run(python, "extract", cut, *given, *_WORKERS)
        assert found["complete"] and found["calls"] == 48 and _rows(cut) == _rows(local)
        again = len(server.asked) - len(set(server.asked))
        assert again <= 4  # what was under way in the two workers
        print(f"the command was killed: the same rows, {again} requests sent twice", flush=True)


def _check_index(python: str, folder: pathlib.Path, data: pathlib.Path) -> None:
    model = tiny.model_folder(folder / "model")
    given = [
        f"--config.data.dir={data}",
        f"--config.encoder.model={model}",
        "--config.shard_rows=5",
    ]
    indexes = []
    for name, more in (("index-local", ()), ("index", _WORKERS)):
        _run(python, "index", folder / name, *given, *more)
        files = sorted((folder / name / "index").iterdir())
        indexes.append({file.name: file.read_bytes() for file in files})
    assert indexes[0] == indexes[1] and "vectors-00004.npy" in indexes[0]
    print("an index by two workers: the same bytes", flush=True)
