"""Tries a grid of settings: ``python launch/sweep.py --config=configs/aligner.py:quick
--config.sweep.optimizer.learning_rate=1e-4,3e-5 --config.sweep.seed=0,1,2 --workdir=S``.

The config is for training or evaluation. Each combination of the values is one run with a workdir
in S, such as S/seed=0,... A table of all runs is written to S/table.md and S/result.json. The same
command resumes an interrupted sweep, and more values add runs. If the command is started several
times, for example on several GPUs, the processes divide the runs among themselves.

``--config.dry_run=true`` lists the runs. Each task of a Slurm job array executes one run.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli

_SWEPT = [argument for argument in sys.argv if argument.lstrip("-").startswith("config.sweep.")]


def main(config, workdir):
    from cirag_jax.commands import sweep

    return sweep.sweep(config, workdir, _SWEPT)


def extend(config):
    """Adds the fields of the sweep."""
    from ml_collections.config_dict import placeholder

    # Execute only the run with this index, counted from 0; null is SLURM_ARRAY_TASK_ID, or all runs
    # if that is not set.
    config.array_index = placeholder(int)
    config.dry_run = False  # Check the grid, list its runs and write the table of completed runs.
    # Metric that compares the runs: the name of a number in result.json, such as
    # systems.student.all.em; null is the main metric (for training, config.best_metric).
    config.metric = placeholder(str)


if __name__ == "__main__":
    cli.run(
        main,
        "configs/aligner.py",
        [argument for argument in sys.argv if argument not in _SWEPT],
        resumes=True,
        several_processes=True,
        shared=True,
        extend=extend,
    )
