"""Iter-RetGen: question and answer retrieve again (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/iter_retgen.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads with the reader that comes with this repository, on a laptop's CPU; the
others as in configs/methods/cirag.py.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """Iter-RetGen as the preset says."""
    config = blocks.method("iter_retgen", reader=32)
    return blocks.shipped(config) if preset == "small" else blocks.preset(config, preset)
