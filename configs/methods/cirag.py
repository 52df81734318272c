"""CIRAG: construction-integration, then the cascade.

python launch/answer.py --config=configs/methods/cirag.py --config.data.dir=FOLDER --workdir=W
python launch/answer.py --config=configs/methods/cirag.py:small --config.question="..."

Presets: (none) is the paper's setting (L = 4, K = 10, N = 30) with this package's small default
models; ``small`` has two rounds, 15 candidates and short answers, for a laptop's CPU; ``paper``
names the paper's models (Qwen2.5-7B-Instruct, bge-small-en-v1.5), for a GPU.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    """CIRAG as the preset says."""
    config = blocks.method("cirag")
    blocks.triples(config)
    config.integrator = blocks.role(max_tokens=384)
    config.reader = blocks.role(max_tokens=192)
    config.extractor = blocks.role(max_tokens=512)  # Asked only with triples="online".
    if preset == "small":
        config.cirag.max_steps = 2
        config.cirag.num_candidates = 15
        config.cirag.guided = config.cirag.example = True
        config.reader.max_tokens = 96
        # 64 conversations of two rounds: each goes on from what is kept of it (3 GB in fp32).
        config.integrator.prefix_tokens = config.reader.prefix_tokens = 65536
    elif preset == "paper":
        config.integrator.model = config.reader.model = "Qwen/Qwen2.5-7B-Instruct"
        config.encoder.model = "BAAI/bge-small-en-v1.5"
    elif preset:
        raise ValueError("the presets are small and paper")
    return config
