"""Trains a component: ``python launch/train.py --config=configs/aligner.py[:preset] --workdir=W``.

configs/cross_encoder.py, integrator.py, extractor.py and reader.py train the others.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Trains what the config describes."""
    from cirag_jax.training import state

    component = state.component_of(config)
    if component == "cross_encoder":
        from cirag_jax.training import cross_encoder as trainer
    elif component == "aligner":
        from cirag_jax.training import aligner as trainer
    else:
        from cirag_jax.training import adapter as trainer
    return trainer.train_and_evaluate(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/aligner.py", resumes=True, several_processes=True)
