"""Iter-RetGen: retrieves again with the question and the last answer (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/iter_retgen.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads with the shipped reader, on a laptop's CPU; ``medium`` and ``paper`` are as
in configs/methods/cirag.py.

configs/compare.py has the record of ``small``.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("iter_retgen")
    return blocks.shipped(config) if preset == "small" else blocks.preset(config, preset)
