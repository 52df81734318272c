"""Loads, checks and exports models from training workdirs; also loads pretrained models."""

import contextlib
import dataclasses
import hashlib
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx

from cirag_jax.errors import UserError, check_choice
from cirag_jax.io import is_training_workdir, local_path, write_json
from cirag_jax.models import decoder_params, link_head, lora
from cirag_jax.models.cross_encoder import PairEncoder, load_cross_encoder
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.io import encoder_adapter, peft_format, pretrained_decoder
from cirag_jax.models.io.checkpoint_folders import Folder
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.peft_format import load_adapter, read_training, save_adapter
from cirag_jax.models.io.pretrained import TextEncoder, load_encoder
from cirag_jax.models.io.pretrained_decoder import (
    TextDecoder,
    hub_id,
    read_decoder_config,
    resolve_decoder,
)
from cirag_jax.models.io.tensor_files import check_tensor
from cirag_jax.models.io.weights import to_tensors
from cirag_jax.models.lora import LoraConfig
from cirag_jax.models.precision import Dtype
from cirag_jax.types import ROLES


def open_encoder(
    spec: str,
    *,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
    instructions: Mapping[str, str | None] | None = None,
    dimensions: int | None = None,
    tasks: str | None = None,
) -> tuple[TextEncoder, dict[str, Any]]:
    """Loads the encoder of a workdir or a pretrained encoder; returns it and its metadata.

    From a workdir, the checkpoint with the best dev metric is loaded, or the latest if no
    checkpoint has dev metrics. The metadata of a pretrained model is empty. ``instructions``,
    ``dimensions`` and ``tasks`` override those of the model, see `load_encoder`.
    """
    given = dict(instructions or {})
    folder = pathlib.Path(spec)
    if not is_training_workdir(spec):
        if folder.is_dir() and not any(folder.glob("*.safetensors*")):
            raise UserError(
                f"{spec} is neither a training workdir (it has no checkpoints/) nor a model folder "
                "(it has no *.safetensors)"
            )
        settings: Any = {"instructions": given, "dimensions": dimensions, "tasks": tasks}
        return load_encoder(spec, dtype=dtype, mesh=mesh, **settings), {}
    with _best(spec, "aligner") as (checkpoints, step, meta):
        if tasks not in (None, meta.get("tasks")):
            raise UserError(f"{spec} was trained with the tasks {meta.get('tasks')}, not {tasks}")
        base = load_encoder(
            meta["model"],
            dtype=dtype,
            mesh=mesh,
            name=spec,
            pooling=meta["pooling"],
            instructions={
                role: meta.get(f"{role}_prefix") if (new := given.get(role)) is None else new
                for role in ROLES
            },
            dimensions=dimensions or meta.get("dimensions"),
            tasks=meta.get("tasks"),
            bidirectional=meta.get("bidirectional"),
            lora=LoraConfig(**meta["lora"]) if meta.get("lora") else None,
        )
        params, frozen = base.split()
        state = _restore(checkpoints, step, params)
    state = nnx.merge_state(state, frozen) if frozen else state
    encoder = dataclasses.replace(base, state=state, revision=f"{base.revision}+step{step}")
    return encoder, {**meta, "step": step}


def _restore(checkpoints: Checkpoints, step: int, like: nnx.State) -> nnx.State:
    """Returns the parameters of a checkpoint, whose numbers must be finite."""
    state = checkpoints.restore(step, {"params": like}, subset=True).state["params"]
    for path, variable in nnx.to_flat_state(state):
        for shard in variable.get_value().addressable_shards:
            name = ".".join(map(str, path))
            check_tensor(np.asarray(shard.data), name, checkpoints.directory / str(step))
    return state


