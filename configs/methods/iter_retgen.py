"""Iter-RetGen: question and answer retrieve again (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/iter_retgen.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads with the shipped reader, on a laptop's CPU; ``medium`` and ``paper`` as in
configs/methods/cirag.py.

Record (launch/compare.py, ``small``, --config.data.dir=musique --config.data.only_with_triples=true
--config.data.limit=10 --config.data.random=true; 2026-11-25, 2 CPU cores of an AMD EPYC, commit
60718d3): EM 20.0, F1 28.0, passage Recall@3 50.0, Recall@5 71.7; no failures; 24 generations; 49 s.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("iter_retgen")
    return blocks.shipped(config) if preset == "small" else blocks.preset(config, preset)
