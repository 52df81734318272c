"""DualRAG: reasoning-augmented querying and a knowledge outline (docs/methods/dualrag.md).

python launch/answer.py --config=configs/methods/dualrag.py:small --config.data.dir=DATA --workdir=W

Presets: without one, the paper's numbers, the released code's order of steps, and this package's
small models, for which cosines above 0.3 replace logits above 0. In ``small``, SmolLM2-135M thinks
and chooses names, and the aligner and reader are the shipped ones. ``medium`` has a model of
1.5B parameters in every role. ``paper`` (Qwen2.5-7B-Instruct, bge-reranker-v2-m3) is for a GPU; not
yet run.

configs/compare.py has the record of ``small``, in which 17 of 69 thoughts were cut off.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("dualrag", reasoner=192, entity_identifier=256, summarizer=256)
    method, ranker = config.dualrag, config.rankers.passages
    method.min_score, method.max_thought = 0.3, 400
    if preset == "small":
        method.max_steps, method.num_retrieved, method.num_documents = 3, 10, 3
        method.max_entities, method.max_keywords = 2, 2
        method.min_retrievals, method.entities, method.summarizer = 2, "named", "sentences"
        config.entity_identifier.max_tokens = 96
        config.reasoner.max_tokens = 96
        return blocks.shipped(blocks.preset(config, preset))
    if preset == "medium":
        method.num_retrieved, method.num_documents = 20, 5
        method.max_entities, method.max_keywords = 3, 2
        method.min_retrievals = 1
    elif preset == "paper":
        method.min_score, method.max_thought = 0.0, 0
        # The paper states no limits; these cut nothing in practice.
        for role in (config.reasoner, config.entity_identifier, config.summarizer):
            role.max_tokens = 1024
        ranker.kind, ranker.model = "cross_encoder", "BAAI/bge-reranker-v2-m3"
    return blocks.preset(config, preset, paper="dualrag")
