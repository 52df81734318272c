"""DRAGIN: retrieves where entropy and attention show a need (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/dragin.py:small --config.data.dir=DATA \
    --config.data.split=dev --workdir=W

From the paper: the score of a token (entropy times the largest attention that a later token gives
to it, 0 for stop words) and the query (the words to which words above the threshold attend most).
From the code: means over the tokens of a word, and attention as a share of the sentence times its
length. Only the first sentence after a retrieval is kept. The code's values are a threshold of 1.0
(0.8 to 1.2 there), 25 words per query (25 to 35), 100 tokens per continuation (64 to 100), three
passages, and BM25. Ours: the prompts with one worked example (6 to 8 there), and a list of stop
words instead of parts of speech. Words are matched with attended tokens by their beginning, and the
text ends as in configs/methods/flare.py.

Presets: ``small`` writes with SmolLM2-135M, and the shipped reader reads the retrieved passages, on
a laptop's CPU. ``medium`` has a model of 1.5B parameters. ``paper`` has the questions, corpora and
models of KiRAG's tables, but retrieves with BM25 as in the code, for a GPU; not yet run. The
generator must report entropies and attention: backend jax.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    switches = {"reader_format": "documents", "rerank_from": 50}
    config = blocks.method("dragin", switches, generator=100)
    config = blocks.preset(config, preset, paper="kirag")
    if preset == "small":
        config.generator.max_tokens = 64
        return blocks.shipped(config)
    if preset == "paper":
        config.retriever.kind = "bm25"
    return config
