"""Evaluates a checkpoint: ``python launch/evaluate.py --config=configs/retrieval.py
--config.checkpoint=W --workdir=W2``.

configs/integrator_eval.py, extractor_eval.py and reader_eval.py evaluate the other components. For
runs of launch/answer.py, configs/comparison.py compares the scores, configs/difficulty.py breaks
down the errors by difficulty, and configs/judge.py lets a language model judge the answers.

``--config.follow=true`` evaluates every checkpoint of a training run while it runs.
"""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    from cirag_jax.commands import jobs

    return jobs.evaluate(config, workdir)


def extend(config):
    """Adds the fields for evaluating every checkpoint of a training run."""
    from ml_collections.config_dict import placeholder

    if "checkpoint" in config:
        # Evaluate every checkpoint of the training workdir config.checkpoint until training ends,
        # and write one table (docs/training.md).
        config.follow = False
        # Metric that selects the best checkpoint: the name of a number in result.json, such as
        # systems.student.all.em; null is the main metric.
        config.metric = placeholder(str)


if __name__ == "__main__":
    cli.run(main, "configs/retrieval.py", extend=extend)
