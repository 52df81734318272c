"""Generates questions with GRADE: ``python launch/generate_questions.py --workdir=G``.

Leaves the dataset folder G: questions of 2 to 5 hops over documents in chunks, with their evidence.
Run again with the same workdir, it goes on where it was stopped.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Generates what the config describes."""
    from cirag_jax.commands import generate_questions

    result = generate_questions.generate_questions(config, workdir)
    return cli.Shown(result) if config.estimate_only else result


if __name__ == "__main__":
    cli.run(main, "configs/grade.py", resumes=True)
