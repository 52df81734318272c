"""Configs of tiny trainings of the aligner."""

import pathlib

from cirag_jax.config_files import load_config

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def overrides_of(model_and_data, **changes):
    model, data = model_and_data
    values = {
        "model.spec": model, "data.dir": data, "dev.split": "dev", "dev.questions": 4,
        "batch_size": 8, "num_negatives": 3, "num_steps": 6, "eval_every": 3,
        "chunk_tokens": 256, "query_max_length": 64, "unit_max_length": 32,
        "optimizer.learning_rate": 0.003, **changes,
    }  # fmt: skip
    return [f"--config.{key}={value}" for key, value in values.items()]


def config_of(model_and_data, **changes):
    return load_config(str(_ROOT / "configs/aligner.py"), overrides_of(model_and_data, **changes))
