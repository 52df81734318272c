"""GenGround: guess the answer to a sub-question, then ground it (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/genground.py --config.data.dir=DATA --workdir=W

Presets: ``small`` writes sub-questions with SmolLM2-135M and grounds and answers them with the
shipped reader, on a laptop's CPU; a cosine of 0.3 replaces the logit of 0. ``medium`` has a model
of 1.5B parameters with the tags and pairs of the released code, and the same cosine. ``paper`` is
the code's setting (50 passages, of which bge-reranker-v2-m3 keeps 10), for a GPU; not yet run.

Record (launch/compare.py, ``small``, --config.data.dir=musique --config.data.only_with_triples=true
--config.data.limit=10 --config.data.random=true; 2026-11-25, 2 CPU cores of an AMD EPYC, commit
60718d3): EM 0.0, F1 12.0, passage Recall@3 55.0, Recall@5 60.0; no failures; 56 generations, 18
answers not grounded; 107 s.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("genground", generator=192)
    method, ranker = config.genground, config.rankers.passages
    method.min_score = 0.3
    if preset == "small":
        method.max_steps, method.num_passages, method.rerank_from = 3, 3, 10
        method.grounding = "reader"
        return blocks.shipped(blocks.preset(config, preset))
    if preset == "medium":
        method.num_passages, method.rerank_from = 6, 20
    elif preset == "paper":
        method.min_score = 0.0
        ranker.kind, ranker.model = "cross_encoder", "BAAI/bge-reranker-v2-m3"
    return blocks.preset(config, preset)
