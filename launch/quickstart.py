"""Trains, evaluates and exports an aligner, then answers questions with it: ``make quickstart``.

``--full`` is short for ``--config=configs/quickstart.py:full`` with a separate workdir.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Runs all steps in order; the same command resumes an interrupted run."""
    from cirag_jax.commands import answer, comparison, evaluate_retrieval
    from cirag_jax.io import say, write_json
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
    retrieval = evaluate_retrieval.evaluate(config.evaluate, workdir, show=False)
    write_json(workdir / "retrieval.json", cli.jsonable(retrieval))
    encoder, meta = open_encoder(str(checkpoint))
    export_sentence_transformers(encoder, workdir / "model", meta["units"])

    folders = {"CIRAG": workdir / "cirag", "one-shot": workdir / "one_shot"}
    for method, folder in zip((config.cirag, config.one_shot), folders.values(), strict=True):
        folder.mkdir(exist_ok=True)
        method.encoder.model = str(checkpoint)
        answer.answer(method, folder)
    config.compare.runs = tuple(f"{name}={folder}" for name, folder in folders.items())
    answers = workdir / "answers"
    answers.mkdir(exist_ok=True)
    compared = comparison.compare(config.compare, answers, show=False)
    write_json(answers / "result.json", cli.jsonable(compared))
    trace.write_trace(folders["CIRAG"], workdir / "trace.html", title="CIRAG, built-in dataset")

    say(summary(trained, retrieval, compared, workdir))
    return {
        "recall@5": {name: retrieval[name]["recall@5"] for name in ("bm25", "frozen", "trained")},
        "f1": {name: compared["systems"][name]["f1"]["value"] for name in folders},
        "num_questions": {
            "retrieval": retrieval["num_questions"],
            "answers": compared["num_questions"],
        },
        "training": trained,
        "model": str(workdir / "model"),
        "trace": str(workdir / "trace.html"),
        "complete": True,
    }


def summary(trained, retrieval, compared, workdir):
    """Returns ten lines about training, the scores, the output files and the next steps."""
    recall = {name: 100 * retrieval[name]["recall@5"] for name in ("bm25", "frozen", "trained")}
    f1 = {name: 100 * system["f1"]["value"] for name, system in compared["systems"].items()}
    answer = "python launch/answer.py --config=configs/methods/cirag.py:small"
    train = "python launch/train.py --config=configs/aligner.py:quick"
    return f"""
Trained    MiniLM-L6 as an aligner: {trained["total_steps"]} steps, {trained["num_chains"]:,} chains
Retrieval  recall@5 {recall["frozen"]:.1f} % before, {recall["trained"]:.1f} % after training \
(BM25 {recall["bm25"]:.1f} %), {retrieval["num_questions"]} questions
Answers    F1 {f1["one-shot"]:.1f} with one retrieval, {f1["CIRAG"]:.1f} with CIRAG, \
{compared["num_questions"]} questions
Figure     {workdir}/recall.png; tables: {workdir}/table.md, {workdir}/answers/table.md
Trace      {workdir}/trace.html shows every step of every answer (open it in a browser)
Model      {workdir}/model can be loaded with sentence-transformers
Next       . .venv/bin/activate
           {answer} --config.documents=FOLDER --config.question="Who ...?"
           {train} --config.data.dir=DATA --config.data.units=sentence --workdir=W
           make quickstart ARGS=--full    # trains longer and evaluates on more questions"""


if __name__ == "__main__":
    full = "--full" in sys.argv
    arguments = ["--config=configs/quickstart.py:full" if a == "--full" else a for a in sys.argv]
    folder = "runs/quickstart_full" if full else "runs/quickstart"
    cli.run(main, "configs/quickstart.py", arguments, default_workdir=folder, resumes=True)
