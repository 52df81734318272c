"""Trains language models: CIRAG's integrator (sections 3.5 and B.4), and all other roles.

Roles differ only in their training examples (`training.data.conversations`).
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.models import decoder_params, lora
from cirag_jax.models.decoder_config import DecoderConfig, choose_attention
from cirag_jax.models.decoder_params import Params
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.models.io.pretrained_decoder import (
    DEFAULT_DECODER,
    check_tokenizer,
    load_decoder,
    text_prefix,
)
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import cross_entropy, lora_step, mfu, optimizers
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import conversations, mixture, packing
from cirag_jax.training.data.examples import Example, Part
from cirag_jax.training.data.packing import Layout, MicroBatch
from cirag_jax.training.fit import BatchIterator, Describe, fit
from cirag_jax.types import Config


def train_and_evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains an adapter, or all parameters, or resumes training; returns the best dev losses.

    Writes ``checkpoints/`` (trained parameters and optimizer state), ``metrics.jsonl`` and
    TensorBoard events to ``workdir``.

    Returns:
      The progress: ``complete``, ``step``, ``total_steps`` and ``epochs``, with the ``tokens`` and
      ``supervised_tokens`` up to ``step``. The quality: ``best_step`` and the ``dev/...`` metrics
      of that checkpoint. The data: ``num_examples``, ``num_dev_examples``, the counts of
      `conversations.Data`, ``packing_efficiency`` (share of tokens that are not padding) and
      ``num_dev_trained_on`` (dev questions that ``config.lora.start`` was trained on, or None if
      unknown). ``seconds`` is the duration of this process.
    """
    start = time.monotonic()
    check_config(config)

    # ---- Mesh and base --------------------------------------------------------------------------
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    spec = config.model.spec or DEFAULT_DECODER
    base = load_decoder(
        spec,
        dtype=config.model.dtype,
        param_dtype="float32" if config.full_parameters else None,
        mesh=mesh,
        remat=config.model.remat,
        quantization=config.model.quantization,
    )
    model_config = base.config
    if config.packing:  # See `decoder_config.choose_attention`.
        attention = choose_attention(model_config, packed=True)
        model_config = dataclasses.replace(model_config, attention=attention)
    folder = base.folder
    tokenizer = ChatTokenizer.load(folder)
    check_tokenizer(tokenizer, model_config.vocab_size, folder)
    lora_config = make_lora(config, model_config)

    # ---- Data -----------------------------------------------------------------------------------
    layout = make_layout(config, mesh, model_config)
    data = state_lib.load_equally(
        lambda: conversations.load_data(config, tokenizer, layout.length),
        lambda data: {state_lib.EXAMPLES: data.identity},
    )
    state_lib.check_metric(config.best_metric, metric_names(data.dev))
    plan = packing.make_plan(
        data.train,
        layout,
        config.seed,
        num_epochs=config.num_epochs,
        num_steps=config.num_steps,
        max_tokens=config.max_tokens,
        sizes=data.sizes,
        weights=config.get("weights"),
    )
    total_steps = len(plan.steps)
    state_lib.announce(
        f"{len(data.train):,} examples ({sum(len(e.tokens_T) for e in data.train):,} tokens, "
        f"{sum(np.count_nonzero(e.weight_T) for e in data.train):,} of them supervised), "
        f"{len(data.dev):,} dev examples, {total_steps:,} steps of "
        f"{sum(plan.tokens) // total_steps:,} tokens, rows {100 * plan.efficiency():.0f} % full, "
        f"mesh {dict(mesh.shape)}"
    )
    if data.sizes:
        drawn = _drawn(config, data, plan, total_steps)
        state_lib.announce(f"drawn in {total_steps:,} steps: {drawn}")

    # ---- Step -----------------------------------------------------------------------------------
    tx = optimizers.make_optimizer(config.optimizer, total_steps)
    params, trained, earlier_ids = {}, base.state, ()
    if lora_config is not None:
        params = decoder_params.to_params(base.state)
        trained, earlier_ids = initial_adapter(config, model_config, lora_config, mesh)
    num_dev_trained_on = count_dev_trained_on(config, earlier_ids, data)
    state = state_lib.make_state(trained, tx, config.seed, mesh)
    del base, trained  # Frees weights that `make_state` copied.
    train_step = lora_step.TrainStep(model_config, lora_config, tx, state, mesh, chunk=config.chunk)

    def train_on(state: state_lib.TrainState, pieces: Sequence[MicroBatch]) -> Any:
        placed = [state_lib.place_rows(piece.batch, mesh) for piece in pieces]
        return train_step(state, params, placed)

    def batch_of(step: int) -> Sequence[MicroBatch]:
        rows = plan.steps[step - 1]
        return packing.micro_batches(data.train, rows, layout, tokenizer.pad_id)

    # ---- Fit ------------------------------------------------------------------------------------
    evaluate = make_evaluate(
        model_config, lora_config, params, data.dev, layout, tokenizer, mesh, chunk=config.chunk
    )
    meta = {
        "component": component_of(config),
        "model": state_lib.absolute(spec),
        "inside": text_prefix(folder),
        "lora": lora_description(lora_config) if lora_config else None,
        "quantization": config.model.quantization,
        "length": layout.length,
        "prompt": data.prompt_settings,
        "prompt_digest": data.prompt_digest,
        "own_prompts": data.own_prompts,
        "trained_on": sorted({*data.trained_on, *(earlier_ids or ())}),
        "num_candidates": data.num_candidates,
        "inputs": dict(data.inputs),
        "run": {**state_lib.identity_of(config, MAY_DIFFER), state_lib.EXAMPLES: data.identity},
    }
    with state_lib.open_checkpoints(config, workdir) as checkpoints, jax.set_mesh(mesh):
        result = fit(
            config,
            workdir,
            train_on,
            state,
            BatchIterator(batch_of),
            evaluate,
            checkpoints,
            meta,
            total_steps=total_steps,
            start=start,
            advice="Lower config.optimizer.learning_rate",
            describe=make_describe(model_config, lora_config),
        )

    # ---- Result ---------------------------------------------------------------------------------
    num_trained = sum(len(row.places) for rows in plan.steps[: result.step] for row in rows)
    return {
        **result.summary(),
        "num_examples": len(data.train),
        "num_dev_examples": len(data.dev),
        "num_dev_trained_on": num_dev_trained_on,
        **data.counts,
        "tokens": sum(plan.tokens[: result.step]),
        "supervised_tokens": sum(plan.supervised[: result.step]),
        "epochs": round(num_trained / len(data.train), 3),
        **({"drawn": _drawn(config, data, plan, result.step)} if data.sizes else {}),
        "packing_efficiency": round(plan.efficiency(), 4),
        "seconds": round(time.monotonic() - start, 1),
    }


