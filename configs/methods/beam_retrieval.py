r"""Beam retrieval over chains of passages, after BeamDR (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/beam_retrieval.py --config.data.dir=FOLDER \
    --workdir=W

Presets: ``small`` retrieves and reads with the models that come with this repository, on a
laptop's CPU; the others as in configs/methods/cirag.py. BeamDR's own encoder is not among them:
name one that was trained on chains of passages with ``config.encoder.model`` (configs/aligner.py,
``--config.data.units=passage``).

Record (launch/compare.py, ``small``, --config.data.dir=musique --config.data.only_with_triples=true
--config.data.limit=10 --config.data.random=true; 2026-11-25, two cores of an AMD EPYC beside
light work, commit 60718d3): 23 s, no failure; EM 10.0, F1 21.3, passage
Recall@3 70.0, Recall@5 76.7.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """Beam retrieval as the preset says."""
    config = blocks.method("beam_retrieval")
    return blocks.shipped(config) if preset == "small" else blocks.preset(config, preset)
