"""IRCoT: retrieval interleaved with a chain of thought; IRDoc with ``ircot.thoughts=documents``.

python launch/answer.py --config=configs/methods/ircot.py:small --config.data.dir=DATA --workdir=W

Presets: ``small`` thinks with SmolLM2-135M and reads the five best passages with the shipped
reader, on a laptop's CPU; ``medium`` and ``paper`` are as in configs/methods/cirag.py. ``dualrag``
is the IRCoT of DualRAG's code: the reranker keeps up to 10 of 50 passages, these replace the
context, thoughts are sampled at temperature 0.3, and the answer is the one that they state. The
worked example of its prompt is left out. ``cirag`` is the same with 4 thoughts, as CIRAG's paper
runs it (section 4.1, B.3), with the 10 nearest passages, because CIRAG mentions no reranker; these
two are for a GPU, not yet run.

configs/compare.py has the record of ``small``. With launch/answer.py and
--config.ircot.thoughts=documents, IRDoc has EM 0.0, F1 15.0, passage Recall@3 40.0, Recall@5 53.3
on the same questions; 37 s.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("ircot", {"rerank_from": 50}, reasoner=64)
    method = config.ircot
    if preset in blocks.RUN_BY:
        method.context, method.answer_from, method.temperature = "replace", "thoughts", 0.3
        if preset == "cirag":
            method.max_thoughts = 4
        return blocks.as_run_by(config, preset)
    config = blocks.preset(config, preset, blocks.RUN_BY)
    if preset == "small":
        method.num_read = 5
        return blocks.shipped(config)
    return config
