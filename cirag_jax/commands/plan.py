"""Estimates a training run's device memory, communication and time, or an index's size.

The trainer's step is compiled (`training.rehearsal`) for a mesh of fake CPU devices, with the
longest batch that the config allows.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend import backend

from cirag_jax import sharding
from cirag_jax.commands import plan_index, reinforce
from cirag_jax.errors import UserError, check_at_least, check_choice
from cirag_jax.io import is_training_workdir, say
from cirag_jax.llm.chat import ChatTokenizer
from cirag_jax.llm.engine.pages import PAGE_SIZE
from cirag_jax.llm.engine.shapes import EngineConfig
from cirag_jax.models import cross_encoder as pair_model
from cirag_jax.models import decoder, decoder_params, lora, precision
from cirag_jax.models.decoder_config import DecoderConfig, choose_attention
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io import (
    encoder_adapter,
    folders,
    pretrained,
    pretrained_decoder,
    pretrained_embedder,
    tokenizer_files,
    workdir,
)
from cirag_jax.models.lora import LoraConfig
from cirag_jax.reports import tables
from cirag_jax.retrieval.pairs import PairTokens
from cirag_jax.training import (
    adapter,
    aligner,
    aligner_batches,
    aligner_step,
    cross_encoder,
    lora_step,
    mfu,
    optimizers,
    policy,
)
from cirag_jax.training import state as state_lib
from cirag_jax.training.data import packing
from cirag_jax.training.data.examples import Example
from cirag_jax.training.policy import PolicyBatch
from cirag_jax.training.rehearsal import Rehearsal, bytes_of, quick_collection
from cirag_jax.types import Config

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class RehearsedStep:
    """A training step that was compiled but not executed.

    Attributes:
      rehearsal: the compiled programs of the step.
      parts: bytes per device of arrays that exist during the whole step, by name.
      dtype: the dtype of the computation.
      tokens: real tokens of the step, over all devices.
      flops: floating-point operations of the step, over all devices.
      steps: number of steps of the run; None if it depends on the data.
    """

    rehearsal: Rehearsal
    parts: Mapping[str, int]
    dtype: str
    tokens: int
    flops: float
    steps: int | None


def plan(config: Config) -> dict[str, Any]:
    """Compiles a training step of ``config``; prints and returns its costs.

    Returns:
      ``bytes_per_device`` by part, their sum ``peak_bytes`` and the program that needs this much;
      ``collective_bytes`` per device and step, by operation; ``gpus``: whether the step fits each
      GPU, and the time of a step and of the run at ``assumed_share_of_peak`` (an assumption).
      For a config of configs/index.py, see `plan_index.plan_index`.
    """
    if "shard_rows" in config:
        return plan_index.plan_index(config, _dimensions(config.encoder))
    component = state_lib.component_of(config)
    gpus = _gpus(config)
    step = rehearse(config)
    rehearsal, mesh = step.rehearsal, step.rehearsal.mesh
    activations = max(rehearsal.peak - sum(step.parts.values()), 0)
    *_, update = rehearsal.programs.values()  # the optimizer's program is the last
    traffic = update.arguments + update.results
    assert rehearsal.peak_program is not None
    result = {
        "component": component,
        "model": config.model.spec or pretrained_decoder.DEFAULT_DECODER,
        "dtype": step.dtype,
        "mesh": dict(mesh.shape),
        "devices": mesh.size,
        "bytes_per_device": {**step.parts, "activations": activations},
        "peak_bytes": rehearsal.peak,
        "peak_program": rehearsal.peak_program.name,
        "collective_bytes": {op: total.bytes for op, total in rehearsal.exchanged().items()},
        "compiled_for": "cpu",
        "tokens_per_step": step.tokens,
        "flops_per_step": step.flops,
        "steps": step.steps,
        "assumed_share_of_peak": config.peak_share,
        "gpus": {name: on_gpu(gpu, config, step, traffic) for name, gpu in gpus.items()},
    }
    if config.memory_gib:
        result["fits"] = rehearsal.peak <= config.memory_gib * GIB
    say(_table(result))
    return result


def _dimensions(encoder: Config) -> int:
    """Returns the size of the vectors of ``config.encoder``, from its config files."""
    if encoder.dimensions is not None:
        return encoder.dimensions
    if encoder.backend != "flax":
        raise UserError(
            f"config.encoder.backend={encoder.backend} does not tell the size of its vectors; set "
            "--config.encoder.dimensions"
        )
    return _encoder_config(encoder.model, encoder).embedding_size


def rehearse(config: Config) -> RehearsedStep:
    """Compiles a training step of ``config`` for fake devices; see `plan`."""
    component = state_lib.component_of(config)
    trainers = {"aligner": aligner, "cross_encoder": cross_encoder, "grpo": reinforce}
    trainers.get(component, adapter).check_config(config)
    mesh = _make_mesh(config)
    rehearse_component = {"aligner": _aligner, "cross_encoder": _cross_encoder}
    with jax.set_mesh(mesh), quick_collection():
        return rehearse_component.get(component, _adapter)(config, mesh)


def on_gpu(gpu: mfu.Device, config: Config, step: RehearsedStep, traffic: int) -> dict[str, Any]:
    """Estimates whether a step fits a kind of GPU, and the time of a step and of the run.

    A step takes the time of its operations, at ``config.peak_share`` of the GPU's peak, plus the
    time to move the optimizer's ``traffic`` (bytes) through memory. The peak is known for bfloat16
    only.
    """
    memory = config.memory_gib or gpu.memory_gib
    seconds = hours = None
    if step.dtype == "bfloat16":
        rate = gpu.flops * config.peak_share * step.rehearsal.mesh.size
        seconds = step.flops / rate + traffic / gpu.bandwidth
        hours = None if step.steps is None else step.steps * seconds / 3600
    fits = step.rehearsal.peak <= memory * GIB
    return {"memory_gib": memory, "fits": fits, "step_seconds": seconds, "run_hours": hours}


# ---------------------------------------------------------------------------------------- settings


def _gpus(config: Config) -> dict[str, mfu.Device]:
    check_choice("config.gpu", config.gpu, (None, *mfu.GPUS))
    if not 0.0 < config.peak_share <= 1.0:
        raise UserError(f"config.peak_share={config.peak_share} must be above 0 and at most 1.")
    if config.memory_gib is not None:
        check_at_least(0, config, "memory_gib")
    return {config.gpu: mfu.GPUS[config.gpu]} if config.gpu else mfu.GPUS


def _make_mesh(config: Config) -> jax.sharding.Mesh:
    """Makes the config's mesh of fake CPU devices."""
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    count = config.mesh.devices or math.prod(size for size in sizes if size > 0)
    if len(jax.devices("cpu")) < count:
        # JAX reads the number of devices once. Nothing is on a device yet.
        backend.clear_backends()
        jax.config.update("jax_num_cpu_devices", count)
    return sharding.make_mesh(*sizes, devices=jax.devices("cpu")[:count])


