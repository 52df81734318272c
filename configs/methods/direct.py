"""Direct: the reader answers from what it knows; no passage is read or embedded.

python launch/answer.py --config=configs/methods/direct.py --config.data.dir=FOLDER --workdir=W

The folder may hold questions alone. Presets: as in configs/methods/cirag.py.

Record (--config.data.dir=bamboogle, questions alone; 2026-11-23, SmolLM2-135M, 2 CPU cores under
load 5): 125 questions in 86 s; EM 0.0, F1 2.2, Acc 2.4.
With --config.data.limit=20 --config.reader.max_tokens=24, by one process and by two
(--num_processes=2 --coordinator_address=localhost:29871): the same predictions.jsonl, byte for
byte (commit e070c71).
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """Direct answering as the preset says."""
    return blocks.preset(blocks.method("direct"), preset)