def _drawn(
    config: Config, data: conversations.Data, plan: packing.Plan, num_steps: int
) -> dict[str, int]:
    """Returns how many examples of the first steps come from each source."""
    counts = plan.drawn(data.sizes, num_steps)
    return mixture.by_source(conversations.sources_of(config), counts)


# ---------------------------------------------------------------------------------------- settings

# Fields that may differ when training resumes: paths of the examples (whose contents are compared),
# and the number of rows per device, which depends on the mesh.
MAY_DIFFER = ("trajectories", "conversations", "dev", "prompt_file", "rows_per_device")


def component_of(config: Config) -> str:
    """Returns the component that is trained: a role, or several that are joined by "+"."""
    if config.component != "role":
        return config.component
    return "+".join(conversations.roles_of(config))


def check_config(config: Config) -> None:
    """Raises `UserError` for invalid settings."""
    state_lib.check_training(config)
    check_at_least(1, config, "length", "batch_size", "rows_per_device", "chunk")
    check_at_least(0, config, "max_tokens", "num_dev")
    optional = ("num_trajectories", "kept_weight", "stop_weight", "answer_weight")
    check_at_least(0, config, *(name for name in optional if name in config))
    if field := conversations.SOURCES.get(config.component):
        names = "config.weights", f"entry of config.{field}"
        num_sources = len(conversations.sources_of(config))
        mixture.check_weights(config.get("weights"), num_sources, *names)
    if config.full_parameters and config.lora.start is not None:
        raise UserError(
            "config.full_parameters=true trains no adapter, so config.lora.start must be null; "
            "merge the adapter into a model (launch/export.py) and set config.model.spec."
        )
    check_choice("config.model.quantization", config.model.quantization, (None, "nf4"))
    if config.full_parameters and config.model.quantization:
        raise UserError(
            "config.full_parameters=true trains the weights, which cannot be quantized; set "
            "config.model.quantization to null."
        )
    check_choice("config.model.remat", config.model.remat, ("off", "projections", "full"))
    buckets = tuple(config.buckets)
    if list(buckets) != sorted(set(buckets)) or any(b < 1 for b in buckets):
        raise UserError(f"config.buckets={buckets} must be in ascending order")


