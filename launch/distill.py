"""Collects trajectories: ``python launch/distill.py --config=configs/trajectories.py --workdir=T``.

Leaves ``trajectories.jsonl``, ``trajectories.json`` (how they were made) and ``journal.sqlite`` in
T; run again with the same workdir, it goes on where it was stopped.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Collects what the config describes."""
    from cirag_jax.commands import distill

    return distill.distill(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/trajectories.py", resumes=True, several_processes=True)
