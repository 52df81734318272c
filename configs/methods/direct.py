"""Direct: the reader answers without any evidence.

python launch/answer.py --config=configs/methods/direct.py --config.data.dir=DATA --workdir=W

Needs a dataset folder, without a corpus. The presets are as in configs/methods/cirag.py, but
``paper`` has the questions of DualRAG's tables.

Record (--config.data.dir=bamboogle; 2026-11-23, SmolLM2-135M, 2 busy CPU cores): 125 questions in
86 s; EM 0.0, F1 2.2, Acc 2.4. With --config.data.limit=20 --config.reader.max_tokens=24, one
process and two (--num_processes=2 --coordinator_address=localhost:29871) write the same
predictions.jsonl, byte for byte (commit e070c71).
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    return blocks.preset(blocks.method("direct"), preset, paper="dualrag")
