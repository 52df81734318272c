"""Answers questions: ``python launch/answer.py --config=configs/methods/cirag.py --workdir=W``.

Writes ``predictions.jsonl``, ``timings.jsonl`` and ``journal.sqlite`` to W. The same command
resumes an interrupted run. ``--config.question="..."`` answers one question and shows the evidence.
Without ``--workdir``, such questions share the folder runs/question. If settings or documents have
changed, earlier answers in this folder are dropped.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli

QUESTION_WORKDIR = "runs/question"


def main(config, workdir):
    from cirag_jax.commands import answer

    return answer.answer(config, workdir, replace=workdir == pathlib.Path(QUESTION_WORKDIR))


if __name__ == "__main__":
    cli.run(
        main,
        "configs/methods/cirag.py",
        default_workdir="runs/answer",
        question_workdir=QUESTION_WORKDIR,
        resumes=True,
        several_processes=True,
    )
