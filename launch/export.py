"""Exports a checkpoint: ``python launch/export.py --config.checkpoint=W --workdir=W3``."""

import pathlib
import sys

# Allows running from the repository without installation.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli
from cirag_jax.errors import UserError


def main(config, workdir):
    """Writes ``workdir/model``, which other libraries can load.

    Aligners and cross-encoders load in sentence-transformers, adapters of language models in PEFT,
    and merged adapters and completely trained language models in transformers.
    """
    from cirag_jax.models.io import hub
    from cirag_jax.models.io.workdir import RANKERS, trained_component

    if not config.checkpoint:
        raise UserError("config.checkpoint is required: a training workdir")
    if config.dry_run and not config.push_to:
        raise UserError("config.dry_run needs config.push_to")
    folder = workdir / "model"
    component = trained_component(config.checkpoint)
    if component and component not in RANKERS:
        details = _adapter(config, folder)
    else:
        if config.rank and component != "aligner":
            raise UserError(f"config.rank needs an aligner; {config.checkpoint} is not one")
        defaults = {"average_with": None, "share": None, "dtype": None, "merge": False}
        for field, default in defaults.items():
            if config[field] is not default:
                raise UserError(f"config.{field} needs an adapter; {config.checkpoint} is not one")
        details = (_cross_encoder if component == "cross_encoder" else _aligner)(config, folder)
    if not config.average_with and not config.rank:  # which have other weights than the training
        hub.add_metrics(folder, config.checkpoint, details["step"], component or "model")
    details = {"folder": str(folder), "checkpoint": config.checkpoint, **details}
    if config.push_to:
        details["pushed_to"] = hub.push(
            folder, config.push_to, private=config.private, dry_run=config.dry_run
        )
    return details


def _adapter(config, folder):
    from cirag_jax.models.io.workdir import export_adapter

    meta = export_adapter(
        config.checkpoint,
        folder,
        merge=config.merge,
        dtype=config.dtype,
        average_with=config.average_with,
        share=config.share,
    )
    return {
        "step": meta["step"],
        "model": meta["model"],
        "merged": config.merge,
        **(meta["lora"] or {}),
    }


def _cross_encoder(config, folder):
    from cirag_jax.models.io.export import export_cross_encoder
    from cirag_jax.models.io.workdir import open_cross_encoder

    model, meta = open_cross_encoder(config.checkpoint)
    export_cross_encoder(model, folder)
    return {"step": meta.get("step"), "max_length": model.max_length}


def _aligner(config, folder):
    from cirag_jax.models.io.export import export_sentence_transformers
    from cirag_jax.models.io.workdir import export_encoder_adapter, open_encoder
    from cirag_jax.models.link_head import FILE
    from cirag_jax.retrieval.linked import open_link_head

    encoder, meta = open_encoder(config.checkpoint)
    head = open_link_head(config.checkpoint)
    if config.rank:
        kept = export_encoder_adapter(encoder, meta, folder, config.rank)
        details = {"model": meta["model"], "rank": config.rank, "kept": round(kept, 4)}
    else:
        export_sentence_transformers(encoder, folder, meta.get("units"))
        details = {"dimension": encoder.dim, "pooling": encoder.pooling}
    (folder / FILE).unlink(missing_ok=True)  # left by an earlier export
    if head:
        head.save(folder)
    return {"step": meta.get("step"), **details, "link_head": head is not None}


if __name__ == "__main__":
    cli.run(main, "configs/export.py")
