"""KiRAG: retrieval along a reasoning chain that an aligner proposes and a constructor extends.

python launch/answer.py --config=configs/methods/kirag.py:small --config.data.dir=DATA --workdir=W

Needs a dataset folder, with triples unless the preset is ``small``. docs/methods/kirag.md explains
the presets: ``small`` runs on a laptop's CPU with this repository's models. Its units are
sentences, and each step appends the aligner's best one, because SmolLM2-135M is too weak as a
constructor. Without a preset, it runs the paper's loop over triples with untrained small models.
``medium`` has a model of 1.5B parameters, whose output is matched to the candidates. ``paper``
(Llama3-8B-Instruct, E5-large-v2, sections 3.2, 3.3, B.3) and ``code`` (values of the released code)
are for a GPU and need a trained aligner, --config.rankers.aligner.model=W; not yet run.

Record (2026-11-24, 2 busy CPU cores, Python 3.11, jax 0.10.2):
  ``small`` --config.data.dir=2wikimultihopqa --config.data.split=dev --config.data.fold=dev_tune
  --config.data.limit=10 --config.data.random=true (99 passages; commit e1b41b8): EM 40.0, F1 40.0,
  passage R@3 85.0, R@5 95.0; every chain has 5 sentences; 672 s.
  The same with SmolLM2-135M as the constructor (--config.kirag.use_constructor=true
  --config.kirag.match_cutoff=0.8 --config.kirag.reader=nothing; commit b040127): R@3 72.5, R@5
  80.0; 5 of 10 chains are empty, 13 outputs match no candidate; 210 s.
  ``medium`` with Qwen2.5-Coder-1.5B-Instruct (Q4_K_M), the frozen MiniLM as aligner and
  --config.data.dir=musique --config.data.only_with_triples=true --config.data.limit=4: EM 0.0, R@3
  and R@5 37.5; no chain is empty, 15 triples match no candidate; 390 s.
"""

from typing import Any

from configs.methods import blocks


def get_config(preset: str = "") -> Any:
    config = blocks.method("kirag", constructor=64)
    config.rankers.aligner.triple_text = "angle"  # KiRAG's form of triples
    if preset == "small":
        config.kirag.units = "sentence"
        config.kirag.use_constructor = False
        config.kirag.accumulate = True
        config.kirag.ranking = "chain"
        return blocks.shipped(config)
    if preset == "medium":
        config.kirag.match_cutoff = 0.8
        config.kirag.prefilled_opening = config.kirag.append_best = True
        return blocks.preset(config, preset)
    if preset in ("paper", "code"):
        config.rankers.aligner.kind = (
            "aligner"  # Trained with configs/aligner.py, named by the user.
        )
        config.rankers.aligner.query_max_length = 256
        config.rankers.aligner.passage_max_length = 128
        config.extractor.dialect = "kirag"
    if preset == "code":
        config.kirag.retriever_query = "last"
        config.kirag.accumulate = True
        config.kirag.pool_size = 100
        config.kirag.list_when_empty = True
        config.kirag.as_written = True
        config.kirag.stop = "empty"
        config.kirag.boost = 0.5
        preset = "paper"
    return blocks.preset(config, preset, paper="kirag")
