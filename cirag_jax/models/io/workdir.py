"""Opening the model that a field names: a training workdir, or anything pretrained."""

import contextlib
import dataclasses
import hashlib
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from cirag_jax.errors import UserError, check_choice
from cirag_jax.io import is_training_workdir, local_path
from cirag_jax.models import decoder_params, link_head, lora
from cirag_jax.models.cross_encoder import PairEncoder, load_cross_encoder
from cirag_jax.models.decoder import DecoderConfig
from cirag_jax.models.io import encoder_adapter
from cirag_jax.models.io.checkpoints import Checkpoints
from cirag_jax.models.io.peft_format import load_adapter, read_training, save_adapter
from cirag_jax.models.io.pretrained import TextEncoder, load_encoder
from cirag_jax.models.io.pretrained_decoder import (
    hub_id,
    load_decoder,
    read_decoder_config,
    resolve_decoder,
    save_decoder,
)
from cirag_jax.models.io.weights import to_tensors
from cirag_jax.models.lora import LoraConfig


def open_encoder(
    spec: str, *, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> tuple[TextEncoder, dict[str, Any]]:
    """Opens an encoder; also returns the training description of a workdir (otherwise empty).

    A workdir gives its best checkpoint by dev metric, or the latest if none was evaluated.
    """
    folder = pathlib.Path(spec)
    if not is_training_workdir(spec):
        if folder.is_dir() and not any(folder.glob("*.safetensors*")):
            raise UserError(
                f"{spec} is neither a training workdir (it has no checkpoints/) nor a model folder "
                "(it has no *.safetensors)"
            )
        return load_encoder(spec, dtype=dtype, mesh=mesh), {}
    with _best(spec, "aligner") as (checkpoints, step, meta):
        base = load_encoder(
            meta["model"],
            dtype=dtype,
            mesh=mesh,
            name=spec,
            pooling=meta["pooling"],
            query_prefix=meta["query_prefix"],
            passage_prefix=meta["passage_prefix"],
        )
        restored = checkpoints.restore(step, {"params": base.state}, subset=True)
    encoder = dataclasses.replace(
        base, state=restored.state["params"], revision=f"{base.revision}+step{step}"
    )
    return encoder, {**meta, "step": step}


def open_cross_encoder(spec: str) -> tuple[PairEncoder, dict[str, Any]]:
    """Opens a cross-encoder; also returns the training description of a workdir (otherwise empty).

    A workdir gives its best checkpoint, see `open_encoder`, with a hash of its weights as revision.
    """
    if not is_training_workdir(spec):
        return load_cross_encoder(spec), {}
    with _best(spec, "cross_encoder") as (checkpoints, step, meta):
        base = load_cross_encoder(
            meta["model"], name=spec, new_head=0, max_length=meta["max_length"]
        )
        restored = checkpoints.restore(step, {"params": base.state}, subset=True)
    state = restored.state["params"]
    model = dataclasses.replace(base, state=state, revision=f"sha256:{hash_arrays(state)}")
    return model, {**meta, "step": step}


def ranker_meta(spec: str) -> dict[str, Any]:
    """Returns the training description of an aligner's or cross-encoder's best checkpoint."""
    with _best(spec, "aligner", "cross_encoder") as (_, _, meta):
        return {**meta, "component": _component(meta)}


def trained_units(spec: str) -> str | None:
    """Returns the units that an aligner was trained to rank: triple, sentence or passage.

    Args:
      spec: a training workdir, an aligner exported as an adapter, or another encoder.

    Returns:
      None if it is not an aligner, or has no description.
    """
    meta = training_of(spec)
    return meta.get("units") if _component(meta) == "aligner" else None


def trained_on(spec: str) -> frozenset[str] | None:
    """Returns the ids of a model's training questions (of an extractor: passages), or None.

    ``spec`` is as in `trained_units`, or an adapter of a language model. Ids of an aligner include
    those of its head.
    """
    ids = training_of(spec).get("trained_on")
    if ids is None:
        return None
    taught = link_head.read_record(local_path(spec)).get(link_head.TAUGHT, [])
    told = {"trained_on of its training": ids, f"{link_head.TAUGHT} of {link_head.FILE}": taught}
    for field, found in told.items():
        if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
            raise UserError(f"{spec}: field {field} must be a list of ids")
    return frozenset(itertools.chain(*told.values()))


def training_of(spec: str) -> dict[str, Any]:
    """Returns the training description of a workdir's latest checkpoint or an export, or {}."""
    if is_training_workdir(spec):
        with Checkpoints(spec, read_only=True) as checkpoints:
            return checkpoints.meta()
    return read_training(local_path(spec))


ADAPTED = ("integrator", "extractor", "reader")  # components whose checkpoints hold an adapter


def open_adapter(spec: str) -> tuple[nnx.State, LoraConfig, dict[str, Any]]:
    """Opens the adapter of a workdir's best checkpoint (the latest if none was evaluated).

    Returns the state of `lora.Lora` on the first device, its hyper-parameters, and the training
    description with ``model`` (the base), ``step`` and ``revision`` (a hash of the adapter).
    """
    with _best(spec, *ADAPTED) as (checkpoints, step, meta):
        config = LoraConfig(**meta["lora"])
        base, _ = read_decoder_config(resolve_decoder(meta["model"]))
        wanted = {"params": lora.abstract_adapter(base, config)}
        state = checkpoints.restore(step, wanted, subset=True).state["params"]
    return state, config, {**meta, "step": step, "revision": f"sha256:{hash_arrays(state)}"}


def check_role(spec: str, role: str) -> dict[str, Any]:
    """Checks that an adapter was trained for a role, and returns its training description.

    ``spec`` is a training workdir or a PEFT folder. An ``integrator``, ``extractor`` or ``reader``
    must have been trained as one; other roles accept any adapter. The description of a folder that
    another program made is empty.
    """
    roles = [role] if role in ADAPTED else ADAPTED
    if is_training_workdir(spec):
        with _best(spec, *roles) as (_, _, meta):
            return meta
    meta = read_training(local_path(spec))
    if meta:
        _check_component(spec, meta, roles)
    return meta


# Files with the training description of an exported aligner, and of an exported adapter.
_ALIGNER_TOLD = (
    *("model", "step", "pooling", "query_prefix", "passage_prefix", "units"),
    "trained_on",
)
_TOLD = (
    *("component", "model", "step", "prompt", "prompt_digest", "num_candidates"),
    *("length", "trained_on"),
)


def base_of(spec: str) -> str:
    """Returns the base of a workdir's adapter, as named in the training config."""
    with _best(spec, *ADAPTED) as (_, _, meta):
        return str(meta["model"])


@contextlib.contextmanager
def adapter_folder(spec: str | None) -> Iterator[str | None]:
    """Yields ``spec`` as a PEFT folder; that of a workdir is temporary."""
    if spec is None or not is_training_workdir(spec):
        yield spec and str(local_path(spec))
        return
    state, config, meta = open_adapter(spec)
    with tempfile.TemporaryDirectory(prefix="cirag_adapter") as folder:
        yield str(save_adapter(state, config, folder, meta["model"]))


def load_like(
    spec: str,
    field: str,
    model: DecoderConfig,
    config: LoraConfig,
    mesh: jax.sharding.Mesh | None = None,
) -> nnx.State:
    """Loads the adapter ``spec`` of ``field``; refuses different hyper-parameters."""
    with adapter_folder(spec) as folder:
        state, had = load_adapter(str(folder), model, mesh)
    if (had.scale, had.rank, had.names) != (config.scale, config.rank, config.names):
        raise UserError(
            f"{field}={spec} has rank {had.rank}, scale {had.scale:g} and the targets "
            f"{', '.join(had.names)}, where {config.rank}, {config.scale:g} and "
            f"{', '.join(config.names)} are needed."
        )
    return state


def export_adapter(
    spec: str,
    folder: pathlib.Path,
    *,
    merge: bool = False,
    dtype: Literal["float32", "bfloat16"] | None = None,
    average_with: str | None = None,
    share: float | None = None,
) -> dict[str, Any]:
    """Writes a workdir's best adapter in PEFT's format, or with ``merge`` the merged base model.

    An earlier adapter in ``folder`` is replaced; a merged model needs an empty folder.

    Args:
      spec: the workdir.
      folder: output folder.
      merge: whether to add the adapter to its base.
      dtype: dtype of the tensors. None means float32, or bfloat16 for a merged model whose base is
        stored in bfloat16.
      average_with: an earlier adapter from which this training started; the weighted mean of the
        two is written, which retains more of what the earlier adapter learned.
      share: weight of this adapter in the mean; None means 0.5.

    Returns:
      The training description, see `open_adapter`.
    """
    check_choice("config.dtype", dtype, (None, "float32", "bfloat16"))
    if average_with is None and share is not None:
        raise UserError(f"config.share={share} needs config.average_with")
    state, config, meta = open_adapter(spec)
    if average_with is not None:
        share = 0.5 if share is None else share
        if not 0.0 < share < 1.0:
            raise UserError(f"config.share={share} must lie between 0 and 1")
        before = check_role(average_with, str(meta["component"]))
        base, _ = read_decoder_config(resolve_decoder(meta["model"]))
        earlier = load_like(average_with, "config.average_with", base, config)
        state = jax.tree.map(lambda new, old: share * new + (1 - share) * old, state, earlier)
        learnt = {*meta["trained_on"], *before.get("trained_on", ())}
        meta = {**meta, "trained_on": sorted(learnt)}
    if not merge:
        told = {name: meta.get(name) for name in _TOLD}
        base, card, how = hub_id(meta["model"]), _adapter_card(meta), dtype or "float32"
        save_adapter(state, config, folder, base, dtype=how, training=told, card=card)
        return meta
    base = load_decoder(meta["model"], param_dtype=dtype or _stored_dtype(meta["model"]))
    params = lora.merge(decoder_params.to_params(base.state), lora.to_adapter(state), config.scale)
    save_decoder(base, params, folder)
    return meta


def _stored_dtype(spec: str) -> Literal["float32", "bfloat16"]:
    """Returns the dtype that holds a decoder's stored weights without loss."""
    _, told = read_decoder_config(resolve_decoder(spec))
    return "bfloat16" if told.get("dtype", told.get("torch_dtype")) == "bfloat16" else "float32"


def _adapter_card(meta: dict[str, Any]) -> str:
    """Returns the model card of an exported adapter."""
    component, model, note = meta["component"], meta["model"], ""
    if hub_id(model) != model:
        note = (
            ", the quantised weights (GGUF) of that package written out; the hub's differ by the "
            "rounding. launch/export.py with `--config.merge=true` writes exactly what was trained"
        )
    card = pathlib.Path(__file__).with_name("adapter_card.md").read_text("utf-8")
    return card.format(component=component, model=model, base=hub_id(model), note=note)


def export_encoder_adapter(
    trained: TextEncoder, meta: dict[str, Any], folder: pathlib.Path, rank: int
) -> float:
    """Writes the change of an aligner in training as a low-rank adapter of its base.

    ``meta`` is the training description, see `open_encoder`. Returns the share of the squared
    change that the adapter keeps.
    """
    base = load_encoder(meta["model"])
    told = {"component": "aligner"} | {name: meta.get(name) for name in _ALIGNER_TOLD}
    return encoder_adapter.save_encoder_adapter(
        to_tensors(trained.state, trained.config, trained.model_type),
        to_tensors(base.state, base.config, base.model_type),
        folder,
        rank=rank,
        base_model_name=meta["model"],
        training=told,
    )


def best_folder(spec: str) -> tuple[pathlib.Path, str]:
    """Returns the folder of a workdir's best checkpoint, and the model before training."""
    with _best(spec, "aligner", "cross_encoder", *ADAPTED) as (checkpoints, step, meta):
        return checkpoints.directory / str(step), str(meta["model"])


def component_of(spec: str) -> str | None:
    """Returns the component of a training workdir, such as ``aligner``, or None."""
    if not is_training_workdir(spec):
        return None
    with Checkpoints(spec, read_only=True) as checkpoints:
        return _component(checkpoints.meta())


@contextlib.contextmanager
def _best(spec: str, *components: str) -> Iterator[tuple[Checkpoints, int, dict[str, Any]]]:
    """Returns a workdir's checkpoints, the best step, and its training description.

    The best step is by the metric of the trainer, or the latest if none was evaluated.
    """
    folder = pathlib.Path(spec).expanduser()
    with Checkpoints(folder, read_only=True) as checkpoints:
        meta = checkpoints.meta()
    found = _check_component(spec, meta, components)
    metric = meta.get("run", {}).get("best_metric", "dev/mrr")
    with Checkpoints(folder, best_metric=metric, read_only=True) as checkpoints:
        step = checkpoints.best_step()
        step = checkpoints.latest_step() if step is None else step
        assert step is not None  # A folder without checkpoints was refused above.
        meta = checkpoints.meta(step)
        if found in ADAPTED and "prompt" not in meta:
            raise UserError(
                f"{spec} was trained by an earlier version with other prompts; train it again"
            )
        yield checkpoints, step, meta


def _check_component(spec: str, meta: dict[str, Any], components: Sequence[str]) -> str:
    found, wanted = _component(meta), " or ".join(components)
    if found not in components:
        raise UserError(f"{spec} contains the component {found}; expected {wanted}")
    return found


def _component(meta: dict[str, Any]) -> str:
    return str(meta.get("component", "aligner"))


def hash_arrays(tree: Any) -> str:
    """Returns the SHA-256 of the arrays of a pytree and their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return digest.hexdigest()
