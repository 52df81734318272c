"""Trains KiRAG's reasoning-chain aligner (section 3.4 and Appendix B).

The aligner ranks units: triples, sentences or passages.
"""

import collections
import dataclasses
import functools
import math
import operator
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.datasets import chains as chains_lib
from cirag_jax.datasets import load, triple_files
from cirag_jax.datasets.chain_files import FileChain, read_chains
from cirag_jax.errors import UserError, check_at_least, check_positive
from cirag_jax.evaluation import next_unit
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.io.pretrained import TextEncoder, load_encoder
from cirag_jax.models.lora import LoraConfig
from cirag_jax.models.pooling import embedding_size
from cirag_jax.retrieval import encode as encode_lib
from cirag_jax.retrieval.buckets import bucket_lengths
from cirag_jax.retrieval.rankers import TripleText
from cirag_jax.training import gradient_cache, link_head, optimizers, retrieved
from cirag_jax.training import state as state_lib
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
    total_steps = num_steps(config, num_examples)
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


# ---------------------------------------------------------------------------------------- one step


def _mean_length(chains: Sequence[chains_lib.Chain]) -> float | None:
    return sum(len(chain.steps) for chain in chains) / len(chains) if chains else None


def _drawn(config: Config, count: int) -> dict[str, int]:
    """Returns how many of the first ``count`` questions or prefixes each folder contributes."""
    folders = map(str, load.folders_of(config.data))
    return dict(zip(folders, mixture.drawn(config.data.weights, count), strict=True))


def _inputs(config: Config) -> dict[str, list[str]]:
    """Returns the extractors of the training triples, if they are recorded."""
    sources = config.data.triples
    sources = sources if isinstance(sources, list | tuple) else [sources]
    names = [" and ".join(triple_files.extractors_of(source)) for source in sources]
    return {"triples": list(dict.fromkeys(names))} if all(names) else {}


def make_optimizer(config: Config, total_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of the parameters that ``config.model.train`` selects."""
    tx = optimizers.make_optimizer(config.optimizer, total_steps)
    if config.model.train == "all":
        return tx

    def labels(params: Any) -> Any:
        def label(path: Any, _: Any) -> str:
            is_task = "_task_" in jax.tree_util.keystr(path)
            return "train" if is_task == (config.model.train == "tasks") else "keep"

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.multi_transform({"train": tx, "keep": optax.set_to_zero()}, labels)


def train_step(
    graphdef: nnx.GraphDef,
    tx: optax.GradientTransformation,
    state: state_lib.TrainState,
    batch: pools_lib.Batch,
    config: Config,
    mesh: jax.sharding.Mesh,
    run: Callable[..., Any] = operator.call,
    *,
    frozen: nnx.State | None = None,
) -> tuple[state_lib.TrainState, dict[str, jax.Array]]:
    """Runs one optimizer step on a global batch; call it under ``jax.set_mesh(mesh)``.

    Donates ``state``. If a batch is one chunk whose activations may be stored, the step is one
    program, so gradients are not passed between programs. ``run`` calls the compiled functions, see
    `rehearsal`. ``frozen`` are the parameters that are not trained.

    Returns:
      The new state, and metrics as device scalars: loss, accuracy, mean score of the positives, and
      norms of gradient, update and parameters.
    """
    params: Any = state.params
    limit = math.inf if config.activations_gib is None else config.activations_gib * 2**30
    settings = _StepSettings(
        temperature=config.temperature,
        width=embedding_size(graphdef, *filter(None, (params, frozen))),
        dtype=config.model.dtype,
        has_dropout=config.model.dropout > 0 or config.model.lora.dropout > 0,
        keep_bytes=limit if config.keep_activations else 0.0,
    )
    batch = place_batch(batch, mesh)
    key = state.key if settings.has_dropout else None
    if gradient_cache.is_one_program(
        graphdef, params, batch, frozen, settings.width, key, settings.keep_bytes
    ):
        settings = settings._replace(keep_bytes=math.inf)
        return run(compiled_step(mesh.size > 1), graphdef, tx, settings, state, batch, frozen)
    return _step(graphdef, tx, settings, state, batch, frozen, run)


class _StepSettings(NamedTuple):
    """Settings of a step; see `gradient_cache.loss_and_gradient`."""

    temperature: float
    width: int
    dtype: str
    has_dropout: bool
    keep_bytes: float


def _step(graphdef, tx, settings, state, batch, frozen, run=operator.call):
    key = run(jax.random.fold_in, state.key, state.step) if settings.has_dropout else None
    loss, metrics, gradient = gradient_cache.loss_and_gradient(
        graphdef,
        state.params,
        batch,
        frozen,
        temperature=settings.temperature,
        width=settings.width,
        dtype=settings.dtype,
        dropout_key=key,
        keep_bytes=settings.keep_bytes,
        run=run,
    )
    state, norms = run(_apply_gradient, tx, state, gradient, loss)
    return state, {"loss": loss, **metrics, **norms}


@functools.cache
def compiled_step(exchanges: bool) -> Any:
    """Returns `_step` as one program; ``exchanges`` is whether several devices run it."""
    # XLA overlaps exchanges with other work only with this scheduler, which is off by default.
    has_option = exchanges and jax.default_backend() != "tpu"
    options = {"xla_gpu_enable_latency_hiding_scheduler": True} if has_option else None
    return jax.jit(_step, static_argnums=(0, 1, 2), donate_argnums=3, compiler_options=options)


_apply_gradient = jax.jit(state_lib.apply_gradient, static_argnums=0, donate_argnums=1)


def place_batch(batch: pools_lib.Batch, mesh: jax.sharding.Mesh) -> pools_lib.Batch:
    """Places a host batch (equal on all processes) on the mesh; rows of chunks are sharded."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return pools_lib.Batch(
        state_lib.place_rows(batch.chunks, mesh),
        sharding.place(batch.positive_B, replicated),
        sharding.place(batch.count_BC, replicated),
        sharding.place(batch.weight_B, replicated),
    )


# -------------------------------------------------------------------------------------------- data


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


def num_steps(config: Config, num_examples: int) -> int:
    """Returns the number of training steps for ``num_examples`` chains or prefixes per epoch."""
    steps_per_epoch = max(num_examples // questions_per_step(config), 1)
    return config.num_steps or max(round(config.num_epochs * steps_per_epoch), 1)


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


# ---------------------------------------------------------------------------------------- evaluate


def make_evaluate(
    config: Config,
    problems: Sequence[next_unit.NextUnit],
    encoder: TextEncoder,
    mesh: jax.sharding.Mesh,
    truncated: collections.Counter[Role] | None = None,
    frozen: nnx.State | None = None,
) -> Callable[[nnx.State], dict[str, float]]:
    """Returns a function that computes the ``dev/...`` metrics (ranking the next unit).

    ``truncated`` gets the numbers of texts, by role, that were cut in the last evaluation.
    """

    def evaluate(params: nnx.State) -> dict[str, float]:
        params = nnx.merge_state(params, frozen) if frozen else params
        if truncated is not None:
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
