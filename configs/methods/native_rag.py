"""NativeRAG: one retrieval, one reading.

python launch/answer.py --config=configs/methods/native_rag.py --config.data.dir=FOLDER --workdir=W

Record (the questions and machine of configs/methods/cirag.py, beside the test suite, commit
b1361ce): 9 min 6 s; EM 0.0, F1 4.8, Acc 10.0, passage Recall@3 54.9, Recall@5 61.8.
"""

from typing import Any

from configs.methods import blocks


def get_config() -> Any:
    """NativeRAG with this package's small default models."""
    config = blocks.method("native_rag")
    config.reader = blocks.role(max_tokens=64)
    return config
