"""Chains and batches that an aligner is trained and evaluated on."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cirag_jax.datasets import chains as chains_lib
from cirag_jax.datasets.chain_files import FileChain, read_chains
from cirag_jax.errors import UserError
from cirag_jax.models.io.pretrained import TextEncoder
from cirag_jax.retrieval import encode as encode_lib
from cirag_jax.retrieval.buckets import bucket_lengths
from cirag_jax.training import retrieved
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import pools as pools_lib
from cirag_jax.training.data import splits
from cirag_jax.types import Config


def training_chains(
    sets: Sequence[splits.Questions], config: Config, workdir: pathlib.Path
) -> tuple[
    list[chains_lib.Chain],
    list[tuple[chains_lib.Unit, ...]],
    list[pools_lib.PrefixPools],
    list[int],
]:
    """Returns the training chains, their pools, the pools of prefixes, and the chains per set.

    A pool is a list of units from which negatives are drawn. The pool of a chain has the units of
    its question's own passages. Without ``config.retrieved.model``, prefixes have no pools of their
    own, and the third list is empty.
    """
    files = chains_from_files(config)
    by_set = [
        pools_lib.chains_and_pools(dataset, train, config.data.units, config.negatives, files)
        for dataset, train, _ in sets
    ]
    chains = [chain for set_chains, _ in by_set for chain in set_chains]
    pools = [pool for _, set_pools in by_set for pool in set_pools]
    batch = config.batch_size, config.prefixes_per_question
    num_examples = pools_lib.num_examples(chains, config.epoch)
    pools_lib.check_enough(num_examples, *batch)  # Early: searches take long.
    prefix_pools: list[pools_lib.PrefixPools] = []
    if config.retrieved.model:
        for questions, chains_and_pools in zip(sets, by_set, strict=True):
            prefix_pools += retrieved.prefix_pools(
                config, workdir, questions.dataset, *chains_and_pools
            )
    return chains, pools, prefix_pools, [len(set_chains) for set_chains, _ in by_set]


def chains_from_files(config: Config) -> dict[str, FileChain] | None:
    """Returns the chains of ``config.data.chains`` by question id; None if it is null."""
    sources = config.data.chains
    if sources is None:
        return None
    if config.data.units != "triple":
        raise UserError(
            f"config.data.chains has chains of triples, but config.data.units={config.data.units}; "
            "set --config.data.units=triple."
        )
    chains: dict[str, FileChain] = {}
    for source in sources if isinstance(sources, tuple | list) else (sources,):
        own = read_chains(source)
        if clash := own.keys() & chains.keys():
            raise UserError(
                f"config.data.chains: {source} repeats {len(clash)} questions of an earlier entry "
                f"(first: {min(clash)!r})."
            )
        chains |= own
    return chains


def dev_data(
    sets: Sequence[splits.Questions],
    kind: chains_lib.UnitKind,
    files: dict[str, FileChain] | None = None,
) -> tuple[list[chains_lib.Chain], list[tuple[chains_lib.Unit, ...]]]:
    """Returns the chains of all dev questions, and the units of each question's own passages."""
    chains, pools = [], []
    for dataset, _, dev in sets:
        if dev:
            set_chains, set_pools = pools_lib.chains_and_pools(dataset, dev, kind, files=files)
            chains += set_chains
            pools += set_pools
    return chains, pools


def questions_per_step(config: Config) -> int:
    """Returns the number of questions per step; each has several queries."""
    return max(config.batch_size // config.prefixes_per_question, 1)


def make_layout(config: Config, mesh: jax.sharding.Mesh) -> pools_lib.Layout:
    """Returns the batch layout for the config and the mesh."""
    negatives_by_prefix = config.chain_negatives or config.retrieved.model
    negative_sets = config.prefixes_per_question if negatives_by_prefix else 1
    per_question = config.prefixes_per_question + negative_sets * config.num_negatives
    questions = questions_per_step(config)
    return pools_lib.Layout(
        num_queries=questions * config.prefixes_per_question,
        num_candidates=questions * per_question,
        negatives=config.negatives,
        mask_false_negatives=config.mask_false_negatives,
        micro_batches=micro_batches(config),
        device_groups=mesh.shape["data"] * mesh.shape["fsdp"],
        chunk_tokens=config.chunk_tokens,
        bucket_lengths=bucket_lengths(max(config.query_max_length, config.unit_max_length)),
        negative_groups=config.negative_groups,
    )


def longest_batch(
    config: Config, layout: pools_lib.Layout, pad_id: int, ids: Callable[[int], np.ndarray]
) -> pools_lib.Batch:
    """Returns the largest batch: distinct texts with the maximum number of tokens.

    ``ids`` returns a number of int32 token ids.
    """
    lengths = {"query": config.query_max_length, "passage": config.unit_max_length}
    queries, others = layout.num_queries, layout.num_candidates - layout.num_queries
    examples = [
        pools_lib.Example(
            str(i), (f"{i} positive",), tuple(f"negative {n}" for n in range(i, others, queries))
        )
        for i in range(queries)
    ]
    return pools_lib.build_batch(
        examples, layout, lambda texts, kind: [ids(lengths[kind]) for _ in texts], pad_id
    )


def micro_batches(config: Config) -> int:
    """Returns the number of micro-batches per step whose queries share no negatives."""
    return config.micro_batches if config.accumulation == "official" else 1


def make_batches(
    config: Config,
    chains: list[chains_lib.Chain],
    pools: list[tuple[chains_lib.Unit, ...]],
    encoder: TextEncoder,
    mesh: jax.sharding.Mesh,
    prefix_pools: Sequence[pools_lib.PrefixPools] = (),
    sizes: Sequence[int] = (),
) -> Any:
    """Returns an endless, resumable iterator of training batches; see `pools.batches`."""
    sampling = pools_lib.Sampling(
        config.prefixes_per_question, config.num_negatives, config.order, config.chain_negatives
    )
    state_lib.check_lengths(
        config, encoder.config.max_length, "query_max_length", "unit_max_length"
    )
    unit_role = chains_lib.role_of(config.data.units)
    unpooled = tuple(encoder.unpooled(encoder.prefix(role)) for role in ("query", unit_role))
    layout = dataclasses.replace(make_layout(config, mesh), unpooled=unpooled)
    limits = {"query": config.query_max_length, "passage": config.unit_max_length}

    def tokenize(texts, role):
        prefix = encoder.prefix("query" if role == "query" else unit_role)
        return encode_lib.tokenize(encoder, [prefix + text for text in texts], limits[role])

    return pools_lib.batches(
        chains,
        pools,
        config.data.units,
        sampling,
        layout,
        tokenize,
        encoder.config.pad_id,
        config.seed,
        prefix_pools,
        epoch=config.epoch,
        sizes=sizes,
        weights=config.data.weights,
    )
