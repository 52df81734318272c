"""Extracts triples: ``python launch/extract.py --config.data.dir=FOLDER --workdir=W``.

Leaves the triple store ``W/triples.sqlite``. Run again with the same workdir, it resumes where it
was stopped, and extracts only what is new or has changed in the corpus.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Extracts what the config describes."""
    from cirag_jax.commands import extract

    result = extract.extract_corpus(config, workdir)
    return cli.Shown(result) if config.estimate_only else result


if __name__ == "__main__":
    cli.run(main, "configs/extract.py", resumes=True, several_processes=True)