def open_cross_encoder(
    spec: str, *, label: str | None = None
) -> tuple[PairEncoder, dict[str, Any]]:
    """Loads a cross-encoder; returns it and its metadata, as in `open_encoder`.

    For a workdir, the revision of the model is a hash of the weights. ``label`` is the label that
    is scored, by default the one that a workdir's model was trained on.
    """
    if not is_training_workdir(spec):
        return load_cross_encoder(spec, label=label), {}
    with _best(spec, "cross_encoder") as (checkpoints, step, meta):
        base = load_cross_encoder(
            meta["model"],
            name=spec,
            new_head=0,
            label=label or meta.get("label"),
            max_length=meta["max_length"],
        )
        state = _restore(checkpoints, step, base.state)
    model = dataclasses.replace(base, state=state, revision=f"sha256:{hash_arrays(state)}")
    return model, {**meta, "step": step}


def ranker_meta(spec: str) -> dict[str, Any]:
    """Returns the metadata of the best checkpoint of an aligner or a cross-encoder."""
    with _best(spec, "aligner", "cross_encoder") as (_, _, meta):
        return {**meta, "component": _component(meta)}


def trained_units(spec: str) -> str | None:
    """Returns what an aligner was trained to rank: ``triple``, ``sentence`` or ``passage``.

    ``spec`` is a workdir, an exported adapter, or any other encoder. Returns None if it is not an
    aligner or if its units are not recorded.
    """
    meta = training_record(spec)
    return meta.get("units") if _component(meta) == "aligner" else None


def training_ids(spec: str) -> frozenset[str] | None:
    """Returns the ids of the questions that a model was trained on; None if not recorded.

    ``spec`` is a workdir, an exported adapter, or any other model. For an extractor, the ids are of
    passages. The ids of an aligner include the training questions of its link head.
    """
    ids = training_record(spec).get("trained_on")
    if ids is None:
        return None
    head_ids = link_head.read_record(local_path(spec)).get(link_head.HEAD_TRAINED_ON, [])
    fields = {
        "trained_on of its training": ids,
        f"{link_head.HEAD_TRAINED_ON} of {link_head.FILE}": head_ids,
    }
    for field, value in fields.items():
        if not isinstance(value, list | tuple) or not all(isinstance(id, str) for id in value):
            raise UserError(f"{spec}: field {field} must be a list of ids")
    return frozenset(itertools.chain(*fields.values()))


def training_record(spec: str) -> dict[str, Any]:
    """Returns the metadata of a workdir's latest checkpoint or of an export; empty if absent."""
    if is_training_workdir(spec):
        with Checkpoints(spec, read_only=True) as checkpoints:
            return checkpoints.meta()
    return read_training(local_path(spec))


# Roles whose adapters fit no other role. The roles of other methods also accept these adapters.
ADAPTER_COMPONENTS = ("integrator", "extractor", "reader")
RANKERS = ("aligner", "cross_encoder")  # All other components are roles of language models.


def open_adapter(spec: str) -> tuple[nnx.State, LoraConfig, dict[str, Any]]:
    """Returns the adapter of a workdir's best checkpoint, its hyper-parameters and its metadata.

    The adapter is the state of a `lora.Lora`, on the first device. In the metadata, ``model`` is
    the base model and ``revision`` is a hash of the adapter.
    """
    with _best(spec) as (checkpoints, step, meta):
        _require_adapter(spec, meta)
        config = LoraConfig(**meta["lora"])
        base, _ = read_decoder_config(resolve_decoder(meta["model"]))
        state = _restore(checkpoints, step, lora.abstract_adapter(base, config))
    return state, config, {**meta, "step": step, "revision": f"sha256:{hash_arrays(state)}"}


def _require_adapter(spec: str, meta: Mapping[str, Any]) -> None:
    if meta.get("lora", {}) is None:
        raise UserError(
            f"{spec} has no adapter, because all parameters were trained; export it "
            "(launch/export.py) and use the exported folder as the model"
        )


def open_trained_decoder(spec: str) -> tuple[TextDecoder, dict[str, Any]]:
    """Returns the best checkpoint of a workdir that trained all parameters, and its metadata.

    The weights are float32, on the first device.
    """
    with _best(spec) as (checkpoints, step, meta):
        folder = resolve_decoder(meta["model"])
        config, raw = read_decoder_config(folder)
        state = _restore(checkpoints, step, decoder_params.abstract_params(config))
    decoder = TextDecoder(config, state, folder, raw)
    return decoder, {**meta, "step": step}


