"""Builds a search index over the passages of a dataset folder (docs/retrieval.md).

python launch/index.py --config.data.dir=DATA --workdir=W

Needs a dataset folder with a corpus. Writes W/index. Run the same command to resume.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, retrievers


def get_config() -> Any:
    config: Any = ConfigDict()
    config.data = ConfigDict()
    config.data.dir = placeholder(str)  # A dataset folder; null is the built-in dataset.
    config.encoder = retrievers.encoder()
    config.retriever = retrievers.retriever()
    del config.retriever.folder  # Always W/index.
    del config.retriever.units  # Always passages; indexes of other units are built in memory.
    # Vectors of another program instead of the encoder's: a .npy matrix or a FAISS index (Flat,
    # IVFFlat or HNSWFlat). config.encoder, which made them, still embeds the queries.
    config.vectors = placeholder(str)
    # The passage ids of their rows: .txt (one per line), .json, .jsonl or .npy; null is those of a
    # FAISS IDMap, or else the order of the corpus.
    config.vector_ids = placeholder(str)
    # Whether to also write W/vectors.npy and W/ids.txt, for other programs.
    config.write_vectors = False
    config.shard_rows = 2048  # Passages embedded between two saves.
    config.mesh = common.mesh()
    # local | ray (workers of a Ray cluster embed shards of the corpus; docs/cluster.md)
    config.engine = "local"
    # Workers with engine=ray; 0 is one per GPU, or one per node without GPUs.
    config.workers = 0
    return config
