"""Evaluates a checkpoint: ``python launch/evaluate.py --config=configs/retrieval.py
--config.checkpoint=W --workdir=W2``; configs/integrator_eval.py, extractor_eval.py and
reader_eval.py evaluate the other trained components, configs/comparison.py compares
runs of launch/answer.py, configs/difficulty.py breaks their errors down by difficulty,
configs/judge.py has a language model judge their answers.
"""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli
from cirag_jax.errors import UserError


def main(config, workdir):
    """Evaluates what the config describes."""
    from cirag_jax.commands import (
        comparison,
        difficulty,
        evaluate_extraction,
        evaluate_integrator,
        evaluate_reader,
        evaluate_retrieval,
        judge,
    )

    if "bootstrap_samples" not in config:
        raise UserError(
            "--config is not one to evaluate by; there are configs/retrieval.py, "
            "integrator_eval.py, extractor_eval.py, reader_eval.py, comparison.py, "
            "difficulty.py and judge.py."
        )
    component = config.get("component")
    evaluations = {
        None: evaluate_retrieval.evaluate,
        "integrator": evaluate_integrator.evaluate,
        "extractor": evaluate_extraction.evaluate,
        "reader": evaluate_reader.evaluate,
        "answers": comparison.compare,
        "difficulty": difficulty.evaluate,
        "judge": judge.evaluate,
    }
    if component not in evaluations:
        raise UserError(
            f"config.component is {component!r}; it must be integrator, extractor, reader, "
            "answers, difficulty or judge."
        )
    return evaluations[component](config, workdir)


if __name__ == "__main__":
    cli.run(main, "configs/retrieval.py")
