"""NativeRAG: one retrieval, then one reading.

python launch/answer.py --config=configs/methods/native_rag.py --config.data.dir=DATA --workdir=W

Presets: ``small`` reads five passages with this repository's models (cirag_jax/shipped), on a
laptop's CPU. Without a preset, it uses this package's untrained small models. ``medium`` and
``paper`` are as in configs/methods/cirag.py. ``dualrag``, ``kirag``, ``c2rag`` and ``grade`` are
the rows of these papers' tables: ``dualrag`` keeps up to 10 of 50 passages by reranking, ``kirag``
reads three passages, and ``c2rag`` five (ours; C2RAG's tables have BM25). These five
presets have not been run.

Record (reads five passages instead of ten; questions and machine of the ``llm`` record of
configs/methods/cirag.py; commit b1361ce): EM 0.0, F1 4.8, Acc 10.0, passage Recall@3 54.9, Recall@5
61.8; 9 min 6 s.

Record of a server (``medium``, Qwen2.5-Coder-1.5B-Instruct Q4_K_M in llama-cpp-python 0.3.36 with
--n_ctx 4096 --n_threads 2; --config.reader.backend=openai --config.reader.server=llamacpp
--config.reader.base_url=http://localhost:8123/v1 --config.reader.max_concurrency=1
--config.reader.timeout=300 --config.native_rag.num_passages=5 --config.native_rag.num_read=5
--config.data.dir=musique --config.data.only_with_triples=true --config.data.limit=20
--config.data.random=true; 2026-11-25, 2 CPU cores of an AMD EPYC, commit 60718d3): EM 15.0, F1
29.9, passage Recall@5 70.0; no failures; 192 s.
"""

from collections.abc import Mapping
from typing import Any

from configs.methods import blocks

# Rows of other papers' tables.
_ROWS: Mapping[str, Mapping[str, int]] = {
    "kirag": {"num_read": 3},
    "c2rag": {"num_passages": 5, "num_read": 5},
    "grade": {},
}


def get_config(preset: str = "") -> Any:
    config = blocks.method(
        "native_rag", {"units": "triple", "rerank_from": 50, "reader_format": "chain"}
    )
    if preset == "small":
        config.native_rag.num_read = 5
        return blocks.shipped(config)
    if preset == "dualrag":
        return blocks.as_run_by(config, preset)
    if preset in _ROWS:
        config.native_rag.update(_ROWS[preset])
        return blocks.preset(config, "paper", paper=preset)
    return blocks.preset(config, preset, ("dualrag", *_ROWS))