def trained_spec(block: Any) -> str | None:
    """Returns the trained part of a language model: its adapter, or an exported model.

    ``block`` is a config of a language model. Returns None if nothing was trained here.
    """
    if block.backend == "openai":
        return None
    if block.adapter is not None:
        return block.adapter
    return block.model if block.model and read_training(local_path(block.model)) else None


def check_role(spec: str, role: str) -> dict[str, Any]:
    """Checks that an adapter was trained for a role, and returns its training metadata.

    ``spec`` is a workdir or a folder in PEFT's format. The roles ``integrator``, ``extractor`` and
    ``reader`` need an adapter trained for that role; any other role also accepts adapters of these
    three, and the role ``start`` accepts any adapter. The metadata of a folder from another program
    is empty, and the folder passes the check.
    """
    roles = [role] if role in ADAPTER_COMPONENTS else [role, *ADAPTER_COMPONENTS]
    roles = [] if role == "start" else roles
    if is_training_workdir(spec):
        with _best(spec, *roles) as (_, _, meta):
            _require_adapter(spec, meta)
            return meta
    meta = read_training(local_path(spec))
    if meta:
        _check_component(spec, meta, roles)
    return meta


# Metadata recorded in an exported aligner, and in an exported adapter of a language model.
_ALIGNER_FIELDS = (
    *("model", "step", "pooling", "query_prefix", "passage_prefix", "triple_prefix", "dimensions"),
    *("query_max_length", "unit_max_length", "units", "trained_on"),
    "inputs",
)
_ADAPTER_FIELDS = (
    *("component", "model", "step", "prompt", "prompt_digest", "own_prompts"),
    "num_candidates",
    "inputs",
    *("quantization", "length", "trained_on"),
)


def base_model_of(spec: str) -> str:
    """Returns the base model of a workdir's adapter, as written in the trainer's config."""
    with _best(spec) as (_, _, meta):
        return str(meta["model"])


@contextlib.contextmanager
def adapter_folder(spec: str | None) -> Iterator[str | None]:
    """Yields an adapter's folder in PEFT's format; for a workdir, a temporary folder."""
    if spec is None or not is_training_workdir(spec):
        yield spec and str(local_path(spec))
        return
    state, config, meta = open_adapter(spec)
    with tempfile.TemporaryDirectory(prefix="cirag_adapter") as folder:
        yield str(save_adapter(state, config, folder, meta["model"]))


def load_matching_adapter(
    spec: str,
    field: str,
    model: DecoderConfig,
    config: LoraConfig,
    mesh: jax.sharding.Mesh | None = None,
) -> nnx.State:
    """Loads the adapter ``spec``; raises unless its hyper-parameters equal ``config``."""
    with adapter_folder(spec) as folder:
        state, loaded = load_adapter(str(folder), model, mesh)
    if (loaded.scale, loaded.rank, loaded.names) != (config.scale, config.rank, config.names):
        raise UserError(
            f"{field}={spec} has rank {loaded.rank}, scale {loaded.scale:g} and the targets "
            f"{', '.join(loaded.names)}; expected rank {config.rank}, scale {config.scale:g} and "
            f"the targets {', '.join(config.names)}"
        )
    return state


