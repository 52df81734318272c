"""Builds a passage index: ``python launch/index.py --config.data.dir=FOLDER --workdir=W``.

Writes ``W/index``, for use with ``--config.retriever.folder=W/index``. The same command resumes an
interrupted build.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import index

    return index.index_dataset(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/index.py")
