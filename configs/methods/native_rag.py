"""NativeRAG: one retrieval, one reading.

python launch/answer.py --config=configs/methods/native_rag.py --config.data.dir=FOLDER --workdir=W

Presets: ``small`` reads five passages on a laptop's CPU, with the models that come with this
repository (cirag_jax/shipped); (none) has this package's untrained small models; ``paper``
names the paper's models (configs/methods/cirag.py), for a GPU: not yet run.

Record (before it read all ten passages; with five, the questions and machine of
configs/methods/cirag.py, beside the test suite, commit b1361ce): 9 min 6 s; EM 0.0, F1 4.8,
Acc 10.0, passage Recall@3 54.9, Recall@5 61.8.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """NativeRAG as the preset says."""
    config = blocks.method(
        "native_rag", {"units": "triple", "rerank_from": 50, "reader_format": "chain"}, reader=32
    )
    if preset == "small":
        config.native_rag.num_read = 5
        return blocks.shipped(config)
    return blocks.preset(config, preset)
