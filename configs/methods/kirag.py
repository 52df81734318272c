"""KiRAG: retrieval along a reasoning chain that an aligner proposes and a constructor extends.

python launch/answer.py --config=configs/methods/kirag.py:small --config.data.dir=FOLDER --workdir=W
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """KiRAG as the preset says."""
    config = blocks.method("kirag", constructor=64, reader=32)
    config.rankers.aligner.triple_text = "angle"  # as KiRAG writes triples, trained or not
    if preset == "small":
        config.kirag.units = "sentence"
        config.kirag.use_constructor = False
        config.kirag.accumulate = True
        config.kirag.ranking = "chain"
        return blocks.shipped(config)
    if preset == "medium":
        config.kirag.match_cutoff = 0.8
        config.kirag.prefilled_opening = config.kirag.append_best = True
        return blocks.preset(config, preset)
    if preset in ("paper", "code"):
        config.model = "meta-llama/Meta-Llama-3-8B-Instruct"
        config.encoder.model = "intfloat/e5-large-v2"
        config.encoder.query_max_length = config.encoder.passage_max_length = 512
        config.rankers.aligner.kind = "aligner"  # of configs/aligner.py, and named by the user
        config.rankers.aligner.query_max_length = 256
        config.rankers.aligner.passage_max_length = 128
        config.data.corpus = "ircot_full"
    if preset == "code":
        config.kirag.retriever_query = "last"
        config.kirag.accumulate = True
        config.kirag.pool_size = 100
        config.kirag.list_when_empty = True
        config.kirag.as_written = True
        config.kirag.stop = "empty"
        config.kirag.boost = 0.5
    return config if preset in ("paper", "code") else blocks.preset(config, preset)
