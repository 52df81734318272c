#!/bin/bash
# Runs a command of launch/ as a Slurm job; sbatch's options stand before the script. From the
# repository's folder:
#
#   sbatch --job-name=aligner --time=8:00:00 --gpus-per-node=8 --ntasks-per-node=8 \
#     launch/slurm/job.sh train --config=configs/aligner.py:paper --config.data.dir=DATA
#
# The workdir is runs/JOB-NAME, unless --workdir names another one; the log is JOB-NAME-ID.log.
# Three minutes before the time limit the command gets SIGTERM, as by `scancel --signal=TERM ID`.
# If it has not come to its end then, the job is requeued and goes on from there, 100 times at most
# (what has no budget left never ends).
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@180

program=$1
shift
# Standard output is the result and nothing else, of the first process alone.
result=$(srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" "launch/$program.py" \
  --workdir="runs/$SLURM_JOB_NAME" "$@")
status=$?
printf '%s\n' "$result"
# 143 and 130: what has no way to stop was ended by SIGTERM or SIGINT itself.
if [[ ($result == *'"complete": false'* || $status == 143 || $status == 130) &&
  ${SLURM_RESTART_COUNT:-0} -lt 100 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
