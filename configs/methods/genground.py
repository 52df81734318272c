"""GenGround: guess the answer to a sub-question, then ground it (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/genground.py --config.data.dir=DATA --workdir=W

Presets: ``small`` writes sub-questions with SmolLM2-135M and grounds and answers them with the
shipped reader, on a laptop's CPU; it drops passages with a cosine of at most 0.3 (ours). ``medium``
has a model of 1.5B parameters with the tags and pairs of the released code. ``paper`` is the code's
setting (50 passages, of which bge-reranker-v2-m3 keeps 10) on the questions and corpora of
DualRAG's tables, for a GPU; not yet run.

configs/compare.py has the record of ``small``, in which 18 answers were not grounded.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("genground", generator=192)
    method, ranker = config.genground, config.rankers.passages
    if preset == "small":
        method.min_score = 0.3
        method.max_steps, method.num_passages, method.rerank_from = 3, 3, 10
        method.grounding = "reader"
        return blocks.shipped(blocks.preset(config, preset))
    if preset == "medium":
        method.num_passages, method.rerank_from = 6, 20
    elif preset == "paper":
        ranker.kind, ranker.model = "cross_encoder", "BAAI/bge-reranker-v2-m3"
    return blocks.preset(config, preset, paper="dualrag")
