"""Search-R1's inference loop, for its checkpoints or any other model (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/search_r1.py:paper --config.data.dir=DATA \
    --config.data.split=dev --config.model=CHECKPOINT --workdir=W

From the paper and the code: the tags, four searches and a last turn that can only answer, three
passages per search in the code's form, 500 new tokens per turn, generation that stops at a closing
tag, and a correction after a turn without an action. Ours: the sentences of the prompt and of the
correction, greedy decoding, an empty query or answer counts as no action, tags in passages are
disarmed, and the limit of a block is 2,000 characters instead of 500 tokens.

Presets: ``small`` runs SmolLM2-135M on a laptop's CPU, and ``medium`` a model of 1.5B parameters.
Neither was trained on the tags, so their last turn begins with ``<answer>`` (ours); parse_errors
counts turns without an action. ``paper`` has the published 7B checkpoint and e5-base-v2, and
CIRAG's questions (ours), for a GPU; not yet run.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("search_r1", {"rerank_from": 50}, agent=500)
    if preset in ("small", "medium"):
        config.search_r1.prefill_answer = True
        config.search_r1.max_turns = 2
        config.agent.max_tokens = 96 if preset == "small" else 160
    config = blocks.preset(config, preset)
    if preset == "paper":
        config.model = "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo"
        config.encoder.model = "intfloat/e5-base-v2"
    return blocks.shipped(config) if preset == "small" else config
