"""Compares methods: ``python launch/compare.py --config.methods=direct,native_rag,cirag
--config.data.dir=DATA --workdir=W``.

Answers the questions by each method in W/NAME, with encoders, indexes and language models opened
once, and leaves tables of scores, differences, cost and time in W. Run again with the same workdir,
it resumes where it was stopped.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Compares what the config names."""
    from cirag_jax.commands import compare

    return compare.compare(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/compare.py", default_workdir="runs/compare", resumes=True)
