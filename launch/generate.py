"""Generates texts: ``python launch/generate.py --config.prompts=FILE.jsonl --workdir=W``.

Writes ``W/responses.jsonl`` in input order. The same command resumes an interrupted run.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import generate

    return generate.generate_file(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/generate.py", resumes=True)
