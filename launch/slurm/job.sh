#!/bin/bash
# Runs a command of launch/ as a Slurm job. Start it from the repository's folder, with options of
# sbatch before the script:
#
#   sbatch --job-name=aligner --time=8:00:00 --gpus-per-node=8 --ntasks-per-node=8 \
#     launch/slurm/job.sh train --config=configs/aligner.py:paper --config.data.dir=DATA
#
# The default workdir is runs/JOB-NAME, and the log is JOB-NAME-ID.log. Three minutes before the time
# limit, the command receives SIGTERM, as from `scancel --signal=TERM ID`. If the run is incomplete,
# the job is requeued and resumes, at most 100 times (a run with a spent budget never completes).
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@180

program=$1
shift
# Standard output contains only the result of the first process.
result=$(srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" "launch/$program.py" \
  --workdir="runs/$SLURM_JOB_NAME" "$@")
status=$?
printf '%s\n' "$result"
# 143 and 130: SIGTERM or SIGINT ended a command that does not handle them. 75: the command failed,
# and continues if it is run again.
if [[ ($result == *'"complete": false'* || $status == 143 || $status == 130 || $status == 75) &&
  ${SLURM_RESTART_COUNT:-0} -lt 100 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
