"""Vector-PRF: the vectors of the best passages move the query's (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/vector_prf.py:small --config.data.dir=DATA \
    --config.data.split=dev --workdir=W

From the paper and pyserini's code: the two combinations of vectors, with three passages for the
average, and the weights 0.4 and 0.6 and five passages for Rocchio
(``--config.vector_prf.combination=rocchio --config.vector_prf.num_feedback=5``). KiRAG, whose
tables have Vector-PRF, does not state which it uses. Ours: the reader.

Presets: ``small`` reads five passages with the shipped reader on a laptop's CPU; it retrieves with
all-MiniLM-L6-v2, because the shipped aligner embeds sentences, whose passages have no vector.
``medium`` is as in configs/methods/cirag.py. ``paper`` is as in KiRAG's tables: E5-large-v2,
Llama-3-8B-Instruct and three passages for the reader, for a GPU; not yet run. BM25, title links and
indexes over sentences or triples are refused.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("vector_prf")
    encoder, retriever = config.encoder.model, config.retriever.units
    config = blocks.preset(config, preset, paper="kirag")
    if preset == "small":
        config.vector_prf.num_read = 5
        config = blocks.shipped(config)
        config.encoder.model, config.retriever.units = encoder, retriever
    elif preset == "paper":
        config.vector_prf.num_read = 3
    return config
