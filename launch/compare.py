"""Compares methods: ``python launch/compare.py --config.methods=direct,native_rag,cirag
--config.data.dir=DATA --workdir=W``.

Answers the questions with each method in W/NAME and writes tables of scores, differences, cost and
time to W. The methods share encoders, indexes and language models. The same command resumes an
interrupted run.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import compare

    return compare.compare(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/compare.py", default_workdir="runs/compare", resumes=True)
