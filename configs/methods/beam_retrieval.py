r"""Beam retrieval over chains of passages, after BeamDR (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/beam_retrieval.py --config.data.dir=D --workdir=W

Presets: ``small`` retrieves and reads with this repository's models, on a laptop's CPU; ``medium``
is as in configs/methods/cirag.py. ``paper`` has the questions, corpus and models of KiRAG's tables,
for a GPU; not yet run. BeamDR's encoder is not included; train one on
chains of passages (configs/aligner.py, ``--config.data.units=passage``) and name it in
``config.encoder.model``.

configs/compare.py has the record of ``small``.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("beam_retrieval")
    if preset == "small":
        return blocks.shipped(config)
    return blocks.preset(config, preset, paper="kirag")
