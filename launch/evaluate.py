"""Evaluates a checkpoint: ``python launch/evaluate.py --config=configs/retrieval.py
--config.checkpoint=W --workdir=W2``.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Evaluates what the config describes."""
    from cirag_jax.evaluation import retrieval

    return retrieval.evaluate(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/retrieval.py")
