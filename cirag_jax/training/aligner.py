"""Trains KiRAG's reasoning-chain aligner (section 3.4, appendix; spec section 2)."""

import dataclasses
import math
import operator
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.datasets import load
from cirag_jax.errors import UserError, check_at_least, check_choice, check_positive
from cirag_jax.evaluation import next_unit
from cirag_jax.models.io.pretrained import TextEncoder, load_encoder
from cirag_jax.retrieval import encode as encode_lib
from cirag_jax.retrieval.rankers import TripleText
from cirag_jax.training import gradient_cache, link_head, optimizers, retrieved
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import pools as pools_lib
from cirag_jax.training.data import splits
from cirag_jax.training.fit import fit
from cirag_jax.types import Config


def train_and_evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains to the end (or from the last checkpoint on) and returns the best dev metrics.

    Leaves ``checkpoints/``, ``metrics.jsonl`` and TensorBoard events in ``workdir``, and
    ``link_head.safetensors`` where the config asks for a head.
    """
    start = time.monotonic()
    check_config(config)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    make_layout(config, mesh)  # Refuses a batch that does not divide.

    # ---- Data -----------------------------------------------------------------------------------
    run = state_lib.identity_of(config, ("keep_activations", "activations_gib"))
    state_lib.refuse_other(workdir, run)  # Before negatives are retrieved.
    sets = [splits.split_questions(dataset, config) for dataset in load.load_datasets(config.data)]
    kind = config.data.units
    chains, pools, of_prefixes = training_chains(sets, config, workdir)
    num_dev = sum(len(one.dev) for one in sets)
    dev_chains, dev_pools = dev_data(sets, kind)
    problems = next_unit.next_units(dev_chains, dev_pools, kind)
    state_lib.check_metric(config.best_metric, list(_metrics(problems, _no_embedding)))
    if config.head.rounds:
        link_head.check_questions([q for one in sets for q in one.train])

    # ---- Model ----------------------------------------------------------------------------------
    encoder = load_encoder(
        config.model.spec,
        dtype=config.model.dtype,
        mesh=mesh,
        pooling=config.model.pooling,
        query_prefix=config.model.query_prefix,
        passage_prefix=config.model.passage_prefix,
        hidden_dropout=config.model.dropout,
        attention_dropout=config.model.dropout,
        remat=config.model.remat,
    )
    batches = make_batches(config, chains, pools, encoder, mesh, of_prefixes)
    total_steps = num_steps(config, len(chains))
    tx = optimizers.make_optimizer(config.optimizer, total_steps)
    state = state_lib.make_state(encoder.state, tx, config.seed, mesh)
    state_lib.announce(
        f"{len(chains):,} chains, {num_dev:,} dev questions, {total_steps:,} steps of "
        f"{questions_per_step(config)} chains with up to {config.prefixes_per_question} queries "
        f"each, mesh {dict(mesh.shape)}, "
        f"{sum(x.size for x in jax.tree.leaves(state.params)):,} parameters"
    )

    # ---- Restore --------------------------------------------------------------------------------
    examples = state_lib.digest(chains, pools, dev_chains, dev_pools, of_prefixes)
    meta = {
        "component": "aligner",
        "model": state_lib.absolute(config.model.spec),
        "pooling": encoder.pooling,
        "query_prefix": encoder.query_prefix,
        "passage_prefix": encoder.passage_prefix,
        "units": kind,
        "trained_on": sorted(question.id for one in sets for question in one.train),
        "triple_text": dataclasses.asdict(TripleText("angle")) if kind == "triple" else None,
        "query_max_length": config.query_max_length,
        "unit_max_length": config.unit_max_length,
        "run": {**run, state_lib.EXAMPLES: examples},
    }
    checkpoints = state_lib.open_checkpoints(config, workdir)
    state, first_step = state_lib.restore(checkpoints, state, meta, total_steps, batches)

    # ---- Train ----------------------------------------------------------------------------------
    evaluate = make_evaluate(config, problems, encoder, mesh)

    def one_step(state: state_lib.TrainState, batch: pools_lib.Batch) -> Any:
        return train_step(encoder.graphdef, tx, state, batch, config, mesh)

    with checkpoints, jax.set_mesh(mesh):
        fitted = fit(
            config,
            workdir,
            one_step,
            state,
            batches,
            evaluate,
            checkpoints,
            meta,
            first_step=first_step,
            total_steps=total_steps,
            start=start,
            advice="Lower config.optimizer.learning_rate or raise config.temperature",
        )

    # ---- Link head ------------------------------------------------------------------------------
    head: dict[str, Any] | None = {}
    if fitted.complete and config.head.rounds:
        head = link_head.train_head(config, workdir, sets, start)

    # ---- Result ---------------------------------------------------------------------------------
    return {
        "complete": fitted.complete and head is not None,
        "step": fitted.step,
        "total_steps": total_steps,
        **fitted.best,
        **(head or {}),
        "num_chains": len(chains),
        "num_dev_questions": num_dev,
        "seconds": round(time.monotonic() - start, 1),
    }


# ---------------------------------------------------------------------------------------- one step


def train_step(
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    state: state_lib.TrainState,
    batch: pools_lib.Batch,
    config: Config,
    mesh: jax.sharding.Mesh,
    run: Callable[..., Any] = operator.call,
) -> tuple[state_lib.TrainState, dict[str, jax.Array]]:
    """One optimiser step on one global batch; ``state`` is donated. Call under ``set_mesh(mesh)``.

    ``run`` calls what is compiled, see `rehearsal`.

    Returns:
      The new state, and device scalars: loss, accuracy, positive score, gradient, update and
      parameter norms.
    """
    key = None
    if config.model.dropout > 0:
        key = run(jax.random.fold_in, state.key, state.step)
    loss, metrics, gradient = gradient_cache.loss_and_gradient(
        graphdef,
        state.params,
        place_batch(batch, mesh),
        temperature=config.temperature,
        width=_width(state.params),
        dtype=config.model.dtype,
        dropout_key=key,
        keep_bytes=_keep_bytes(config),
        run=run,
    )
    state, norms = run(_apply_gradient, tx, state, gradient)
    return state, {"loss": loss, **metrics, **norms}


_apply_gradient = jax.jit(state_lib.apply_gradient, static_argnums=0, donate_argnums=1)


def _keep_bytes(config: Config) -> float:
    if not config.keep_activations:
        return 0.0
    return math.inf if config.activations_gib is None else config.activations_gib * 2**30


def _width(params: Any) -> int:
    return params["embedding_norm_scale"].shape[0]


def place_batch(batch: pools_lib.Batch, mesh: jax.sharding.Mesh) -> gradient_cache.DeviceBatch:
    """Puts a host batch, the same on every process, on the mesh: rows of chunks are sharded."""

    def rows(x: np.ndarray) -> jax.Array:
        return sharding.place(x, sharding.batch_sharding(mesh, x.ndim, x.shape))

    def everywhere(x: np.ndarray) -> jax.Array:
        return sharding.place(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))

    return gradient_cache.DeviceBatch(
        tuple(
            gradient_cache.DeviceChunk(rows(c.tokens_BT), rows(c.mask_BT), rows(c.row_B))
            for c in batch.chunks
        ),
        everywhere(batch.positive_B),
        everywhere(batch.count_BC),
        everywhere(batch.weight_B),
    )


# -------------------------------------------------------------------------------------------- data


def training_chains(
    sets: Sequence[splits.Questions], config: Config, workdir: pathlib.Path
) -> tuple[list[chains_lib.Chain], list[tuple[chains_lib.Unit, ...]], list[pools_lib.PrefixPools]]:
    """The chains of all training questions, the units of each question's own passages, and with
    ``config.retrieved.model`` the pools of each chain's prefixes (else an empty list).
    """
    kind, negatives = config.data.units, config.negatives
    own = [pools_lib.chains_and_pools(one.dataset, one.train, kind, negatives) for one in sets]
    chains = [chain for found, _ in own for chain in found]
    pools = [pool for _, found in own for pool in found]
    pools_lib.check_enough(len(chains), questions_per_step(config))  # Before any search.
    of_prefixes: list[pools_lib.PrefixPools] = []
    if config.retrieved.model:
        for one, found in zip(sets, own, strict=True):
            of_prefixes += retrieved.prefix_pools(config, workdir, one.dataset, *found)
    return chains, pools, of_prefixes


def dev_data(
    sets: Sequence[splits.Questions], kind: chains_lib.UnitKind
) -> tuple[list[chains_lib.Chain], list[tuple[chains_lib.Unit, ...]]]:
    """The chains of all dev questions, and the units of each question's own passages."""
    chains, pools = [], []
    for dataset, _, dev in sets:
        found = pools_lib.chains_and_pools(dataset, dev, kind) if dev else ([], [])
        chains += found[0]
        pools += found[1]
    return chains, pools


