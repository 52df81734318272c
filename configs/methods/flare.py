"""FLARE: retrieves for sentences with improbable tokens (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/flare.py:small --config.data.dir=DATA \
    --config.data.split=dev --workdir=W

From the paper: the sentence written ahead without passages, the thresholds theta and beta, masked
and generated queries, and the interleaved rankings of several queries. From the code of FlashRAG
and DualRAG: 64 tokens ahead, both thresholds 0.2, at most 5 sentences and 256 tokens, no retrieval
for the question, and a sentence without a query is accepted. Ours: the prompts, passages for the
reader, the end at "So the answer is" or at the model's own end, and a continuation from these
words if the text does not state an answer. FlashRAG's stop strings, single characters by mistake,
are left out.

Presets: ``small`` writes with SmolLM2-135M, and the shipped reader reads the retrieved passages, on
a laptop's CPU. ``medium`` has a model of 1.5B parameters. ``paper`` has the
thresholds 0.8 and 0.4, to our knowledge those of its authors for 2WikiMultihopQA (their paper was
not at hand), and retrieves for the question first. ``dualrag`` is DualRAG's code
with its reranker, and ``cirag`` the same with 4 sentences and 10 passages, as CIRAG's paper runs it
(section 4.1, B.3). The last three are for a GPU; not yet run. The generator must report
log-probabilities and continue a turn: backend jax or transformers, or a server with both.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    switches = {"query": "generated", "reader_format": "documents", "rerank_from": 50}
    config = blocks.method("flare", switches, generator=64, questioner=48)
    method = config.flare
    if preset in blocks.RUN_BY:
        if preset == "cirag":
            method.max_rounds = 4
        return blocks.as_run_by(config, preset)
    config = blocks.preset(config, preset, blocks.RUN_BY)
    if preset == "small":
        return blocks.shipped(config)
    if preset == "paper":
        method.threshold, method.query_threshold, method.first_retrieval = 0.8, 0.4, True
    return config
