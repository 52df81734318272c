"""Collects trajectories: ``python launch/distill.py --config=configs/trajectories.py --workdir=T``.

Writes ``trajectories.jsonl``, ``trajectories.json`` (their settings) and ``journal.sqlite`` to T.
The same command resumes an interrupted run.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import distill

    return distill.distill(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/trajectories.py", resumes=True, several_processes=True)
