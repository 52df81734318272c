"""Extracts triples: ``python launch/extract.py --config.data.dir=FOLDER --workdir=W``.

Writes the triple store ``W/triples.sqlite``. The same command resumes an interrupted run. If the
corpus has changed, it extracts triples only from new and changed passages.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import extract

    result = extract.extract_corpus(config, workdir)
    return cli.PrintOnly(result) if config.estimate_only else result


if __name__ == "__main__":
    cli.run(main, "configs/extract.py", resumes=True, several_processes=True)
