"""Answers questions: ``python launch/answer.py --config=configs/methods/cirag.py --workdir=W``.

Leaves ``predictions.jsonl``, ``timings.jsonl`` and ``journal.sqlite`` in W; run again with the same
workdir, it resumes where it was stopped. ``--config.question="..."`` answers one question and shows
the evidence.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Answers what the config describes."""
    from cirag_jax.commands import answer

    return answer.answer(config, workdir)


if __name__ == "__main__":
    cli.run(
        main,
        "configs/methods/cirag.py",
        default_workdir="runs/answer",
        resumes=True,
        several_processes=True,
    )
