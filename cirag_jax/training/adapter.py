"""Trains a LoRA student on a teacher's decisions (CIRAG, sections 3.5 and B.4), or an extractor.

Integrator and extractor share everything but what makes the examples (`integrator_data`).
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
from cirag_jax.models import decoder, decoder_params, lora
from cirag_jax.models.decoder import DecoderConfig, Params
from cirag_jax.models.io import workdir as workdir_lib
from cirag_jax.models.io.pretrained_decoder import DEFAULT_DECODER, load_decoder
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import cross_entropy, lora_step, mfu, optimizers
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import conversations, packing
from cirag_jax.training.data.examples import Example, Part
from cirag_jax.training.data.packing import Layout, MicroBatch
from cirag_jax.training.fit import BatchOfStep, Describe, fit
from cirag_jax.types import Config


def train_and_evaluate(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains to the end (or from the last checkpoint on) and returns the best dev losses.

    Leaves ``checkpoints/`` (adapter and optimiser state alone), ``metrics.jsonl`` and TensorBoard
    events in ``workdir``.

    Returns:
      ``complete``, ``step``, ``total_steps``, ``best_step``, the best checkpoint's ``dev/...``,
      ``num_examples``, ``num_dev_examples``, ``num_dev_trained_on`` (dev questions that
      ``config.lora.start`` was trained on; None: it does not say) and the counts of
      `conversations.Data`; ``tokens`` and ``supervised_tokens`` seen so far, ``epochs``,
      ``packing_efficiency`` of the whole plan, ``seconds`` of this process.
    """
    start = time.monotonic()
    check_config(config)

    # ---- Mesh and base --------------------------------------------------------------------------
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    spec = config.model.spec or DEFAULT_DECODER
    base = load_decoder(spec, dtype=config.model.dtype, mesh=mesh, remat=config.model.remat)
    model_config = base.config
    if config.packing:  # The fused kernel knows no segments.
        attention = decoder.choose_attention(model_config, packed=True)
        model_config = dataclasses.replace(model_config, attention=attention)
    params = decoder_params.to_params(base.state)
    tokenizer = ChatTokenizer.load(base.folder)
    lora_config = make_lora(config)

    # ---- Data -----------------------------------------------------------------------------------
    layout = make_layout(config, mesh, model_config.max_positions)
    data = conversations.load_data(config, tokenizer, layout.length)
    _check_metric(config.best_metric, data)
    plan = packing.make_plan(
        data.train,
        layout,
        config.seed,
        num_epochs=config.num_epochs,
        num_steps=config.num_steps,
        max_tokens=config.max_tokens,
    )
    total_steps = len(plan.steps)
    state_lib.announce(
        f"{len(data.train):,} examples ({sum(len(e.tokens_T) for e in data.train):,} tokens, "
        f"{sum(np.count_nonzero(e.weight_T) for e in data.train):,} of them supervised), "
        f"{len(data.dev):,} dev examples, {total_steps:,} steps of "
        f"{sum(plan.tokens) // total_steps:,} tokens, rows {100 * plan.efficiency():.0f} % full, "
        f"mesh {dict(mesh.shape)}"
    )

    # ---- Adapter and optimiser ------------------------------------------------------------------
    tx = optimizers.make_optimizer(config.optimizer, total_steps)
    fresh, before = make_adapter(config, model_config, lora_config, mesh)
    num_seen = count_seen(config, before, data)
    state = state_lib.make_state(fresh, tx, config.seed, mesh)
    train_step = lora_step.TrainStep(model_config, lora_config, tx, state, mesh, chunk=config.chunk)

    # ---- Restore --------------------------------------------------------------------------------
    meta = {
        "component": config.component,
        "model": state_lib.absolute(spec),
        "lora": lora_description(lora_config),
        "length": layout.length,
        "prompt": data.described,
        "prompt_digest": data.prompt_digest,
        "trained_on": sorted({*data.trained_on, *(before or ())}),
        "num_candidates": data.num_candidates,
        "run": {**state_lib.identity_of(config, MAY_DIFFER), state_lib.EXAMPLES: data.identity},
    }
    checkpoints = state_lib.open_checkpoints(config, workdir)
    state, first_step = state_lib.restore(checkpoints, state, meta, total_steps)

    # ---- Train ----------------------------------------------------------------------------------
    evaluate = make_evaluate(
        model_config, lora_config, params, data.dev, layout, tokenizer, mesh, chunk=config.chunk
    )
    batches = BatchOfStep(
        lambda step: packing.micro_batches(
            data.train, plan.steps[step - 1], layout, tokenizer.pad_id
        ),
        first_step,
    )

    def one_step(state: state_lib.TrainState, pieces: Sequence[MicroBatch]) -> Any:
        placed = [lora_step.place_batch(piece.batch, mesh) for piece in pieces]
        return train_step(state, params, placed)

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
            advice="Lower config.optimizer.learning_rate",
            describe=make_describe(model_config, lora_config),
        )

    # ---- Result ---------------------------------------------------------------------------------
    seen = sum(len(row.places) for rows in plan.steps[: fitted.step] for row in rows)
    return {
        "complete": fitted.complete,
        "step": fitted.step,
        "total_steps": total_steps,
        **fitted.best,
        "num_examples": len(data.train),
        "num_dev_examples": len(data.dev),
        "num_dev_trained_on": num_seen,
        **data.counts,
        "tokens": sum(plan.tokens[: fitted.step]),
        "supervised_tokens": sum(plan.supervised[: fitted.step]),
        "epochs": round(seen / len(data.train), 3),
        "packing_efficiency": round(plan.efficiency(), 4),
        "seconds": round(time.monotonic() - start, 1),
    }


