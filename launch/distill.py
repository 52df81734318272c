"""Collects training data from language models: trajectories, or chains of triples.

python launch/distill.py --config=configs/trajectories.py --workdir=T
python launch/distill.py --config=configs/chains.py:trace --workdir=C

The first command writes ``trajectories.jsonl`` and ``trajectories.json`` (their settings) for the
integrator, the second ``chains.jsonl`` for the aligner. The same command resumes an interrupted
run.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    if "teacher" in config:
        from cirag_jax.commands import distill

        return distill.distill(config, workdir)
    from cirag_jax.commands import chains

    return chains.build(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/trajectories.py", resumes=True, several_processes=True)
