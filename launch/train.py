"""Trains a component: ``python launch/train.py --config=configs/aligner.py[:preset] --workdir=W``.

configs/cross_encoder.py, integrator.py, extractor.py, reader.py, role.py and router.py train the
other components.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import jobs

    return jobs.train(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/aligner.py", resumes=True, several_processes=True)