# ------------------------------------------------------------------------------------- the settings

# Fields that may differ when a training is resumed: where trajectories lie (their content may not,
# see `meta`), and the number of rows that the devices of another mesh take at once.
MAY_DIFFER = ("trajectories", "dev", "rows_per_device")


def check_config(config: Config) -> None:
    """Raises UserError where a setting cannot be."""
    state_lib.check_training(config)
    check_at_least(1, config, "length", "batch_size", "rows_per_device", "chunk")
    check_at_least(0, config, "max_tokens", "num_dev")
    own = ("num_trajectories", "kept_weight", "stop_weight", "answer_weight")  # not all have them
    check_at_least(0, config, *(name for name in own if name in config))
    check_choice("config.model.remat", config.model.remat, ("off", "projections", "full"))
    buckets = tuple(config.buckets)
    if list(buckets) != sorted(set(buckets)) or any(b < 1 for b in buckets):
        raise UserError(f"config.buckets={buckets} must ascend")


def _check_metric(name: str, data: conversations.Data) -> None:
    measured = (
        ["dev/loss", *(_loss_name(part) for part in _supervised_parts(data.dev))]
        if data.dev
        else []
    )
    state_lib.check_metric(name, measured)


def make_layout(config: Config, mesh: jax.sharding.Mesh, max_positions: int) -> Layout:
    """Rows and steps as the config and the mesh say."""
    if config.length > max_positions:
        raise UserError(
            f"config.length={config.length} exceeds the model's {max_positions} positions"
        )
    rows = config.rows_per_device * mesh.shape["data"] * mesh.shape["fsdp"]
    if config.batch_size % rows:
        raise UserError(
            f"config.batch_size={config.batch_size} is not a multiple of {rows}, the rows that all "
            "devices compute at once (config.rows_per_device times the mesh's data and fsdp)"
        )
    buckets = tuple(b for b in config.buckets if b < config.length)
    return Layout(config.length, config.packing, (*buckets, config.length), config.batch_size, rows)


def make_lora(config: Config) -> LoraConfig:
    """The adapter's hyper-parameters; `UserError` where they cannot be."""
    fields = {field.name: config.lora[field.name] for field in dataclasses.fields(LoraConfig)}
    return LoraConfig(**{**fields, "alpha": float(config.lora.alpha)})


def make_adapter(
    config: Config, model_config: DecoderConfig, lora_config: LoraConfig, mesh: jax.sharding.Mesh
) -> tuple[nnx.State, Sequence[str] | None]:
    """Where training starts: a fresh adapter, or ``config.lora.start``; and what that was trained
    on, None where it does not say. Another component's will do: a reader knows what passages say.
    """
    spec = config.lora.get("start")
    if spec is None:
        return lora.init_adapter(model_config, lora_config, config.seed, mesh=mesh), ()
    meta = workdir_lib.check_role(spec, "start")
    found = workdir_lib.load_like(spec, "config.lora.start", model_config, lora_config, mesh)
    return found, meta.get("trained_on")


