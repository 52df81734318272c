"""Trains, evaluates and exports the aligner, then answers with CIRAG: ``make quickstart``."""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Runs the jobs one after the other; a second run goes on where the first stopped."""
    from cirag_jax.commands import answer, evaluate_retrieval
    from cirag_jax.models.io.export import export_sentence_transformers
    from cirag_jax.models.io.workdir import open_encoder
    from cirag_jax.reports import trace
    from cirag_jax.training import aligner

    checkpoint = workdir / "aligner"
    checkpoint.mkdir(exist_ok=True)
    trained = aligner.train_and_evaluate(config.train, checkpoint)
    config.evaluate.checkpoint = str(checkpoint)
    result = evaluate_retrieval.evaluate(config.evaluate, workdir)
    encoder, _ = open_encoder(str(checkpoint))
    export_sentence_transformers(encoder, encoder.state, workdir / "model")
    questions = workdir / "answers"
    questions.mkdir(exist_ok=True)
    config.answer.rankers.triples.model = str(checkpoint)
    answered = answer.answer(config.answer, questions)
    trace.write_trace(questions, workdir / "trace.html", title="CIRAG on the built-in dataset")
    return {
        **result,
        "training": trained,
        "model": str(workdir / "model"),
        "cirag": answered,
        "trace": str(workdir / "trace.html"),
    }


if __name__ == "__main__":
    cli.run(main, "configs/quickstart.py", default_workdir="runs/quickstart")