def export_adapter(
    spec: str,
    folder: pathlib.Path,
    *,
    merge: bool = False,
    dtype: Dtype | None = None,
    average_with: str | None = None,
    share: float | None = None,
) -> dict[str, Any]:
    """Writes a workdir's best adapter in PEFT's format, and returns its metadata.

    An earlier adapter in ``folder`` is replaced. A merged model needs an empty folder. If all
    parameters were trained, the trained model is written.

    Args:
      spec: the workdir.
      folder: the output folder.
      merge: whether to write a complete model instead, with the adapter merged into the base.
      dtype: dtype of the tensors. By default, an adapter is float32, and a merged model is bfloat16
        if the stored base is bfloat16, else float32.
      average_with: the adapter that training started from. If given, the weighted mean of both
        adapters is written, which retains more of what the earlier adapter learned.
      share: weight of the workdir's adapter in the mean, 0.5 by default.
    """
    check_choice("config.dtype", dtype, (None, *get_args(Dtype)))
    if average_with is None and share is not None:
        raise UserError(f"config.share={share} needs config.average_with")
    if training_record(spec).get("lora", {}) is None:
        if average_with is not None:
            raise UserError(f"config.average_with needs an adapter; {spec} is a complete model")
        return _export_decoder(spec, folder, dtype)
    state, config, meta = open_adapter(spec)
    if average_with is not None:
        share = 0.5 if share is None else share
        if not 0.0 < share < 1.0:
            raise UserError(f"config.share={share} must lie between 0 and 1")
        before = check_role(average_with, str(meta["component"]))
        base, _ = read_decoder_config(resolve_decoder(meta["model"]))
        earlier = load_matching_adapter(average_with, "config.average_with", base, config)
        state = jax.tree.map(lambda new, old: share * new + (1 - share) * old, state, earlier)
        ids = {*meta["trained_on"], *before.get("trained_on", ())}
        meta = {**meta, "trained_on": sorted(ids)}
    if not merge:
        base, card = hub_id(meta["model"]), _adapter_card(meta)
        dtype = dtype or "float32"
        save_adapter(
            state,
            config,
            folder,
            base,
            dtype=dtype,
            training={name: meta.get(name) for name in _ADAPTER_FIELDS},
            card=card,
            inside=meta.get("inside", ""),
        )
        return meta
    base = pretrained_decoder.load_decoder(
        meta["model"], param_dtype=dtype or _stored_dtype(meta["model"])
    )
    params = lora.merge(decoder_params.to_params(base.state), lora.to_adapter(state), config.scale)
    pretrained_decoder.save_decoder(base, params, folder)
    return meta


def _export_decoder(spec: str, folder: pathlib.Path, dtype: Dtype | None) -> dict[str, Any]:
    """Writes a model whose parameters were all trained, with its training record."""
    decoder, meta = open_trained_decoder(spec)
    dtype = dtype or _stored_dtype(meta["model"])
    params = jax.tree.map(lambda x: x.astype(dtype), decoder_params.to_params(decoder.state))
    pretrained_decoder.save_decoder(decoder, params, folder)
    record = {name: meta.get(name) for name in _ADAPTER_FIELDS}
    write_json(folder / peft_format.TRAINING_FILE, record)
    return meta


def _stored_dtype(spec: str) -> Dtype:
    """Returns the dtype of a decoder's stored weights, according to its config.json."""
    _, raw = read_decoder_config(resolve_decoder(spec))
    return "bfloat16" if raw.get("dtype", raw.get("torch_dtype")) == "bfloat16" else "float32"


def _adapter_card(meta: dict[str, Any]) -> str:
    component, model, note = meta["component"], meta["model"], ""
    if hub_id(model) != model:
        note = (
            ", a package with quantized weights (GGUF). The weights on the hub differ by rounding. "
            "launch/export.py with `--config.merge=true` exports exactly the trained model"
        )
    if meta.get("quantization"):
        note = f", whose weights were quantized ({meta['quantization']}){note}"
    card = pathlib.Path(__file__).with_name("adapter_card.md").read_text("utf-8")
    return card.format(component=component, model=model, base=hub_id(model), note=note)


