"""Generates texts: ``python launch/generate.py --config.prompts=FILE.jsonl --workdir=W``.

Writes ``W/responses.jsonl`` in input order; run again with the same workdir, it goes on where it
was stopped.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Generates what the config describes."""
    from cirag_jax.commands import generate

    return generate.generate_file(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/generate.py", resumes=True)
