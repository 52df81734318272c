"""IRCoT: retrieval interleaved with a chain of thought. Presets as in configs/methods/cirag.py.

Record (``small`` --config.data.dir=musique --config.data.only_with_triples=true
--config.data.limit=10; 2026-11-23, SmolLM2-135M, 2 CPU cores under load 6): 10 questions, 50
retrievals, 60 generations; 9 min; EM 0.0, F1 5.9, Acc 10.0, passage R@3 54.2, R@5 60.8.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """IRCoT as the preset says."""
    return blocks.preset(blocks.method("ircot", reasoner=64, reader=32), preset)
