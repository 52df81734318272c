"""Opening the encoder that a model field names: a training workdir, or anything pretrained."""

import dataclasses
import pathlib
from typing import Any

import jax

from cirag_jax.errors import UserError
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
