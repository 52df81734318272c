"""Builds a passage index: ``python launch/index.py --config.data.dir=FOLDER --workdir=W``.

Leaves ``W/index``, for ``--config.retriever.folder=W/index``; run again with the same workdir, it
goes on where it was stopped.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Builds what the config describes."""
    from cirag_jax.commands import index

    return index.index_dataset(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/index.py")
