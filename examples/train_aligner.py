"""Trains an aligner on the built-in dataset from Python, and evaluates it.

    python examples/train_aligner.py runs/example       # about three minutes on two CPU cores

The same code trains on several GPUs. If it is interrupted, run the same command to resume.
"""

import pathlib
import sys
from typing import Any

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax.commands import evaluate_retrieval
from cirag_jax.config_files import load_config
from cirag_jax.training import aligner


def main(workdir: pathlib.Path, training: tuple[str, ...] = (), test: tuple[str, ...] = ()) -> Any:
    """Trains and evaluates an aligner; returns the result of the evaluation.

    Args:
      workdir: folder of checkpoints and results.
      training: changes to configs/aligner.py, such as ``num_steps=10``.
      test: changes to configs/retrieval.py.
    """
    training = ("num_steps=40", "eval_every=20", *training)
    config = load_config("configs/aligner.py:quick", [f"--config.{value}" for value in training])
    model = folder(workdir / "aligner")
    print(aligner.train_and_evaluate(config, model))

    test = (f"checkpoint={model}", "data.limit=100", "systems=('frozen','trained')", *test)
    config = load_config("configs/retrieval.py", [f"--config.{value}" for value in test])
    result = evaluate_retrieval.evaluate(config, folder(workdir / "evaluation"))
    for system in ("frozen", "trained"):
        print(f"{system}: recall@5 {result[system]['recall@5']:.3f}")
    return result


def folder(path: pathlib.Path) -> pathlib.Path:
    """Creates a folder and returns its path."""
    path.mkdir(parents=True, exist_ok=True)
    return path


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example"))
