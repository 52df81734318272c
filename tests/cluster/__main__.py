"""Tests with a real Slurm and a real Ray on this machine: ``make test-cluster``.

    python -m tests.cluster [--folder T] [--only slurm|ray]

Slurm needs Debian's packages slurm-wlm and munge, which are installed if necessary. Installing them
and running the daemons requires root. The daemons' keys, settings, state and logs are in the folder
T, so an existing Slurm installation is not changed.

launch/slurm/job.sh trains a tiny aligner in two tasks. One job is undisturbed. The other is stopped
by a signal and requeued by the script, and later stopped and requeued by its user. Both must end
with exactly the same parameters. A job array then runs a sweep.

Ray (`tests.cluster.on_ray`) runs an extraction and builds an index with two workers, one of which
is killed.

After a failure, exits with 1 and keeps the folder.
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
_TIMEOUT = 900.0  # seconds that a job may take on a busy machine
STEPS = 400
# cred_expire is the number of seconds before a requeued job may start (default: two minutes).
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
    """Runs a command, and returns its output."""
    words = [str(word) for word in command]
    process = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, **fields)
    return process.stdout.strip()


def install() -> None:
    """Installs Debian's packages if necessary."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        packages = ("slurm-wlm", "munge")
        run("apt-get", "install", "-y", "--no-install-recommends", *packages, env=environment)


@contextlib.contextmanager
def slurm(folder: pathlib.Path) -> Iterator[None]:
    """Runs a Slurm cluster on this machine for this process and its children."""
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
        wait_for("the node", lambda: "idle" in run("sinfo", "--noheader", "--format=%t"))
        yield
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("scancel", "--user=root")
            wait_for("the end of all jobs", lambda: not run("squeue", "--noheader"))
        for pid in reversed(pids):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int(pid.read_text()), 15)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(event: str, condition: Callable[[], object]) -> None:
    """Waits until ``condition`` returns a true value; exits after a timeout."""
    print(f"waiting for {event}", flush=True)
    end = time.monotonic() + _TIMEOUT
    while True:
        with contextlib.suppress(subprocess.CalledProcessError):  # Slurm's commands may time out
            if condition():
                return
        if time.monotonic() > end:
            raise SystemExit(f"timed out after {_TIMEOUT:.0f} seconds: {event}")
        time.sleep(0.5)


def submit(folder: pathlib.Path, name: str, *arguments: object) -> str:
    """Submits launch/slurm/job.sh, and returns the job's number."""
    options = [f"--job-name={name}", f"--output={folder}/%x-%j.log", "--time=60"]
    words = ["sbatch", "--parsable", *options, *map(str, arguments)]
    return run(*words, cwd=_ROOT).partition(";")[0]


def has_ended(job: str) -> bool:
    """Returns whether no task of a job is waiting or running."""
    return not run("squeue", "--noheader", "--format=%i", f"--jobs={job}")


def state(job: str, field: str) -> str:
    """Returns a field of Slurm's description of a job."""
    words = run("scontrol", "show", "job", job).split()
    return next(word.removeprefix(f"{field}=") for word in words if word.startswith(f"{field}="))


def last_step(workdir: pathlib.Path) -> int:
    """Returns the last step that has a recorded loss."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def parameters(workdir: pathlib.Path) -> list[np.ndarray]:
    """Returns the parameters of the last checkpoint, which is the only evaluated one."""
    encoder, meta = open_encoder(str(workdir))
    assert meta["step"] == STEPS, meta["step"]
    return tiny.arrays(encoder.state)


def training(root: pathlib.Path) -> list[str]:
    """Returns the arguments of a training run that takes only seconds."""
    model, data = tiny.model_folder(root / "model"), tiny.dataset_folder(root / "data")
    values = {
        "model.spec": model, "data.dir": data, "dev.questions": 2, "num_steps": STEPS,
        "eval_every": 0, "save_every": 20, "batch_size": 4, "num_negatives": 2,
        "prefixes_per_question": 2, "chunk_tokens": 256, "model.dropout": 0.1,
        "query_max_length": 128,
    }  # fmt: skip
    return [f"--config.{name}={value}" for name, value in values.items()]


def check_training(folder: pathlib.Path) -> None:
    """Checks that a job stopped twice gives the same result as an undisturbed one."""
    arguments = ["--ntasks=2", "launch/slurm/job.sh", "train", *training(folder)]
    undisturbed, interrupted = folder / "whole", folder / "cut"
    job = submit(folder, "whole", *arguments, f"--workdir={undisturbed}")
    wait_for("the end of the undisturbed job", lambda: has_ended(job))
    assert state(job, "JobState") == "COMPLETED", state(job, "JobState")

    job = submit(folder, "cut", *arguments, f"--workdir={interrupted}")
    wait_for("step 30", lambda: last_step(interrupted) >= 30)
    run("scancel", "--signal=TERM", job)
    wait_for("the requeued job", lambda: int(state(job, "Restarts")) == 1)
    stopped = json.loads((interrupted / "result.json").read_text())
    assert stopped["complete"] is False and 30 <= stopped["step"] < STEPS, stopped
    wait_for("further steps", lambda: last_step(interrupted) >= stopped["step"] + 30)
    run("scontrol", "requeue", job)
    wait_for("the job that its user requeued", lambda: has_ended(job))

    result = json.loads((interrupted / "result.json").read_text())
    assert result["complete"] and state(job, "JobState") == "COMPLETED", result
    assert state(job, "Restarts") == "2"
    assert json.loads((interrupted / "environment.json").read_text())["num_processes"] == 2
    for a, b in zip(parameters(undisturbed), parameters(interrupted), strict=True):
        np.testing.assert_array_equal(a, b)
    print(f"stopped at step {stopped['step']}, requeued twice: equal parameters", flush=True)


def check_sweep(folder: pathlib.Path) -> None:
    """Checks that each task of a job array executes one run of a sweep."""
    workdir = folder / "sweep"
    swept = [*training(folder / "s"), "--config.num_steps=4", "--config.eval_every=2"]
    swept += ["--config.sweep.seed=0,1", f"--workdir={workdir}"]
    job = submit(folder, "sweep", "--array=0-1", "launch/slurm/job.sh", "sweep", *swept)
    wait_for("the end of the array", lambda: has_ended(job))
    runs = json.loads((workdir / "result.json").read_text())["runs"]
    assert [(row["name"], row["state"]) for row in runs] == [
        ("seed=0", "ended"), ("seed=1", "ended")
    ], runs  # fmt: skip
    print((workdir / "table.md").read_text(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--only", choices=("slurm", "ray"))
    arguments = parser.parse_args()
    folder = arguments.folder or pathlib.Path(tempfile.mkdtemp(prefix="cirag-cluster-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1",
        "CIRAG_JAX_CACHE": str(folder / "cache"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    print(f"Everything is in {folder}", flush=True)
    if arguments.only != "slurm":
        on_ray.check(folder / "ray")
    if arguments.only != "ray":
        install()
        with slurm(folder):
            check_training(folder)
            check_sweep(folder)
    shutil.rmtree(folder, ignore_errors=True)  # the daemons also remove files while they end


if __name__ == "__main__":
    main()
