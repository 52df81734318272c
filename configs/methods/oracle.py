"""Oracle: the reader reads gold evidence; results are marked sees_gold (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/oracle.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads gold sentences with the shipped reader; ``medium`` and ``paper`` read gold
passages, with models as in configs/methods/cirag.py; ``paper`` has the questions of DualRAG's
tables.

configs/compare.py has the record of ``small``.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("oracle")
    if preset == "small":
        config.oracle.units = "sentence"
        return blocks.shipped(config)
    return blocks.preset(config, preset, paper="dualrag")