def _check_heads(config: Config, heads: int) -> None:
    if heads % config.mesh.tensor and config.mesh.tensor > 0:
        raise UserError(
            f"config.mesh.tensor={config.mesh.tensor} does not divide the model's {heads} heads"
        )


def _encoder_config(
    spec: str, settings: Config, adapter: LoraConfig | None = None
) -> EncoderConfig | EmbedderConfig:
    """Reads the shape of an encoder, or of the base model of a training workdir or an adapter.

    ``adapter`` is added to a decoder.
    """
    if is_training_workdir(spec):
        spec = workdir.best_checkpoint_folder(spec)[1]
    adapter_folder = encoder_adapter.find_adapter(spec)
    spec = spec if adapter_folder is None else encoder_adapter.read_base_model(adapter_folder)[0]
    folder = folders.shape_folder(spec)
    dimensions = settings.get("dimensions")
    config = pretrained.read_encoder_config(
        folder,
        dtype=settings.dtype,
        tasks=settings.get("tasks"),
        pooling=settings.get("pooling"),
        bidirectional=settings.get("bidirectional"),
        lora=adapter,
        dropout=settings.get("dropout", 0.0),
        remat=settings.get("remat", False),
        unroll=settings.get("unroll") or 1,
        platform="cpu",
    ).config
    if dimensions is not None:
        size = config.embedding_size
        pretrained.check_dimensions(dimensions, size, spec, "config.model.dimensions")
    if (folder / "tokenizer.json").is_file():
        tokenizer_files.read_tokenizer(folder, config.vocab_size)
    return dataclasses.replace(config, dimensions=dimensions)


