"""IRCoT: retrieval interleaved with a chain of thought; IRDoc with ``ircot.thoughts=documents``.

Presets: ``small`` thinks with SmolLM2-135M and reads the five best passages with the reader that
comes with this repository, on a laptop's CPU; the others as in configs/methods/cirag.py.

Record (before it had that reader; ``small`` --config.data.dir=musique
--config.data.only_with_triples=true --config.data.limit=10; 2026-11-23, SmolLM2-135M, 2 CPU cores
under load 6): 10 questions, 50 retrievals, 60 generations; 9 min; EM 0.0, F1 5.9, Acc 10.0,
passage R@3 54.2, R@5 60.8.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """IRCoT as the preset says."""
    config = blocks.preset(blocks.method("ircot", reasoner=64, reader=32), preset)
    if preset == "small":
        config.ircot.num_read = 5
        return blocks.shipped(config)
    return config
