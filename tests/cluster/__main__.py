"""A real Slurm and a real Ray, each of one node that is this machine: ``make test-cluster``.

    python -m tests.cluster [--folder T] [--only slurm|ray]

Slurm: Debian's packages slurm-wlm and munge are installed where they are missing; that, and the
daemons, need root. Keys, settings, state and logs of the daemons lie in a folder of their own (T),
the system's Slurm, if it has one, is left alone.

A tiny aligner is trained by launch/slurm/job.sh in two tasks: once undisturbed, and once stopped by
a signal and requeued by the script, then stopped and requeued by its user. Both must end with the
same parameters, bit by bit. A job array then carries out a sweep.

Ray (`tests.cluster.on_ray`): an extraction and an index by two workers, one of which is killed.

Exits with 1, and keeps the folder, where something is not so.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cirag_jax.models.io.workdir import open_encoder
from tests import tiny
from tests.cluster import on_ray

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PATIENCE = 900.0  # Seconds that a job may take on a machine that is busy otherwise.
STEPS = 400
# cred_expire: a requeued job waits so many seconds, by default two minutes.
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/daemon.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/daemon.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def run(*command: object, **fields: Any) -> str:
    """What a command prints."""
    words = [str(word) for word in command]
    return (
        subprocess.run(words, check=True, stdout=subprocess.PIPE, **fields).stdout.decode().strip()
    )


def install() -> None:
    """Debian's packages, where they are missing."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        packages = ("slurm-wlm", "munge")
        run("apt-get", "install", "-y", "--no-install-recommends", *packages, env=environment)


@contextlib.contextmanager
def slurm(folder: pathlib.Path) -> Iterator[None]:
    """A cluster of this machine alone, which this process and its children find."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
    files |= {"log-file": "log", "seed-file": "seed"}
    ports = {"controller": _free_port(), "daemon": _free_port()}
    host = socket.gethostname().partition(".")[0]
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, folder=folder, **ports))
    os.environ["SLURM_CONF"] = str(config)
    pids = [folder / "munge/pid", folder / "controller.pid", folder / "daemon.pid"]
    try:
        run("munged", "--force", *(f"--{k}={folder}/munge/{v}" for k, v in files.items()))
        run("slurmctld")
        run("slurmd")
        wait("the node", lambda: "idle" in run("sinfo", "--noheader", "--format=%t"))
        yield
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("scancel", "--user=root")
            wait("the end of all jobs", lambda: not run("squeue", "--noheader"))
        for pid in reversed(pids):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int(pid.read_text()), 15)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait(what: str, is_there: Callable[[], object]) -> None:
    """Returns once something is there.

    Raises:
      SystemExit: it does not come.
    """
    print(f"waiting for {what}", flush=True)
    end = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(
            subprocess.CalledProcessError
        ):  # Slurm's commands may be late, too
            if is_there():
                return
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come in {_PATIENCE:.0f} seconds")
        time.sleep(0.5)


def submit(folder: pathlib.Path, name: str, *given: object) -> str:
    """Hands launch/slurm/job.sh in, and returns the job's number."""
    options = [f"--job-name={name}", f"--output={folder}/%x-%j.log", "--time=60"]
    words = ["sbatch", "--parsable", *options, *map(str, given)]
    return run(*words, cwd=_ROOT).partition(";")[0]


def ended(job: str) -> bool:
    """Whether nothing of a job waits or runs."""
    return not run("squeue", "--noheader", "--format=%i", f"--jobs={job}")


def state(job: str, field: str) -> str:
    """What Slurm says of a job."""
    words = run("scontrol", "show", "job", job).split()
    return next(word.removeprefix(f"{field}=") for word in words if word.startswith(f"{field}="))


def last_step(workdir: pathlib.Path) -> int:
    """Of the steps whose loss is recorded."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def parameters(workdir: pathlib.Path) -> list[np.ndarray]:
    """Of the last checkpoint, the only one that is evaluated."""
    encoder, meta = open_encoder(str(workdir))
    assert meta["step"] == STEPS, meta["step"]
    return tiny.arrays(encoder.state)


def training(root: pathlib.Path) -> list[str]:
    """The arguments of a training of seconds."""
    model, data = tiny.model_folder(root / "model"), tiny.dataset_folder(root / "data")
    values = {
        "model.spec": model, "data.dir": data, "dev.questions": 2, "num_steps": STEPS,
        "eval_every": 0, "save_every": 20, "batch_size": 4, "num_negatives": 2,
        "prefixes_per_question": 2, "chunk_tokens": 256, "model.dropout": 0.1,
    }  # fmt: skip
    return [f"--config.{name}={value}" for name, value in values.items()]


def check_training(folder: pathlib.Path) -> None:
    """A job that is stopped twice ends as one that is not."""
    given = ["--ntasks=2", "launch/slurm/job.sh", "train", *training(folder)]
    whole, cut = folder / "whole", folder / "cut"
    job = submit(folder, "whole", *given, f"--workdir={whole}")
    wait("the end of the undisturbed job", lambda: ended(job))
    assert state(job, "JobState") == "COMPLETED", state(job, "JobState")

    job = submit(folder, "cut", *given, f"--workdir={cut}")
    wait("step 30", lambda: last_step(cut) >= 30)
    run("scancel", "--signal=TERM", job)
    wait("the requeued job", lambda: int(state(job, "Restarts")) == 1)
    stopped = json.loads((cut / "result.json").read_text())
    assert stopped["complete"] is False and 30 <= stopped["step"] < STEPS, stopped
    wait("further steps", lambda: last_step(cut) >= stopped["step"] + 30)
    run("scontrol", "requeue", job)
    wait("the job that its user requeued", lambda: ended(job))

    result = json.loads((cut / "result.json").read_text())
    assert result["complete"] and state(job, "JobState") == "COMPLETED", result
    assert state(job, "Restarts") == "2"
    assert json.loads((cut / "environment.json").read_text())["num_processes"] == 2
    for a, b in zip(parameters(whole), parameters(cut), strict=True):
        np.testing.assert_array_equal(a, b)
    print(f"stopped at step {stopped['step']}, requeued twice: the same parameters", flush=True)


def check_sweep(folder: pathlib.Path) -> None:
    """The tasks of an array carry out a run each."""
    workdir = folder / "sweep"
    swept = [*training(folder / "s"), "--config.num_steps=4", "--config.eval_every=2"]
    swept += ["--config.sweep.seed=0,1", f"--workdir={workdir}"]
    job = submit(folder, "sweep", "--array=0-1", "launch/slurm/job.sh", "sweep", *swept)
    wait("the end of the array", lambda: ended(job))
    runs = json.loads((workdir / "result.json").read_text())["runs"]
    assert [(one["name"], one["state"]) for one in runs] == [
        ("seed=0", "ended"), ("seed=1", "ended")
    ], runs  # fmt: skip
    print((workdir / "table.md").read_text(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--only", choices=("slurm", "ray"))
    given = parser.parse_args()
    folder = given.folder or pathlib.Path(tempfile.mkdtemp(prefix="cirag-cluster-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1",
        "CIRAG_JAX_CACHE": str(folder / "cache"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    print(f"Everything is in {folder}", flush=True)
    if given.only != "slurm":
        on_ray.check(folder / "ray")
    if given.only != "ray":
        install()
        with slurm(folder):
            check_training(folder)
            check_sweep(folder)
    shutil.rmtree(folder, ignore_errors=True)  # Daemons that end remove theirs meanwhile.


if __name__ == "__main__":
    main()
