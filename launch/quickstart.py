"""Trains, evaluates and exports the aligner on the embedded dataset: ``make quickstart``."""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Runs the three jobs one after the other; a second run goes on where the first stopped."""
    from cirag_jax.evaluation import retrieval
    from cirag_jax.models.export import export_sentence_transformers
    from cirag_jax.training import aligner
    from cirag_jax.training.trained import open_encoder

    checkpoint = workdir / "aligner"
    checkpoint.mkdir(exist_ok=True)
    trained = aligner.train_and_evaluate(config.train, checkpoint)
    config.evaluate.checkpoint = str(checkpoint)
    result = retrieval.evaluate(config.evaluate, workdir)
    encoder, _ = open_encoder(str(checkpoint))
    export_sentence_transformers(encoder, encoder.state, workdir / "model")
    return {**result, "training": trained, "model": str(workdir / "model")}


if __name__ == "__main__":
    cli.run(main, "configs/quickstart.py", default_workdir="runs/quickstart")
