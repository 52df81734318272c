"""Oracle: the reader reads the gold evidence; its results say so (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/oracle.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads gold sentences with the reader that comes with this repository; the others
read gold passages, with models as in configs/methods/cirag.py.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """The oracle as the preset says."""
    config = blocks.method("oracle", reader=32)
    if preset == "small":
        config.oracle.units = "sentence"
        return blocks.shipped(config)
    return blocks.preset(config, preset)
