"""Trains KiRAG's reasoning-chain aligner (section 3.4 and Appendix B).

The aligner ranks units: triples, sentences or passages.
"""

import collections
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.datasets import load, triple_files
from cirag_jax.errors import UserError, check_at_least, check_positive
from cirag_jax.evaluation import next_unit
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.io.pretrained import TextEncoder, load_encoder
from cirag_jax.models.lora import LoraConfig
from cirag_jax.retrieval import encode as encode_lib
from cirag_jax.retrieval.rankers import TripleText
from cirag_jax.training import link_head
from cirag_jax.training import state as state_lib
from cirag_jax.training.aligner_batches import (
    chains_from_files,
    dev_data,
    make_batches,
    micro_batches,
    questions_per_step,
    training_chains,
)
from cirag_jax.training.aligner_step import make_optimizer, train_step
from cirag_jax.training.data import mixture, splits
from cirag_jax.training.data import pools as pools_lib
from cirag_jax.training.fit import fit
from cirag_jax.types import ROLES, Config, NonNegativeFloat, PositiveInt, Role
from cirag_jax.validation import check_value


def train_and_evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains an aligner, or resumes its training, and returns the best dev metrics.

    Writes ``checkpoints/``, ``metrics.jsonl`` and TensorBoard events to ``workdir``, and
    ``link_head.safetensors`` if ``config.head.rounds`` is not 0.
    """
    start = time.monotonic()
    check_config(config)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)

    # ---- Data -----------------------------------------------------------------------------------
    run = state_lib.identity_of(config, ("keep_activations", "activations_gib", "model.unroll"))
    state_lib.check_same_run(workdir, run)  # Early, because mining takes long.
    datasets = state_lib.load_equally(
        lambda: load.load_datasets(config.data), state_lib.dataset_digests
    )
    at_least = questions_per_step(config) if len(datasets) == 1 else 1
    sets = [splits.split_questions(dataset, config, at_least) for dataset in datasets]
    kind = config.data.units
    chains, pools, prefix_pools, sizes = training_chains(sets, config, workdir)
    dev_chains, dev_pools = dev_data(sets, kind, chains_from_files(config))
    problems = next_unit.next_units(dev_chains, dev_pools, kind)
    # A stand-in embedder shows the names of the metrics.
    names = list(_metrics(problems, lambda texts, role: np.zeros((len(texts), 1))))
    state_lib.check_metric(config.best_metric, names)
    train_questions = [question for questions in sets for question in questions.train]
    num_dev = sum(len(questions.dev) for questions in sets)
    if config.head.rounds:
        link_head.check_questions(train_questions)

    # ---- Model ----------------------------------------------------------------------------------
    encoder = load_encoder(
        config.model.spec,
        dtype=config.model.dtype,
        mesh=mesh,
        pooling=config.model.pooling,
        instructions=config.model.instructions,
        dimensions=config.model.dimensions,
        tasks=config.model.tasks,
        dropout=config.model.dropout,
        remat=config.model.remat,
        unroll=layers_per_iteration(config),
        bidirectional=config.model.bidirectional,
        lora=make_lora(config),
    )
    params, frozen = encoder.split()
    trains_decoder = isinstance(encoder.config, EmbedderConfig) and not frozen
    if trains_decoder and config.model.dtype != "float32":
        raise UserError(
            f"config.model.dtype={config.model.dtype} needs config.model.lora.rank above 0 for a "
            "decoder; all its parameters are trained only in float32"
        )
    batches = make_batches(config, chains, pools, encoder, mesh, prefix_pools, sizes)
    num_examples = pools_lib.num_examples(chains, config.epoch)
    total_steps = state_lib.num_steps(config, num_examples, questions_per_step(config))
    tx = make_optimizer(config, total_steps)
    if config.model.train == "tasks" and not encoder.tasks:
        raise UserError(
            f"config.model.train=tasks needs task adapters, which {config.model.spec} lacks"
        )
    state = state_lib.make_state(params, tx, config.seed, mesh)
    state_lib.announce(
        f"{len(chains):,} chains, {num_dev:,} dev questions, {total_steps:,} steps of "
        f"{questions_per_step(config)} chains with up to {config.prefixes_per_question} queries "
        f"each, mesh {dict(mesh.shape)}, "
        f"{sum(x.size for x in jax.tree.leaves(state.params)):,} parameters"
    )

    if config.data.weights is not None:
        state_lib.announce(f"drawn in an epoch: {_drawn(config, num_examples)}")

    def train_on(state: state_lib.TrainState, batch: pools_lib.Batch) -> Any:
        return train_step(encoder.graphdef, tx, state, batch, config, mesh, frozen=frozen)

    # ---- Fit ------------------------------------------------------------------------------------
    truncated: collections.Counter[Role] = collections.Counter()
    evaluate = make_evaluate(config, problems, encoder, mesh, truncated, frozen)
    of_sets = [sizes] if config.data.weights is not None else []
    examples = state_lib.digest(chains, pools, dev_chains, dev_pools, prefix_pools, *of_sets)
    meta = {
        "component": "aligner",
        "model": state_lib.absolute(config.model.spec),
        "pooling": encoder.pooling,
        "query_prefix": encoder.query_prefix,
        "passage_prefix": encoder.passage_prefix,
        "triple_prefix": encoder.triple_prefix,
        "dimensions": encoder.config.dimensions,
        "tasks": ",".join(encoder.tasks) or ("none" if config.model.tasks == "none" else None),
        **adapter_fields(encoder),
        "units": kind,
        "inputs": _inputs(config) if kind == "triple" else {},
        "trained_on": sorted(question.id for question in train_questions),
        "triple_text": dataclasses.asdict(TripleText("angle")) if kind == "triple" else None,
        "query_max_length": config.query_max_length,
        "unit_max_length": config.unit_max_length,
        "run": {**run, state_lib.EXAMPLES: examples},
    }
    with state_lib.open_checkpoints(config, workdir) as checkpoints, jax.set_mesh(mesh):
        result = fit(
            config,
            workdir,
            train_on,
            state,
            batches,
            evaluate,
            checkpoints,
            meta,
            total_steps=total_steps,
            start=start,
            advice="Lower config.optimizer.learning_rate or raise config.temperature",
        )

    # ---- Link head ------------------------------------------------------------------------------
    head_metrics: dict[str, float] | None = {}
    if result.complete and config.head.rounds:
        head_metrics = link_head.train_head(config, workdir, sets, start)

    # ---- Result ---------------------------------------------------------------------------------
    return {
        **result.summary(),
        "complete": result.complete and head_metrics is not None,
        **(head_metrics or {}),
        "truncated_texts": _report_truncated(config, truncated),
        "num_chains": len(chains),
        "num_dev_questions": num_dev,
        "num_dev_chains": len(dev_chains),
        "mean_chain_length": _mean_length(chains),
        "mean_dev_chain_length": _mean_length(dev_chains),
        **({"drawn": _drawn(config, result.step * questions_per_step(config))} if of_sets else {}),
        "seconds": round(time.monotonic() - start, 1),
    }


# ------------------------------------------------------------------------------------------ result


def _mean_length(chains: Sequence[chains_lib.Chain]) -> float | None:
    return sum(len(chain.steps) for chain in chains) / len(chains) if chains else None


def _drawn(config: Config, count: int) -> dict[str, int]:
    """Returns how many of the first ``count`` questions or prefixes each folder contributes."""
    counts = mixture.drawn(config.data.weights, count)
    return mixture.by_source(load.folders_of(config.data), counts)


def _inputs(config: Config) -> dict[str, list[str]]:
    """Returns the extractors of the training triples, if they are recorded."""
    sources = config.data.triples
    sources = sources if isinstance(sources, list | tuple) else [sources]
    names = [" and ".join(triple_files.extractors_of(source)) for source in sources]
    return {"triples": list(dict.fromkeys(names))} if all(names) else {}


# ---------------------------------------------------------------------------------------- evaluate


def make_evaluate(
    config: Config,
    problems: Sequence[next_unit.NextUnit],
    encoder: TextEncoder,
    mesh: jax.sharding.Mesh,
    truncated: collections.Counter[Role],
    frozen: nnx.State,
) -> Callable[[nnx.State], dict[str, float]]:
    """Returns a function that computes the ``dev/...`` metrics (ranking the next unit).

    ``truncated`` gets the numbers of texts, by role, that were cut in the last evaluation.
    """

    def evaluate(params: nnx.State) -> dict[str, float]:
        params = nnx.merge_state(params, frozen) if frozen else params
        truncated.clear()

        def embed(texts, role):
            limit = config.query_max_length if role == "query" else config.unit_max_length
            kind: Role = "query" if role == "query" else chains_lib.role_of(config.data.units)
            return encode_lib.encode(
                encoder,
                params,
                texts,
                kind=kind,
                max_length=limit,
                mesh=mesh,
                truncated=truncated,
            )

        return _metrics(problems, embed)

    return evaluate


def _report_truncated(config: Config, counts: collections.Counter[Role]) -> dict[str, int]:
    """Returns how many dev texts of each role were cut, and prints a warning if any."""
    if total := sum(counts.values()):
        state_lib.announce(
            f"WARNING: {total:,} dev texts are longer than config.query_max_length="
            f"{config.query_max_length} or config.unit_max_length={config.unit_max_length}; only "
            "their beginning was read"
        )
    return {role: counts[role] for role in ROLES}


def _metrics(problems: Sequence[next_unit.NextUnit], embed: next_unit.Embed) -> dict[str, float]:
    if not problems:
        return {}
    metrics = next_unit.evaluate_next_unit(problems, embed)
    return {f"dev/{name}": value for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------- settings


def make_lora(config: Config) -> LoraConfig | None:
    """Returns the adapter's hyper-parameters; None trains all parameters."""
    return LoraConfig(**config.model.lora.to_dict()) if config.model.lora.rank else None


