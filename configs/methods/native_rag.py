"""NativeRAG: one retrieval, one reading.

python launch/answer.py --config=configs/methods/native_rag.py --config.data.dir=FOLDER --workdir=W
"""

from typing import Any

from configs.methods import blocks


def get_config() -> Any:
    """NativeRAG with this package's small default models."""
    config = blocks.method("native_rag")
    config.reader = blocks.role(max_tokens=64)
    return config