def make_layout(config: Config, mesh: jax.sharding.Mesh, model: DecoderConfig) -> Layout:
    """Returns the layout of steps with ``config.batch_size`` rows."""
    layout = layout_of_rows(config, mesh, model, config.batch_size)
    if config.batch_size % layout.rows_per_batch:
        raise UserError(
            f"config.batch_size={config.batch_size} must be a multiple of {layout.rows_per_batch} "
            "(config.rows_per_device times the mesh axes data and fsdp)"
        )
    return layout


def layout_of_rows(
    config: Config, mesh: jax.sharding.Mesh, model: DecoderConfig, rows_per_step: int
) -> Layout:
    """Returns the layout of rows and steps for the config, the mesh and the model's attention."""
    state_lib.check_lengths(config, model.max_positions, "length")
    return Layout(
        length=config.length,
        packing=config.packing,
        buckets=(*(b for b in config.buckets if b < config.length), config.length),
        rows_per_step=rows_per_step,
        rows_per_batch=config.rows_per_device * mesh.shape["data"] * mesh.shape["fsdp"],
        shares_prefixes=model.attention != "splash",
    )


def make_lora(config: Config, model: DecoderConfig) -> LoraConfig | None:
    """Returns the hyper-parameters of the adapter; None if all parameters are trained."""
    if config.full_parameters:
        return None
    fields = {field.name: config.lora[field.name] for field in dataclasses.fields(LoraConfig)}
    return LoraConfig(**{**fields, "alpha": float(config.lora.alpha)}).for_model(model)


def initial_adapter(
    config: Config, model_config: DecoderConfig, lora_config: LoraConfig, mesh: jax.sharding.Mesh
) -> tuple[nnx.State, Sequence[str] | None]:
    """Returns a new adapter or the adapter ``config.lora.start``, and the ids it was trained on.

    The ids are of questions or, for an extractor, passages; None if unknown.
    """
    spec = config.lora.get("start")
    if spec is None:
        return lora.init_adapter(model_config, lora_config, config.seed, mesh=mesh), ()
    meta = workdir_lib.check_role(spec, "start")
    adapter = workdir_lib.load_matching_adapter(
        spec, "config.lora.start", model_config, lora_config, mesh
    )
    return adapter, meta.get("trained_on")


def count_dev_trained_on(
    config: Config, earlier_ids: Sequence[str] | None, data: conversations.Data
) -> int | None:
    """Counts the dev questions (or passages) that ``config.lora.start`` was trained on.

    Warns if there are any. ``earlier_ids`` is the second result of `initial_adapter`. Returns None
    if the ids are unknown.
    """
    start, dev_ids = f"config.lora.start={config.lora.get('start')}", data.measured_on
    if earlier_ids is None and dev_ids:
        state_lib.announce(
            f"{start} does not record its training questions; they may include the dev examples"
        )
        return None
    count = len(set(earlier_ids or ()) & set(dev_ids))
    if count:
        state_lib.announce(
            f"WARNING: {start} was trained on {count} of the {len(dev_ids)} questions or passages "
            "of the dev examples; the dev losses are not held-out"
        )
    return count


def lora_description(config: LoraConfig) -> dict[str, Any]:
    """Returns the fields of a `LoraConfig` for the metadata of a checkpoint."""
    return {**dataclasses.asdict(config), "targets": list(config.names)}