def count_seen(
    config: Config, before: Sequence[str] | None, data: conversations.Data
) -> int | None:
    """How many dev questions (extractor: passages) ``config.lora.start`` was trained on.

    ``before`` is what `make_adapter` says; a warning says what the dev losses are worth.
    """
    start, dev = f"config.lora.start={config.lora.get('start')}", data.measured_on
    if before is None and dev:
        state_lib.announce(f"{start} does not say what it was trained on, dev examples or not")
        return None
    seen = len(set(before or ()) & set(dev))
    if seen:
        state_lib.announce(
            f"WARNING: {start} was trained on {seen} of the {len(dev)} that dev examples are of; "
            "dev losses say little about others"
        )
    return seen


def lora_description(config: LoraConfig) -> dict[str, Any]:
    """The fields of a `LoraConfig` as the checkpoint's description holds them."""
    return {**dataclasses.asdict(config), "targets": list(config.names)}


# ---------------------------------------------------------------------------------------- evaluate


def _supervised_parts(examples: Sequence[Example]) -> list[Part]:
    """The parts of decisions that examples supervise."""
    found = {Part(int(part)) for e in examples for part in np.unique(e.part_T[e.weight_T > 0])}
    return sorted(found - {Part.NONE})


def _loss_name(part: Part) -> str:
    return f"dev/loss_{part.name.lower()}"


def make_evaluate(
    config: DecoderConfig,
    lora_config: LoraConfig,
    params: Params,
    examples: Sequence[Example],
    layout: Layout,
    tokenizer: ChatTokenizer,
    mesh: jax.sharding.Mesh,
    *,
    chunk: int = cross_entropy.CHUNK,
) -> Callable[[nnx.State], dict[str, float]]:
    """A function from an adapter to dev losses; call it under ``jax.set_mesh(mesh)``.

    ``dev/loss`` is the mean over all supervised tokens in nats, ``dev/loss_rationale``,
    ``dev/loss_facts`` and ``dev/loss_question`` over those of one part, where there are any.
    """
    if not examples:
        return lambda adapter: {}
    plan = packing.make_plan(examples, layout, seed=0)
    options = lora.lora_options(lora_config, train=False)
    parts = _supervised_parts(examples)

    @jax.jit
    def losses(params, adapter, batch, part_BT):
        """Summed loss and number of tokens of each part: ``[P, 2]``."""
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

    def evaluate(adapter: nnx.State) -> dict[str, float]:
        total_P2 = np.zeros((len(parts), 2))
        for rows in plan.steps:
            for piece in packing.micro_batches(examples, rows, layout, tokenizer.pad_id):
                arrays: Any = (piece.batch, piece.part_BT)
                placed: Any = lora_step.place_batch(arrays, mesh)
                batch, part_BT = placed
                total_P2 += np.asarray(losses(params, adapter, batch, part_BT), np.float64)
        loss, count = total_P2.sum(axis=0)
        found = {"dev/loss": float(loss / max(count, 1.0))}
        for part, (loss, count) in zip(parts, total_P2, strict=True):
            found[_loss_name(part)] = float(loss / count)
        return found

    return evaluate


# ------------------------------------------------------------------------------------ bookkeeping


def make_describe(config: DecoderConfig, lora_config: LoraConfig) -> Describe:
    """Describes a step's throughput in its metrics, for `fit`."""
    peak = mfu.peak_flops(jax.devices()[0].device_kind)

    def describe(values: dict[str, float], pieces: Sequence[MicroBatch], seconds: float) -> None:
        tokens = sum(piece.tokens for piece in pieces)
        supervised = sum(int(np.count_nonzero(piece.batch.mask_BT)) for piece in pieces)
        del values["tokens"]  # the sum of their weights
        values["supervised_tokens"] = supervised
        values["tokens_per_second"] = tokens / seconds
        values["packing_efficiency"] = tokens / sum(p.batch.tokens_BT.size for p in pieces)
        if peak is not None:
            flops = mfu.lora_flops(
                config,
                lora_config.rank,
                lora_config.names,
                tokens=tokens,
                supervised=supervised,
                attended=sum(piece.attended for piece in pieces),
            )
            values["mfu"] = flops / seconds / (peak * jax.device_count())

    return describe
