"""Opening the model that a field names: a training workdir, or anything pretrained."""

import dataclasses
import hashlib
import pathlib
from typing import Any

import jax
import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.models.cross_encoder import PairEncoder, load_cross_encoder
from cirag_jax.models.pretrained import TextEncoder, load_encoder
from cirag_jax.training.checkpoints import Checkpoints


def open_encoder(
    spec: str, *, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> tuple[TextEncoder, dict[str, Any]]:
    """The encoder and, for a workdir, what its checkpoint says of its training (else empty).

    A workdir gives its best checkpoint by dev metric, or the latest where none was evaluated.

    Raises:
      UserError: the folder holds neither a checkpoint nor a model, or they do not fit.
    """
    folder = pathlib.Path(spec)
    if not (folder / "checkpoints").is_dir():
        if folder.is_dir() and not any(folder.glob("*.safetensors*")):
            raise UserError(
                f"{spec} is neither a training workdir (it has no checkpoints/) nor a model folder "
                "(it has no *.safetensors)"
            )
        return load_encoder(spec, dtype=dtype, mesh=mesh), {}
    with Checkpoints(folder, read_only=True) as checkpoints:
        step = checkpoints.best_step()
        step = checkpoints.latest_step() if step is None else step
        meta = checkpoints.meta(step)
        _check_component(spec, meta, "aligner")
        base = load_encoder(
            meta["model"],
            dtype=dtype,
            mesh=mesh,
            name=str(folder),
            pooling=meta["pooling"],
            query_prefix=meta["query_prefix"],
            passage_prefix=meta["passage_prefix"],
        )
        restored = checkpoints.restore(step, {"params": base.state}, subset=True)
    encoder = dataclasses.replace(
        base, state=restored.state["params"], revision=f"{base.revision}+step{step}"
    )
    return encoder, {**meta, "step": step}


def open_cross_encoder(
    spec: str, *, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> tuple[PairEncoder, dict[str, Any]]:
    """The cross-encoder and, for a workdir, what its checkpoint says of its training (else empty).

    A workdir gives its best checkpoint, see `open_encoder`. Its revision is a hash of its weights.

    Raises:
      UserError: the folder holds neither a checkpoint nor a cross-encoder, or they do not fit.
    """
    folder = pathlib.Path(spec)
    if not (folder / "checkpoints").is_dir():
        return load_cross_encoder(spec, dtype=dtype, mesh=mesh), {}
    with Checkpoints(folder, read_only=True) as checkpoints:
        step = checkpoints.best_step()
        step = checkpoints.latest_step() if step is None else step
        meta = checkpoints.meta(step)
        _check_component(spec, meta, "cross_encoder")
        base = load_cross_encoder(
            meta["model"],
            dtype=dtype,
            mesh=mesh,
            name=str(folder),
            new_head=0,
            max_length=meta["max_length"],
        )
        restored = checkpoints.restore(step, {"params": base.state}, subset=True)
    state = restored.state["params"]
    model = dataclasses.replace(base, state=state, revision=f"sha256:{hash_arrays(state)}")
    return model, {**meta, "step": step}


def component_of(spec: str) -> str | None:
    """What a training workdir trained, ``aligner`` or ``cross_encoder``; None: it is no workdir."""
    if not (pathlib.Path(spec) / "checkpoints").is_dir():
        return None
    with Checkpoints(spec, read_only=True) as checkpoints:
        return str(checkpoints.meta(checkpoints.latest_step()).get("component", "aligner"))


def _check_component(spec: str, meta: dict[str, Any], wanted: str) -> None:
    found = meta.get("component", wanted)
    if found != wanted:
        raise UserError(f"{spec} holds checkpoints of a {found}, where a {wanted} is needed")


def hash_arrays(tree: Any) -> str:
    """SHA-256 of the arrays of a pytree and their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return digest.hexdigest()