def adapter_fields(encoder: TextEncoder) -> dict[str, Any]:
    """Returns what a checkpoint records about a decoder and its adapter; empty for encoders."""
    if not isinstance(encoder.config, EmbedderConfig):
        return {}
    lora = encoder.config.lora
    return {
        "bidirectional": not encoder.config.decoder.causal,
        "lora": lora and dataclasses.asdict(lora),
    }


def layers_per_iteration(config: Config) -> int:
    """Returns ``config.model.unroll``, or its default for JAX's platform."""
    return config.model.unroll or (4 if jax.default_backend() == "gpu" else 1)


def check_config(config: Config) -> None:
    """Raises `UserError` for invalid settings."""
    state_lib.check_training(config)
    check_at_least(1, config, "batch_size", "prefixes_per_question", "micro_batches")
    check_at_least(1, config, "negative_groups")
    check_at_least(1, config, "chunk_tokens", "retrieved.passages")
    check_at_least(1 if config.negatives == "own" else 0, config, "num_negatives")
    check_at_least(3, config, "query_max_length", "unit_max_length")  # 2 are special tokens.
    check_at_least(0, config, "data.limit", "dev.questions", "head.rounds")
    check_positive(config, "temperature")
    check_at_least(0, config, "model.lora.rank")
    mixture.check_weights(config.data.weights, len(load.folders_of(config.data)))
    check_value("config.data.units", config.data.units, chains_lib.UnitKind)
    check_value("config.accumulation", config.accumulation, Literal["cached", "official"])
    check_value("config.model.train", config.model.train, Literal["all", "base", "tasks"])
    check_value("config.negatives", config.negatives, pools_lib.Negatives)
    check_value("config.order", config.order, pools_lib.Order)
    check_value("config.model.dimensions", config.model.dimensions, PositiveInt | None)
    check_value("config.model.unroll", config.model.unroll, PositiveInt | None)
    check_value("config.epoch", config.epoch, pools_lib.Epoch)
    if config.epoch == "prefixes" and config.prefixes_per_question != 1:
        raise UserError(
            "config.epoch=prefixes needs config.prefixes_per_question=1, not "
            f"{config.prefixes_per_question}, because every prefix is an example of its own"
        )
    check_value("config.activations_gib", config.activations_gib, NonNegativeFloat | None)
    if config.negative_groups > 1 and config.negatives != "in_batch":
        raise UserError(
            f"config.negative_groups={config.negative_groups} needs config.negatives=in_batch, not "
            f"{config.negatives}"
        )
    questions, groups = questions_per_step(config), micro_batches(config) * config.negative_groups
    if questions % groups:
        raise UserError(
            f"config.batch_size={config.batch_size} with config.prefixes_per_question="
            f"{config.prefixes_per_question} is {questions} questions per step, which cannot be "
            f"divided into {groups} groups (config.micro_batches times config.negative_groups); "
            f"set config.batch_size to a multiple of {groups * config.prefixes_per_question}"
        )
    if config.retrieved.model and config.order != "printed":
        raise UserError(
            f"config.retrieved.model needs config.order=printed, not {config.order}, because "
            "passages are retrieved for the first steps of a chain"
        )
    if config.head.rounds:
        link_head.check_settings(config.head)
