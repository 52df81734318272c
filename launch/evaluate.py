"""Evaluates a checkpoint: ``python launch/evaluate.py --config=configs/retrieval.py
--config.checkpoint=W --workdir=W2``; configs/integrator_eval.py, extractor_eval.py and
reader_eval.py evaluate the other trained components, configs/comparison.py compares
runs of launch/answer.py, configs/difficulty.py breaks their errors down by difficulty,
configs/judge.py has a language model judge their answers.

``--config.follow=true`` evaluates every checkpoint of a training, while it runs.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli


def main(config, workdir):
    """Evaluates what the config describes."""
    from cirag_jax.commands import jobs

    return jobs.evaluate(config, workdir)


def extend(config):
    """What an evaluation of a training's checkpoints is told beside."""
    from ml_collections.config_dict import placeholder

    if "checkpoint" in config:
        # Whether to evaluate each checkpoint of the training workdir config.checkpoint, and those
        # to come until the training ends, into one table (docs/training.md).
        config.follow = False
        # The figure by which follow tells the best: a number of result.json, systems.student.all.em
        # for one. null: the main one.
        config.metric = placeholder(str)


if __name__ == "__main__":
    cli.run(main, "configs/retrieval.py", extend=extend)