# ---------------------------------------------------------------------------------------- evaluate


def _supervised_parts(examples: Sequence[Example]) -> list[Part]:
    parts = {Part(int(part)) for e in examples for part in np.unique(e.part_T[e.weight_T > 0])}
    return sorted(parts - {Part.NONE})


def metric_names(examples: Sequence[Example]) -> list[str]:
    """Returns the names of the losses of dev examples, the total first."""
    names = [f"dev/loss_{part.name.lower()}" for part in _supervised_parts(examples)]
    return ["dev/loss", *names] if examples else []


def make_evaluate(
    config: DecoderConfig,
    lora_config: LoraConfig | None,
    params: Params,
    examples: Sequence[Example],
    layout: Layout,
    tokenizer: ChatTokenizer,
    mesh: jax.sharding.Mesh,
    *,
    chunk: int = cross_entropy.CHUNK,
) -> Callable[[nnx.State], dict[str, float]]:
    """Returns a function that computes the dev losses of trained parameters.

    ``params`` are the frozen base weights; without ``lora_config``, there are none. Call the
    function under ``jax.set_mesh(mesh)``. ``dev/loss`` is the mean over all supervised tokens in
    nats. ``dev/loss_rationale``, ``dev/loss_facts`` and so on are the means over the tokens of one
    part of the output (`Part`).
    """
    if not examples:
        return lambda trained: {}
    plan = packing.make_plan(examples, layout, seed=0)
    options = lora.lora_options(lora_config, train=False) if lora_config else None
    parts = _supervised_parts(examples)

    @jax.jit
    def losses(params, trained, batch, part_BT):
        """Returns the summed loss and the number of tokens of each part, ``[P, 2]``."""
        adapter = trained
        if options is None:
            params, adapter = decoder_params.to_params(trained), None
        hidden_BTD = lora_step.hidden(config, params, adapter, batch, options)
        sums = [
            cross_entropy.cross_entropy(
                config,
                params,
                hidden_BTD,
                batch.targets_BT,
                batch.mask_BT * (part_BT == int(part)),
                chunk=chunk,
            )
            for part in parts
        ]
        return jnp.stack([jnp.stack(pair) for pair in sums])

    def evaluate(trained: nnx.State) -> dict[str, float]:
        total_P2 = np.zeros((len(parts), 2))
        for rows in plan.steps:
            for piece in packing.micro_batches(examples, rows, layout, tokenizer.pad_id):
                batch, part_BT = state_lib.place_rows((piece.batch, piece.part_BT), mesh)
                total_P2 += np.asarray(losses(params, trained, batch, part_BT), np.float64)
        loss, count = total_P2.sum(axis=0)
        losses_of_parts = [float(loss / count) for loss, count in total_P2]
        values = [float(loss / max(count, 1.0)), *losses_of_parts]
        return dict(zip(metric_names(examples), values, strict=True))

    return evaluate


def make_describe(config: DecoderConfig, lora_config: LoraConfig | None) -> Describe:
    """Returns a function that adds the throughput of a step to its metrics, for `fit`."""
    peak = mfu.peak_flops(jax.devices()[0].device_kind)
    rank, targets = (lora_config.rank, lora_config.names) if lora_config else (0, ())

    def describe(values: dict[str, float], pieces: Sequence[MicroBatch], seconds: float) -> None:
        tokens = sum(piece.tokens for piece in pieces)
        supervised = sum(int(np.count_nonzero(piece.batch.mask_BT)) for piece in pieces)
        del values["tokens"]  # This is the sum of token weights, not a count.
        values["supervised_tokens"] = supervised
        values["tokens_per_second"] = tokens / seconds
        values["packing_efficiency"] = tokens / sum(p.batch.tokens_BT.size for p in pieces)
        if peak is not None:
            flops = mfu.lora_flops(
                config,
                rank,
                targets,
                tokens=tokens,
                supervised=supervised,
                attended=sum(piece.attended for piece in pieces),
                is_frozen=lora_config is not None,
            )
            values["mfu"] = flops / seconds / (peak * jax.device_count())

    return describe
