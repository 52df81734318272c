"""Evaluates a checkpoint: ``python launch/evaluate.py --config=configs/retrieval.py
--config.checkpoint=W --workdir=W2``; configs/integrator_eval.py and configs/extractor_eval.py
evaluate the other trained components, configs/comparison.py compares runs of launch/answer.py.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Evaluates what the config describes."""
    component = config.get("component")
    if component == "integrator":
        from cirag_jax.evaluation import integrator

        return integrator.evaluate(config, workdir)
    if component == "extractor":
        from cirag_jax.evaluation import extraction

        return extraction.evaluate(config, workdir)
    if component == "answers":
        from cirag_jax.evaluation import runs

        return runs.compare(config, workdir)
    from cirag_jax.evaluation import retrieval

    return retrieval.evaluate(config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/retrieval.py")
