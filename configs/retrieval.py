"""Evaluates an aligner: passage recall by iterative retrieval, next-unit ranking.

python launch/evaluate.py --config=configs/retrieval.py --config.checkpoint=W --workdir=W2

The record of its runs stands in configs/aligner.py and README.md. Units, steps and ranking were
chosen on 2WikiMultihopQA's dev questions, the weights of links on all three dev_tune halves.

Record of ``linked``, an aligner and head of configs/aligner.py:linked (--config.data.split=dev
--config.data.fold=dev_report --config.systems="('linked','trained','bm25','links')"; 2026-11-27,
two cores of an AMD EPYC beside other work, commit a736cff, vectors of the sentences there already):
R@5 98.8 of 2WikiMultihopQA, 96.8 of HotpotQA (setting distractor, 16,924 passages; 8 min 51 s),
68.9 of MuSiQue (11,320; 5 min 49 s). The aligner alone: 89.3, 82.4, 56.5.

Record of links (--config.systems="('bm25','links')" --config.data.split=dev
--config.data.fold=dev_report; 2026-11-25, two cores of an AMD EPYC, commit 993d767): R@5 97.1 of
2WikiMultihopQA (302 questions, 7,034 passages; 5 s), 93.4 of HotpotQA (236 of setting
distractor, 16,924; 6 s), 56.9 of MuSiQue (155, 11,320; 4 s); BM25 65.2, 74.4, 45.2.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> Any:
    """The default evaluation."""
    config: Any = ConfigDict()
    config.seed = 0  # Of what is drawn, and of the resamples.
    # A training workdir, a model folder, package:NAME, a hub id.
    config.checkpoint = placeholder(str)
    config.frozen = placeholder(str)  # null: what the checkpoint was trained from.
    config.data = common.data(split="test", units=None)  # units null: those it was trained on.
    # What is evaluated, of evaluate_retrieval.SYSTEMS; (): all. Without a checkpoint there are bm25
    # and links, and with config.frozen one_shot_frozen, links_one_shot_frozen and frozen.
    config.systems = ()
    # What finds passages at every step: units (the aligner searches all units of the corpus; KiRAG
    # "w/o Retriever"), aligner or frozen (nearest passage embeddings of either encoder).
    config.retriever = "units"
    config.ranking = "chain"  # chain (passages of the chain first) | score (best unit score)
    config.steps = 4  # Searches, each with the chain so far.
    config.k = 10  # Passages retrieved a step.
    config.links = ConfigDict()  # The walk over title links; chosen on dev_tune halves.
    config.links.restart = 0.5  # Probability of beginning anew.
    config.links.seeds = 5  # First passages of the other ranking that it begins at, 1 / place each.
    config.links.title_weight = 2.0  # Of a title that the question names, where it begins as well.
    config.links.backward = 0.3  # Weight of a link against its direction.
    config.recall_at = (2, 3, 5, 10)  # The K of recall@K.
    # linked: tells what is read where passages are left out that are needed with less probability.
    config.stops = (0.1, 0.2, 0.3, 0.5, 0.7)
    config.dtype = "float32"  # Of the computation: float32 | bfloat16.
    config.query_max_length = 256  # Tokens kept of the question and its chain.
    config.unit_max_length = 128  # Tokens kept of a unit.
    config.passage_max_length = 256  # Tokens kept of a passage.
    config.bootstrap_samples = 10_000  # Resamples of the intervals.
    config.mesh = common.mesh()
    return config
