"""Generates questions with GRADE: ``python launch/generate_questions.py --workdir=G``.

Writes the dataset folder G: questions of 2 to 5 hops over chunks of documents, with their evidence.
The same command resumes an interrupted run.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import generate_questions

    result = generate_questions.generate_questions(config, workdir)
    return cli.PrintOnly(result) if config.estimate_only else result


if __name__ == "__main__":
    cli.run(main, "configs/grade.py", resumes=True)
