"""The job script with a fake srun and scontrol; tests/cluster uses real ones."""

import os
import subprocess

import pytest

SRUN = '#!/bin/bash\nprintf "%s\\n" "$@" >srun.txt\nprintf "%s" "$RESULT"\nexit "$STATUS"\n'
SCONTROL = '#!/bin/bash\necho "$@" >scontrol.txt\n'


@pytest.mark.parametrize(
    ("result", "status", "restarts", "requeued"),
    [
        ('{"complete": true, "step": 3}', 0, "", False),
        ('{"complete": false, "step": 3}', 0, "", True),
        ('{"complete": false, "step": 3}', 0, "99", True),
        ('{"complete": false, "step": 3}', 0, "100", False),
        ('{"seconds": 3}', 0, "", False),
        ("", 143, "", True),
        ("", 130, "", True),
        ("", 75, "", True),
        ("", 75, "100", False),
        ("", 2, "", False),
    ],
)
def test_job_incomplete_run_is_requeued(repository, tmp_path, result, status, restarts, requeued):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = ["train", "--config=c.py", "--config.data.dir=('a', 'b')"]
    done = subprocess.run(
        [str(repository / "launch/slurm/job.sh"), *given],
        cwd=tmp_path,
        env={
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RESULT": result,
            "STATUS": str(status), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "a", "PYTHON": "py",
            "SLURM_RESTART_COUNT": restarts,
        },
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == status and done.stdout == result + "\n" and not done.stderr
    asked = (tmp_path / "srun.txt").read_text().splitlines()
    assert asked[-5:] == ["py", "launch/train.py", "--workdir=runs/a", *given[1:]]
    scontrol = tmp_path / "scontrol.txt"
    assert scontrol.exists() == requeued
    assert not requeued or scontrol.read_text() == "requeue 7\n"
