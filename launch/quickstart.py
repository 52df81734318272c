"""Trains, evaluates and exports the aligner, then answers with it: ``make quickstart``."""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Runs the jobs one after the other; a second run goes on where the first stopped."""
    from cirag_jax.commands import answer, comparison, evaluate_retrieval
    from cirag_jax.io import say
    from cirag_jax.models.io.export import export_sentence_transformers
    from cirag_jax.models.io.workdir import open_encoder
    from cirag_jax.reports import trace
    from cirag_jax.training import aligner

    checkpoint = workdir / "aligner"
    checkpoint.mkdir(exist_ok=True)
    trained = aligner.train_and_evaluate(config.train, checkpoint)
    if not trained["complete"]:  # stopped by a signal
        return {"training": trained, "complete": False}
    config.evaluate.checkpoint = str(checkpoint)
    result = evaluate_retrieval.evaluate(config.evaluate, workdir)
    encoder, meta = open_encoder(str(checkpoint))
    export_sentence_transformers(encoder, encoder.state, workdir / "model", meta["units"])
    folders = {"CIRAG": workdir / "cirag", "one-shot": workdir / "one_shot"}
    for method, folder in zip((config.cirag, config.one_shot), folders.values(), strict=True):
        folder.mkdir(exist_ok=True)
        method.encoder.model = str(checkpoint)
        answer.answer(method, folder)
    config.compare.runs = tuple(f"{name}={folder}" for name, folder in folders.items())
    answers = workdir / "answers"
    answers.mkdir(exist_ok=True)
    compared = comparison.compare(config.compare, answers)
    trace.write_trace(folders["CIRAG"], workdir / "trace.html", title="CIRAG, built-in dataset")
    say((answers / "table.md").read_text("utf-8"))
    return {
        **result,
        "training": trained,
        "model": str(workdir / "model"),
        "answers": {name: compared[name] for name in ("systems", "differences", "num_questions")},
        "trace": str(workdir / "trace.html"),
        "complete": True,
    }


if __name__ == "__main__":
    cli.run(main, "configs/quickstart.py", default_workdir="runs/quickstart", resumes=True)
