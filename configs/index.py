"""Builds an index over the passages of a dataset folder (docs/retrieval.md).

python launch/index.py --config.data.dir=DATA --workdir=W    # leaves W/index

Run again with the same workdir, it goes on where it was stopped.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common, retrievers


def get_config() -> Any:
    """Every passage of the corpus, embedded by MiniLM-L6, for exact search."""
    config: Any = ConfigDict()
    config.data = ConfigDict()
    config.data.dir = placeholder(str)  # A dataset folder; null: the built-in dataset.
    config.encoder = retrievers.encoder()
    config.retriever = retrievers.retriever()
    del config.retriever.folder  # It is W/index.
    del config.retriever.units  # Passages; the others are built in memory.
    config.shard_rows = 2048  # Passages between two saves.
    config.mesh = common.mesh()
    # local | ray: shards are embedded by workers on a Ray cluster (docs/cluster.md).
    config.engine = "local"
    # engine=ray: so many workers; 0: one a GPU, or one a node where there is none.
    config.workers = 0
    return config
