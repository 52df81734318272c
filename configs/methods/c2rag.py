"""C2RAG: constraints checked against a graph of triples (docs/methods/c2rag.md).

python launch/answer.py --config=configs/methods/c2rag.py:small --config.data.dir=DATA --workdir=W

Needs extracted triples: the folder's openie.jsonl, --config.triples=STORE, or "online".

Presets: ``small`` runs on a laptop's CPU with SmolLM2-135M, whose plans are forced into their
schema, and the shipped aligner and reader. ``medium`` has a model of 1.5B parameters. Both use
bi-encoders as rankers, so N_eff is computed from cosines (our choice). Without a preset, it has the
paper's setting with this package's small models. ``paper`` has Qwen2.5-7B-Instruct in place of
GPT-4o-mini, and the paper's MiniLM and bge-reranker-v2-m3. ``code`` is ``paper`` with the values of
the released code, and ``code_defaults`` with the defaults of its files. The last three are for a
GPU, over each question's own context; not yet run. docs/methods/c2rag.md lists differences from the
code.

Record (--config.data.dir=musique --config.data.only_with_triples=true; 2026-11-24, 2 busy CPU
cores, jax 0.10.2, commit 476cee2): ``small``, --config.data.limit=10: EM 10.0, F1 10.0, passage R@3
and R@5 45.8; 20 generations, one of them cut off; 126 s. ``medium``, Qwen2.5-Coder-1.5B-Instruct
(Q4_K_M), --config.data.limit=4: EM and F1 0.0, R@3 and R@5 62.5; 5.3 constraints per question, one
plan with a cycle, one cut off; 838 s. These few questions only show that the method runs.
"""

from typing import Any

from configs.methods import blocks

# Values of the released code that differ from the paper.
_CODE = {
    "kg_scope": "corpus",
    "plan_retries": 2,
    "plan_failure": "empty",
    "anchor_match": "ratio",
    "neff_unit": "variable",
    "neff_rule": "shift_if_nonpositive",
    "floor_at_zero": True,
    "binding_end": "other_end",
    "max_bound": 3,
    "consistent_only": False,
    "propagation": "single_pass",
    "ground_constants": True,
    "resolved_evidence": "sentence",  # MuSiQue: naming_passage.
    "fetch_sources": False,
    "recovery_unit": "sentence",  # MuSiQue: passage.
    "recovery_question": False,
    "num_dense": 20,
    "max_texts": 8,
    "recall_order": "plan",
}
_RELEASED = {
    "code": {"num_anchors": 1, "num_relations": 3, "gamma": 1.0, "num_texts": 8},
    "code_defaults": {"num_anchors": 3, "num_relations": 8, "gamma": 1.5, "num_texts": 3},
}


def get_config(preset: str = "") -> Any:
    config = blocks.method("c2rag", planner=512)
    if preset == "small":
        config.c2rag.num_examples = 1
        config.c2rag.num_variants = 1
        config.c2rag.max_constraints = 4
        config.c2rag.plan_schema = True
        config.c2rag.plan_retries = 0
        config.c2rag.recover_if_empty = True
        config.planner.max_tokens = 256
        config.planner.no_repeat_ngram_size = 20
        return blocks.shipped(config)
    if preset == "medium":
        config.c2rag.recover_if_empty = True
        config.planner.max_tokens = 320
    if preset in ("paper", *_RELEASED):
        config.rankers.triples.kind = config.rankers.passages.kind = "cross_encoder"
        config.rankers.triples.model = config.rankers.passages.model = "BAAI/bge-reranker-v2-m3"
        config.rankers.relations.model = "sentence-transformers/all-MiniLM-L6-v2"
        config.planner.max_tokens = config.reader.max_tokens = 1024  # The code has no limit.
        config.rankers.triples.triple_text = "plain"  # Lin of Eq. 6, the form of constraints.
    if preset in _RELEASED:
        config.c2rag.update(_CODE | _RELEASED[preset])
        preset = "paper"
    return blocks.preset(config, preset, paper="c2rag")
