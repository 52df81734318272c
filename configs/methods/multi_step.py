"""Multi-step RAG of GRADE's appendix A.4: answer, then search again (docs/methods/baselines.md).

python launch/answer.py --config=configs/methods/multi_step.py:small --config.data.dir=DATA \
    --config.data.split=dev --workdir=W

The paper states two rounds of ten passages, and that the second query consists of the question, the
first passages and the first answer. Its code has no such system. The order of the three parts, the
reader's prompt and the optional reranker (``rerank_from``) are ours.

Presets: ``small`` reads five passages with the shipped reader on a laptop's CPU; one passage
extends its second query, because its encoder reads short queries. ``medium`` is as in
configs/methods/cirag.py. ``paper`` is the paper's setting with bge-large-en-v1.5, one of its four
encoders, and Qwen2.5-7B-Instruct in place of OpenAI's models, for a GPU; not yet run. The paper's
questions and passages are those of configs/grade.py.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("multi_step", {"rerank_from": 50})
    if preset == "small":
        config.multi_step.num_read, config.multi_step.num_in_query = 5, 1
        return blocks.shipped(blocks.preset(config, preset))
    return blocks.preset(config, preset, paper="grade")
