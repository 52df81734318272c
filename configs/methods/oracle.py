"""Oracle: the reader reads the gold evidence; its results say so (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/oracle.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads gold sentences with the reader that comes with this repository; the others
read gold passages, with models as in configs/methods/cirag.py.

Record (launch/compare.py, ``small``, --config.data.dir=musique --config.data.only_with_triples=true
--config.data.limit=10 --config.data.random=true; 2026-11-25, two cores of an AMD EPYC beside
light work, commit 60718d3): 35 s, no failure; EM 10.0, F1 13.3.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """The oracle as the preset says."""
    config = blocks.method("oracle")
    if preset == "small":
        config.oracle.units = "sentence"
        return blocks.shipped(config)
    return blocks.preset(config, preset)
