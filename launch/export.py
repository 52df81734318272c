"""Exports a checkpoint: ``python launch/export.py --config.checkpoint=W --workdir=W3``."""

import pathlib
import sys

# The repository runs without being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cirag_jax import cli
from cirag_jax.errors import UserError


def main(config, workdir):
    """Writes ``workdir/model``, a folder that sentence-transformers (aligner, cross-encoder), PEFT
    or, merged, transformers (integrator, extractor) load unchanged.
    """
    from cirag_jax.models.io.export import export_cross_encoder, export_sentence_transformers
    from cirag_jax.models.io.workdir import (
        ADAPTED,
        component_of,
        export_adapter,
        export_encoder_adapter,
        open_cross_encoder,
        open_encoder,
    )

    if not config.checkpoint:
        raise UserError("config.checkpoint is required: a training workdir")
    folder = workdir / "model"
    component = component_of(config.checkpoint)
    if component in ADAPTED:
        meta = export_adapter(
            config.checkpoint,
            folder,
            merge=config.merge,
            dtype=config.dtype,
            average_with=config.average_with,
            share=config.share,
        )
        return {
            "folder": str(folder),
            "checkpoint": config.checkpoint,
            "step": meta["step"],
            "model": meta["model"],
            "merged": config.merge,
            **meta["lora"],
        }
    if config.rank and component != "aligner":
        raise UserError(f"config.rank needs an aligner; {config.checkpoint} is none")
    if config.average_with is not None:
        raise UserError(f"config.average_with needs an adapter, which {config.checkpoint} has not")
    if config.merge:
        raise UserError(f"config.merge needs an adapter, which {config.checkpoint} has not")
    if component == "cross_encoder":
        model, meta = open_cross_encoder(config.checkpoint)
        export_cross_encoder(model, None, folder)
        return {
            "folder": str(folder),
            "checkpoint": config.checkpoint,
            "step": meta.get("step"),
            "max_length": model.max_length,
        }
    encoder, meta = open_encoder(config.checkpoint)
    if config.rank:
        kept = export_encoder_adapter(encoder, meta, folder, config.rank)
        return {
            "folder": str(folder),
            "checkpoint": config.checkpoint,
            "step": meta["step"],
            "model": meta["model"],
            "rank": config.rank,
            "kept": round(kept, 4),
        }
    export_sentence_transformers(encoder, encoder.state, folder)
    return {
        "folder": str(folder),
        "checkpoint": config.checkpoint,
        "step": meta.get("step"),
        "dimension": encoder.dim,
        "pooling": encoder.pooling,
    }


if __name__ == "__main__":
    cli.run(main, "configs/export.py")
