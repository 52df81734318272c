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
    component = config.get("component")
    if "bootstrap_samples" not in config:
        raise UserError(
            "--config is not one to evaluate by; there are configs/retrieval.py, "
            "integrator_eval.py, extractor_eval.py, reader_eval.py, comparison.py, "
            "difficulty.py and judge.py."
        )
    if component == "integrator":
        from cirag_jax.commands import evaluate_integrator

        return evaluate_integrator.evaluate(config, workdir)
    if component == "extractor":
        from cirag_jax.commands import evaluate_extraction

        return evaluate_extraction.evaluate(config, workdir)
    if component == "reader":
        from cirag_jax.commands import evaluate_reader

        return evaluate_reader.evaluate(config, workdir)
    if component == "answers":
        from cirag_jax.commands import comparison

        return comparison.compare(config, workdir)
    if component == "difficulty":
        from cirag_jax.commands import difficulty

        return difficulty.evaluate(config, workdir)
    if component == "judge":
        from cirag_jax.commands import judge

        return judge.evaluate(config, workdir)
    if component is None:
        from cirag_jax.commands import evaluate_retrieval

        return evaluate_retrieval.evaluate(config, workdir)
    raise UserError(
        f"config.component is {component!r}; it must be integrator, extractor, reader, answers, "
        "difficulty or judge."
    )


if __name__ == "__main__":
    cli.run(main, "configs/retrieval.py")