def export_encoder_adapter(
    trained: TextEncoder, meta: dict[str, Any], folder: pathlib.Path, rank: int
) -> float:
    """Writes a trained aligner as a low-rank adapter of its base model.

    ``trained`` and ``meta`` are the results of `open_encoder`. Returns the fraction of the squared
    change of the weights that the adapter retains.
    """
    training = {"component": "aligner"} | {name: meta.get(name) for name in _ALIGNER_FIELDS}
    if isinstance(trained.config, EmbedderConfig):
        return _export_lora(trained, meta, folder, rank, training)
    base = load_encoder(meta["model"])
    return encoder_adapter.save_encoder_adapter(
        to_tensors(trained.state, trained.config, trained.model_type),
        to_tensors(base.state, base.config, base.model_type),
        folder,
        rank=rank,
        base_model_name=meta["model"],
        training=training,
    )


def _export_lora(
    trained: TextEncoder,
    meta: dict[str, Any],
    folder: pathlib.Path,
    rank: int,
    training: dict[str, Any],
) -> float:
    """Writes the adapter of a decoder, as `export_encoder_adapter`; it retains all changes."""
    config = trained.config.lora
    if config is None or config.rank != rank:
        trained_as = "without an adapter" if config is None else f"with rank {config.rank}"
        raise UserError(f"config.rank={rank} differs from the training, which was {trained_as}")
    training["bidirectional"] = meta.get("bidirectional")
    state = nnx.state(nnx.merge(trained.graphdef, trained.state).lora)
    peft_format.save_adapter(
        state, config, folder, meta["model"], training=training, task=encoder_adapter.TASK
    )
    return 1.0


def best_checkpoint_folder(spec: str) -> tuple[Folder, str]:
    """Returns the folder of a workdir's best checkpoint, and the name of its base model."""
    with _best(spec, None) as (checkpoints, step, meta):
        return checkpoints.directory / str(step), str(meta["model"])


def trained_component(spec: str) -> str | None:
    """Returns the component that a workdir trained, such as ``aligner``; None if not a workdir."""
    if not is_training_workdir(spec):
        return None
    with Checkpoints(spec, read_only=True) as checkpoints:
        return _component(checkpoints.meta())


@contextlib.contextmanager
def _best(spec: str, *components: str | None) -> Iterator[tuple[Checkpoints, int, dict[str, Any]]]:
    """Yields a workdir's checkpoints, and the step and metadata of the best checkpoint.

    The trainer's metric determines the best checkpoint. Without metrics, it is the latest.
    ``components`` are those that the workdir may have trained; see `_check_component`.
    """
    folder = pathlib.Path(spec).expanduser()
    with Checkpoints(folder, read_only=True) as checkpoints:
        meta = checkpoints.meta()
    component = _check_component(spec, meta, components)
    metric = meta.get("run", {}).get("best_metric", "dev/mrr")
    with Checkpoints(folder, best_metric=metric, read_only=True) as checkpoints:
        step = checkpoints.best_step()
        step = checkpoints.latest_step() if step is None else step
        assert step is not None  # `Checkpoints` requires at least one
        meta = checkpoints.meta(step)
        if component not in RANKERS and "prompt" not in meta:
            raise UserError(
                f"{spec} has no prompt settings, because it was trained by an earlier version of "
                "this program; train it again"
            )
        yield checkpoints, step, meta


def _check_component(spec: str, meta: dict[str, Any], components: Sequence[str | None]) -> str:
    """Returns the component; raises unless it is one of ``components``.

    Without ``components``, it must be a role of a language model; None stands for any component.
    """
    component = _component(meta)
    if not components:
        expected, fits = "a role of a language model", component not in RANKERS
    else:
        expected = " or ".join(map(str, components))
        fits = None in components or bool({*roles_of(meta)} & {*components})
    if not fits:
        raise UserError(f"{spec} contains the component {component}; expected {expected}")
    return component


def roles_of(meta: Mapping[str, Any]) -> list[str]:
    """Returns the roles that a model was trained for, or its only component."""
    return _component(meta).split("+")


def _component(meta: Mapping[str, Any]) -> str:
    return str(meta.get("component", "aligner"))


def hash_arrays(tree: Any) -> str:
    """Returns the SHA-256 of the arrays and paths of a pytree."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return digest.hexdigest()