# -------------------------------------------------------------------------------------- components


def _parts(state: state_lib.TrainState, dtype: str) -> dict[str, int]:
    parts = {"parameters": bytes_of(state.params), "optimizer": bytes_of(state.opt_state)}
    # Each shard gathers the full parameters and accumulates a gradient of the same size.
    whole, gathered, rounded = 0, 0, 0
    for path, node in nnx.to_flat_state(state.params):
        placed = node.get_value().sharding
        size = bytes_of(node) * (placed.mesh.shape["fsdp"] if "fsdp" in placed.spec else 1)
        narrow = dtype != "float32" and precision.is_rounded(path)
        whole += size
        gathered += size // 2 if narrow else size
        rounded += size // 2 if narrow else 0
    if whole > parts["parameters"]:
        parts["gathered_parameters"] = gathered
    elif rounded:
        parts["rounded_parameters"] = rounded
    return {**parts, "gradients": whole}


def _adapter(config: Config, mesh: jax.sharding.Mesh) -> RehearsedStep:
    spec = config.model.spec or pretrained_decoder.DEFAULT_DECODER
    is_local = spec.startswith("package:") or Path(spec).expanduser().exists()
    folder = pretrained_decoder.resolve_decoder(spec) if is_local else folders.shape_folder(spec)
    # The default dtype on the target device.
    dtype = config.model.dtype or ("bfloat16" if config.gpu else "float32")
    model, _ = pretrained_decoder.read_decoder_config(folder)
    if folder.is_file() or (folder / "tokenizer.json").is_file():
        tokenizer = ChatTokenizer.load(folder)
        pretrained_decoder.check_tokenizer(tokenizer, model.vocab_size, folder)
    model = dataclasses.replace(
        model,
        dtype=dtype,
        param_dtype=dtype,
        remat=config.model.remat,
        quantization=config.model.quantization,
    )
    attention = choose_attention(model, platform="cpu", packed=config.packing)
    model = dataclasses.replace(model, attention=attention)
    _check_heads(config, model.num_heads)
    samples = config.component == "grpo"
    if samples:  # A row for each rollout, although packed rows have several.
        rows = config.questions_per_step * config.group_size
        layout = adapter.layout_of_rows(config, mesh, model, rows)
        rows = -(-rows // layout.rows_per_batch) * layout.rows_per_batch
        layout = dataclasses.replace(layout, rows_per_step=rows)
    else:
        layout = adapter.make_layout(config, mesh, model)
    lora_config = adapter.make_lora(config, model)

    # The loss loops over chunks of tokens, at most this many times.
    rounds = -(-layout.length * config.rows_per_device // config.chunk)
    rehearsal = Rehearsal(mesh, bfloat16=dtype == "bfloat16", loops=rounds)
    tx = optimizers.make_optimizer(config.optimizer, 1)
    base: Any = {}
    if lora_config is None:
        model = dataclasses.replace(model, param_dtype="float32")
        fresh = decoder_params.abstract_params(model)
    else:
        base = decoder_params.to_params(rehearsal.place(decoder_params.abstract_params(model)))
        fresh = lora.abstract_adapter(model, lora_config)
    state = rehearsal.place(state_lib.abstract_state(fresh, tx))
    ones_T = np.ones(layout.length, np.int32)
    example = Example(ones_T, ones_T.astype(np.float32), ones_T.astype(np.uint8), "")
    rows = [packing.Row((0,))] * layout.rows_per_step

    def place(x: np.ndarray) -> Any:
        return rehearsal.shape(x, sharding.batch_sharding(mesh, x.ndim, x.shape))

    pieces = packing.micro_batches([example], rows, layout, 0)
    batches: list[Any] = [jax.tree.map(place, piece.batch) for piece in pieces]
    frozen = {"base": bytes_of(base)} if base else {}
    loss = lora_step.loss
    if samples:
        batches = [PolicyBatch(b, *(rehearsal.copy(b.mask_BT) for _ in range(4))) for b in batches]
        loss = policy.make_loss(policy.Clip(config.clip_low, config.clip_high))
        engine = (
            rehearsal.place(decoder_params.abstract_params(model)),
            _cache(config, rehearsal, model),
        )
        frozen |= {"engine": bytes_of(engine)}
    parts = {**frozen, **_parts(state, dtype), "batch": bytes_of(batches)}
    step = lora_step.TrainStep(model, lora_config, tx, state, mesh, chunk=config.chunk, loss=loss)
    step(state, base, batches, rehearsal)

    tokens = layout.rows_per_step * layout.length
    flops = mfu.lora_flops(
        model,
        lora_config.rank if lora_config else 0,
        lora_config.names if lora_config else (),
        tokens=tokens,
        supervised=tokens,
        attended=tokens * layout.length,
        is_frozen=lora_config is not None,
    )
    steps = config.num_steps or None
    if config.examples and not steps:
        steps = math.ceil(config.num_epochs * config.examples / layout.rows_per_step)
    if config.max_tokens:
        limit = max(config.max_tokens // tokens, 1)
        steps = min(steps, limit) if steps else limit
    return RehearsedStep(rehearsal, parts, dtype, tokens, flops, steps)


def _cache(config: Config, rehearsal: Rehearsal, model: DecoderConfig) -> Any:
    """Returns the shapes of the engine's keys and values, which exist during the whole run."""
    options = EngineConfig.for_platform("gpu" if config.gpu else "cpu")
    pages = (options.cache_tokens + options.prefix_tokens) // PAGE_SIZE
    cache = jax.eval_shape(lambda: decoder.empty_cache(model, pages, PAGE_SIZE))
    return rehearsal.place(cache)


def _aligner(config: Config, mesh: jax.sharding.Mesh) -> RehearsedStep:
    layout = aligner_batches.make_layout(config, mesh)
    model = _encoder_config(config.model.spec, config.model, aligner.make_lora(config))
    _check_heads(config, model.num_heads)
    state_lib.check_lengths(config, model.max_length, "query_max_length", "unit_max_length")
    batch = aligner_batches.longest_batch(
        config, layout, model.pad_id, lambda length: np.ones(length, np.int32)
    )
    rehearsal = Rehearsal(mesh, bfloat16=model.dtype == "bfloat16")
    graphdef, abstract = pretrained_embedder.abstract_state(model)
    params, others = pretrained_embedder.split_state(model, abstract)
    tx = aligner_step.make_optimizer(config, 1)
    state = rehearsal.place(state_lib.abstract_state(params, tx))
    frozen = rehearsal.place(others)
    rehearsal.placed = bytes_of(aligner_step.place_batch(batch, mesh))
    base = {"base": bytes_of(frozen)} if others else {}
    parts = {**base, **_parts(state, model.dtype), "batch": rehearsal.placed}
    aligner_step.train_step(graphdef, tx, state, batch, config, mesh, rehearsal, frozen=frozen)

    attended = layout.num_queries * config.query_max_length**2
    attended += layout.num_candidates * config.unit_max_length**2
    flops = mfu.embedder_flops(model, tokens=batch.tokens, attended=attended)
    is_known = config.num_steps or config.examples
    per_step = aligner_batches.questions_per_step(config)
    steps = state_lib.num_steps(config, config.examples or 0, per_step) if is_known else None
    return RehearsedStep(rehearsal, parts, model.dtype, batch.tokens, flops, steps)


def _cross_encoder(config: Config, mesh: jax.sharding.Mesh) -> RehearsedStep:
    model = _encoder_config(config.model.spec, config.model)
    if isinstance(model, EmbedderConfig):
        raise UserError(f"config.model.spec={config.model.spec} is a decoder, not an encoder")
    _check_heads(config, model.num_heads)
    state_lib.check_lengths(config, model.max_length, "max_length")
    length = config.max_length
    row = PairTokens(np.ones(length, np.int32), np.zeros(length, np.int32))
    negatives = config.negatives
    pairs = config.targets_per_step * (1 + negatives.own + negatives.mined + negatives.easy)
    batch = cross_encoder.pack(config, [row] * pairs, [True] * pairs, model.pad_id, mesh)
    rehearsal = Rehearsal(mesh, bfloat16=model.dtype == "bfloat16")
    abstract = nnx.eval_shape(lambda: pair_model.CrossEncoder(model, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract)
    tx = optimizers.make_optimizer(config.optimizer, 1)
    state = rehearsal.place(state_lib.abstract_state(params, tx))
    # Only one chunk is on the devices at a time.
    rehearsal.placed = bytes_of(state_lib.place_rows(batch.chunks[0], mesh))
    parts = {**_parts(state, model.dtype), "batch": rehearsal.placed}
    # The bi-encoder baseline stays on the devices.
    if config.encoder.backend == "flax":
        other = _encoder_config(config.encoder.model, config.encoder)
        _, baseline = pretrained_embedder.abstract_state(other)
        parts["bi_encoder"] = bytes_of(rehearsal.place(baseline))
    cross_encoder.train_step(graphdef, tx, state, batch, config, mesh, rehearsal)

    flops = mfu.encoder_flops(model, tokens=batch.tokens, attended=pairs * length**2)
    is_known = config.num_steps or config.max_steps or config.examples
    steps = cross_encoder.num_steps(config, config.examples or 1 << 62) if is_known else None
    return RehearsedStep(rehearsal, parts, model.dtype, batch.tokens, flops, steps)


# ------------------------------------------------------------------------------------------- table


def _table(result: Mapping[str, Any]) -> str:
    def size(count: int) -> str:
        return f"{count / GIB:.2f}"

    memory = [(name.replace("_", " "), size(n)) for name, n in result["bytes_per_device"].items()]
    exchanged = [(name, size(n)) for name, n in result["collective_bytes"].items()]
    lines = [
        f"{result['component']}, {result['model']}, {result['dtype']}, mesh {result['mesh']}: "
        f"a step of at most {result['tokens_per_step']:,} tokens",
        "",
        tables.markdown([("per device", "GiB"), *memory, ("peak", size(result["peak_bytes"]))]),
        "",
        tables.markdown([("exchanged per step", "GiB"), *(exchanged or [("nothing", "")])]),
        "",
        "These are estimates. XLA's CPU compiler reports the memory; a GPU may need more or less. "
        f"Times assume {100 * result['assumed_share_of_peak']:g} % of the GPU's bfloat16 peak.",
        "",
        tables.markdown([("GPU", "GiB", "fits", "s per step", "h per run"), *_gpu_rows(result)]),
    ]
    return "\n".join(lines)


def _gpu_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    return [
        (
            name,
            number(gpu["memory_gib"]),
            "yes" if gpu["fits"] else "no",
            number(gpu["step_seconds"]),
            number(gpu["run_hours"]),
        )
        for name, gpu in result["gpus"].items()
    ]
