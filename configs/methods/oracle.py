"""Oracle: the reader reads gold evidence; results are marked so (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/oracle.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads gold sentences with the shipped reader; ``medium`` and ``paper`` read gold
passages, with models as in configs/methods/cirag.py.

Record (launch/compare.py, ``small``, --config.data.dir=musique --config.data.only_with_triples=true
--config.data.limit=10 --config.data.random=true; 2026-11-25, 2 CPU cores of an AMD EPYC, commit
60718d3): EM 10.0, F1 13.3; no failures; 35 s.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("oracle")
    if preset == "small":
        config.oracle.units = "sentence"
        return blocks.shipped(config)
    return blocks.preset(config, preset)
