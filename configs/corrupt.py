r"""Corrupts the facts of single questions, to measure robustness (docs/triples.md).

python launch/corrupt.py --config.data.dir=DATA --config.data.split=dev --config.kind=deletion \
    --config.ratio=0.1 --workdir=W
python launch/answer.py --config=configs/methods/c2rag.py --config.data.dir=DATA \
    --config.data.split=dev --config.data.triples=W --workdir=A

Needs questions with a context, and triples of its passages. C2RAG's Figure 3 has the ratios 0.05,
0.1, 0.15 and 0.2, with GPT-4o-mini as editor. Not yet run on a complete dataset.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common


def get_config() -> Any:
    config: Any = ConfigDict()
    config.data = common.data(split="")
    # noise (adds spurious facts) | deletion (removes facts)
    config.kind = "noise"
    # Share of the facts around the entities of a question that are changed, from 0 to 1. With the
    # same seed, a larger share contains the changes of every smaller one.
    config.ratio = 0.1
    # Noise patterns: over_generalized (a generic relation), mis_bound (another tail),
    # semantic_flip (the opposite relation). One is drawn for each fact.
    config.patterns = ("over_generalized", "mis_bound", "semantic_flip")
    config.editor = common.language_model()
    config.editor.kind = "rules"  # rules | llm (the language model of this block, as in the paper)
    config.editor.constrained = True  # Enforce a JSON schema, if the backend supports it.
    config.max_tokens = 128  # Maximum new tokens of a response of the editor.
    config.seed = 0  # Seed for drawing facts and patterns.
    config.in_flight = 256  # Questions edited concurrently.
    common.resumable(config)
    return config
