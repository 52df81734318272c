"""IRCoT: retrieval interleaved with a chain of thought; IRDoc with ``ircot.thoughts=documents``.

Presets: ``small`` thinks with SmolLM2-135M and reads the five best passages with the reader that
comes with this repository, on a laptop's CPU; the others as in configs/methods/cirag.py.

Record (launch/compare.py, ``small``, --config.data.dir=musique --config.data.only_with_triples=true
--config.data.limit=10 --config.data.random=true; 2026-11-25, two cores of an AMD EPYC beside
light work, commit 60718d3): 75 s, no failure, 32 generations; EM 10.0, F1 24.7, passage
Recall@3 63.3, Recall@5 78.3. The same by launch/answer.py with --config.ircot.thoughts=documents:
37 s; EM 0.0, F1 15.0, passage Recall@3 40.0, Recall@5 53.3.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """IRCoT as the preset says."""
    config = blocks.preset(blocks.method("ircot", reasoner=64), preset)
    if preset == "small":
        config.ircot.num_read = 5
        return blocks.shipped(config)
    return config