def num_steps(config: Config, chains: int) -> int:
    """Steps of a run over so many chains."""
    steps_per_epoch = max(chains // questions_per_step(config), 1)
    return config.num_steps or max(round(config.num_epochs * steps_per_epoch), 1)


def questions_per_step(config: Config) -> int:
    """Questions of a step, each with up to ``config.prefixes_per_question`` queries."""
    return max(config.batch_size // config.prefixes_per_question, 1)


def make_layout(config: Config, mesh: jax.sharding.Mesh) -> pools_lib.Layout:
    """The sizes of every batch, as the config and the mesh say."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    own_negatives = config.chain_negatives or config.retrieved.model  # Of each prefix.
    negative_sets = config.prefixes_per_question if own_negatives else 1
    per_question = config.prefixes_per_question + negative_sets * config.num_negatives
    questions = questions_per_step(config)
    return pools_lib.Layout(
        num_queries=questions * config.prefixes_per_question,
        num_candidates=questions * per_question,
        negatives=config.negatives,
        mask_false_negatives=config.mask_false_negatives,
        micro_batches=config.micro_batches if config.accumulation == "official" else 1,
        device_groups=ways,
        chunk_tokens=config.chunk_tokens,
        bucket_lengths=encode_lib.BUCKETS,
    )


def make_batches(
    config: Config,
    chains: list[chains_lib.Chain],
    pools: list[tuple[chains_lib.Unit, ...]],
    encoder: TextEncoder,
    mesh: jax.sharding.Mesh,
    of_prefixes: Sequence[pools_lib.PrefixPools] = (),
) -> Any:
    """The endless, resumable iterator of training batches that ``config`` describes."""
    sampling = pools_lib.Sampling(
        config.prefixes_per_question, config.num_negatives, config.order, config.chain_negatives
    )
    layout = make_layout(config, mesh)
    prefixes = {"query": encoder.query_prefix, "passage": encoder.passage_prefix}
    limits = {"query": config.query_max_length, "passage": config.unit_max_length}

    def tokenize(texts, role):
        return encode_lib.tokenize(encoder, [prefixes[role] + t for t in texts], limits[role])

    return pools_lib.batches(
        chains,
        pools,
        config.data.units,
        sampling,
        layout,
        tokenize,
        encoder.config.pad_id,
        config.seed,
        of_prefixes,
    )


# ---------------------------------------------------------------------------------------- evaluate


def make_evaluate(
    config: Config,
    problems: Sequence[next_unit.NextUnit],
    encoder: TextEncoder,
    mesh: jax.sharding.Mesh,
) -> Callable[[nnx.State], dict[str, float]]:
    """A function from parameters to ``dev/...`` metrics over each question's own candidates."""

    def evaluate(params: nnx.State) -> dict[str, float]:
        def embed(texts, role):
            limit = config.query_max_length if role == "query" else config.unit_max_length
            return encode_lib.encode(encoder, params, texts, kind=role, max_length=limit, mesh=mesh)

        return _metrics(problems, embed)

    return evaluate


def _metrics(problems: Sequence[next_unit.NextUnit], embed: next_unit.Embed) -> dict[str, float]:
    if not problems:
        return {}
    metrics = next_unit.evaluate_next_unit(problems, embed)
    return {f"dev/{name}": value for name, value in metrics.items()}


def _no_embedding(texts: Sequence[str], role: str) -> np.ndarray:
    """What shows which metrics there will be."""
    del role
    return np.zeros((len(texts), 1))


# ------------------------------------------------------------------------------------ bookkeeping


def check_config(config: Config) -> None:
    """Raises UserError where a setting cannot be."""
    state_lib.check_training(config)
    ones = ("batch_size", "prefixes_per_question", "micro_batches", "chunk_tokens")
    check_at_least(1, config, *ones)
    check_choice("config.data.units", config.data.units, chains_lib.UNIT_KINDS)
    check_at_least(1 if config.negatives == "own" else 0, config, "num_negatives")
    check_at_least(3, config, "query_max_length", "unit_max_length")  # two tokens frame a text
    check_at_least(0, config, "data.limit", "dev.questions", "head.rounds")
    check_positive(config, "temperature")
    check_choice("config.accumulation", config.accumulation, ("cached", "official"))
    check_choice("config.negatives", config.negatives, pools_lib.NEGATIVES)
    check_choice("config.order", config.order, pools_lib.ORDERS)
    if config.activations_gib is not None:
        check_at_least(0, config, "activations_gib")
    check_at_least(1, config, "retrieved.passages")
    if config.retrieved.model and config.order != "printed":
        raise UserError(
            f"config.order={config.order}: config.retrieved.model retrieves for the first steps of "
            "a chain, which are its prefixes with config.order=printed"
        )
    if config.head.rounds:
        link_head.check_settings(config.head)
