r"""Builds chains of triples for training the aligner, as in KiRAG's section 3.4 and Appendix B.2.

python launch/distill.py --config=configs/chains.py:trace --config.data.dir=FOLDER \
    --config.triples=W --workdir=C
python launch/train.py --config=configs/aligner.py:paper --config.data.dir=FOLDER \
    --config.data.triples=W --config.data.chains=C --workdir=A

Needs a dataset folder with gold passages, and their triples (W: a workdir of
``launch/extract.py --config=configs/extract.py:trace``). TRACE builds chains over the triples of a
question's gold passages. The reader reads one chain at a time, and the most probable chain with a
correct answer becomes training data; a question without one is dropped. Writes C/chains.jsonl; run
the same command to resume.

Presets: ``trace`` has the papers' models (Llama-3-8B-Instruct chooses and reads, E5-Mistral
preselects) and is for a GPU; not yet run. ``small`` (the default) chooses with the 1.5B model of
configs/methods/cirag.py:medium; not yet run.
"""

from typing import Any

from configs import common
from configs.methods import trace

PRESETS = ("small", "trace")


def get_config(preset: str = "small") -> Any:
    if preset not in PRESETS:
        raise common.unknown_preset(preset, PRESETS)
    config = trace.get_config("paper" if preset == "trace" else "medium")
    del config.question, config.documents
    config.trace.passages = "gold"
    config.trace.evidence = "each"
    config.data.split = "train"
    config.data.contexts_as_corpus = True  # Gold passages are in the contexts.
    return config
