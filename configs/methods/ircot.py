"""IRCoT: retrieval interleaved with a chain of thought; IRDoc with ``ircot.thoughts=documents``.

python launch/answer.py --config=configs/methods/ircot.py:small --config.data.dir=DATA --workdir=W

Presets: ``small`` thinks with SmolLM2-135M and reads the five best passages with the shipped
reader, on a laptop's CPU; ``medium`` and ``paper`` are as in configs/methods/cirag.py.

configs/compare.py has the record of ``small``. With launch/answer.py and
--config.ircot.thoughts=documents, IRDoc has EM 0.0, F1 15.0, passage Recall@3 40.0, Recall@5 53.3
on the same questions; 37 s.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.preset(blocks.method("ircot", reasoner=64), preset)
    if preset == "small":
        config.ircot.num_read = 5
        return blocks.shipped(config)
    return config
