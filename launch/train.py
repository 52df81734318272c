"""Trains a component: ``python launch/train.py --config=configs/aligner.py[:preset] --workdir=W``.

configs/cross_encoder.py, integrator.py, extractor.py and reader.py train the others.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli
from cirag_jax.errors import UserError


def main(config, workdir):
    """Trains what the config describes."""
    component = config.get("component", "aligner")
    if "optimizer" not in config:
        raise UserError(
            "--config is not one to train by; there are configs/aligner.py, cross_encoder.py, "
            "integrator.py, extractor.py and reader.py."
        )
    if component == "cross_encoder":
        from cirag_jax.training import cross_encoder

        return cross_encoder.train_and_evaluate(config, workdir)
    if component in ("integrator", "extractor", "reader"):
        from cirag_jax.training import adapter

        return adapter.train_and_evaluate(config, workdir)
    if component == "aligner":
        from cirag_jax.training import aligner

        return aligner.train_and_evaluate(config, workdir)
    raise UserError(
        f"config.component is {component!r}; it must be aligner, cross_encoder, integrator, "
        "extractor or reader."
    )


if __name__ == "__main__":
    cli.run(main, "configs/aligner.py", resumes=True, several_processes=True)
