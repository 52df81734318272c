"""Iter-RetGen: retrieves again with the question and the last answer (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/iter_retgen.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads with the shipped reader, on a laptop's CPU; ``medium`` is as in
configs/methods/cirag.py. ``paper`` has the questions, contexts and encoder of C2RAG's tables.
``dualrag`` and ``cirag`` run it like the other baselines of these two papers, which have no
Iter-RetGen: with DualRAG's reranker (up to 10 of 50 passages, 5 rounds), and with CIRAG's 10
passages and 4 rounds. These three are for a GPU; not yet run.

configs/compare.py has the record of ``small``.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("iter_retgen", {"rerank_from": 50})
    method = config.iter_retgen
    if preset in blocks.RUN_BY:
        method.num_read = 10
        method.num_rounds = 5 if preset == "dualrag" else 4
        return blocks.as_run_by(config, preset)
    if preset == "small":
        return blocks.shipped(config)
    return blocks.preset(config, preset, blocks.RUN_BY, paper="c2rag")
