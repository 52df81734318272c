"""Corrupts triples: ``python launch/corrupt.py --config=configs/corrupt.py --workdir=W``.

``--config.data.triples=W`` of launch/answer.py reads the result (docs/triples.md).
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import corrupt

    return corrupt.corrupt(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/corrupt.py", resumes=True)
