"""Trains a component: ``python launch/train.py --config=configs/aligner.py[:preset]
--workdir=W``.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Trains what the config describes."""
    component = config.get("component", "aligner")
    if component == "cross_encoder":
        from cirag_jax.training import cross_encoder

        return cross_encoder.train_and_evaluate(config, workdir)
    if component in ("integrator", "extractor"):
        from cirag_jax.training import integrator

        return integrator.train_and_evaluate(config, workdir)
    from cirag_jax.training import aligner

    return aligner.train_and_evaluate(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/aligner.py")
