"""Tries a grid of settings: ``python launch/sweep.py --config=configs/aligner.py:quick
--config.sweep.optimizer.learning_rate=1e-4,3e-5 --config.sweep.seed=0,1,2 --workdir=S``.

FIELD is any field of the config, of a training or an evaluation; every combination of the values is
a run of its own, in S/seed=0,... as launch/train.py or launch/evaluate.py leaves a workdir. S gets
table.md and result.json. The same command goes on where it was stopped; with further values it adds
their runs; started twice at once, on two GPUs say, it shares the runs out.

``--config.dry_run=true`` says what would be run. In a Slurm job array each task carries out one.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli

_SWEPT = [argument for argument in sys.argv if argument.lstrip("-").startswith("config.sweep.")]


def main(config, workdir):
    """Carries out the runs."""
    from cirag_jax.commands import sweep

    return sweep.sweep(config, workdir, _SWEPT)


def extend(config):
    """What the sweep itself is told."""
    from ml_collections.config_dict import placeholder

    # Carry out this run alone, counted from 0; null: SLURM_ARRAY_TASK_ID, and where that is not
    # set, all.
    config.array_index = placeholder(int)
    config.dry_run = False  # Check the grid, list its runs and write the table of what has ended.
    # The figure by which runs are compared: a number of result.json, systems.student.all.em for
    # one. null: the main one, of a training its config.best_metric.
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
