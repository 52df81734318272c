"""Exports encoders and cross-encoders as folders that sentence-transformers can load."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from cirag_jax.datasets import chains
from cirag_jax.errors import UserError
from cirag_jax.io import read_object, replacing, write_json
from cirag_jax.models import cross_encoder, lora
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.models.embedder import EmbedderConfig
from cirag_jax.models.io import decoder_weights, weights
from cirag_jax.models.io.encoder_config import TASK_FIELDS
from cirag_jax.models.io.modules import dense_places, dense_shapes, write_modules
from cirag_jax.models.io.pretrained import TextEncoder
from cirag_jax.models.io.tensor_files import copy_companions, fetch, save_tensors
from cirag_jax.models.io.text_prefixes import EXPORT_FILE, PROMPTS_FILE, read_prompts
from cirag_jax.types import Passage, Triple

_ROUTES = ("query", "document")


def export_sentence_transformers(
    encoder: TextEncoder, folder: str | os.PathLike, units: str | None = None
) -> Path:
    """Writes an encoder for sentence-transformers and returns ``folder``.

    The embeddings of sentence-transformers differ from this package's by at most 1e-5. Writing is
    atomic and replaces an earlier export in ``folder``. With several processes, all must call this,
    and process 0 writes. ``units`` is the kind of text that an aligner was trained to rank (triple,
    sentence or passage); the model card describes it.

    With different task adapters for queries and passages, the folder has a complete model for each,
    between which the ``Router`` of sentence-transformers chooses.
    """
    _check_target(Path(folder))
    config = encoder.config
    if isinstance(config, EmbedderConfig):
        return _export_embedder(encoder, config, Path(folder), units)
    models = {}
    for route in _ROUTES if len(config.tasks) > 1 else [""]:
        merged, plain = weights.merge_tasks(encoder.state, config, passage=route == "document")
        models[route] = weights.to_tensors(merged, plain, encoder.model_type, published=True)

    def write(target: Path) -> None:
        for tensors in models.values():
            tensors.update(weights.pooler_tensors(encoder.folder))
        _write(encoder, models, target, units)

    return _write_folder(Path(folder), write)


def _export_embedder(
    encoder: TextEncoder, config: EmbedderConfig, folder: Path, units: str | None
) -> Path:
    """Writes a decoder with its adapter merged into the weights, in their dtype."""
    if config.latent is not None:
        raise UserError(
            f"{encoder.source}: sentence-transformers cannot load NV-Embed-v2; export its adapter "
            "(config.rank)"
        )
    params = nnx.to_pure_dict(encoder.state)
    adapter = params.pop("lora", None)
    if adapter is not None and config.lora is not None:
        params = lora.merge(params, adapter, config.lora.scale)
    flat = dict(nnx.to_flat_state(encoder.state))
    dense = {}
    for name, (path, transpose) in dense_places(config.dense).items():
        array = fetch(flat[path].get_value())
        dense[name] = np.ascontiguousarray(array.T if transpose else array)
    causal = {} if config.decoder.causal else {"is_causal": False}
    if encoder.hf_config.get("use_bidirectional_attention"):
        causal = {"use_bidirectional_attention": not config.decoder.causal}
    architectures = [str(name).replace("ForCausalLM", "Model") for name in _architectures(encoder)]
    # The output layer is not written.
    hf_config = {**encoder.hf_config, **causal, "architectures": architectures}

    def write(target: Path) -> None:
        def companions(aside: Path) -> None:
            _write_tokenizer(encoder, aside)
            encoder.tokenizer.save(str(aside / "tokenizer.json"))
            _write_modules(encoder, dense, aside, units)

        decoder_weights.write_checkpoint(target, params, config.decoder, hf_config, companions)

    return _write_folder(folder, write)


def _architectures(encoder: TextEncoder) -> list[Any]:
    names = encoder.hf_config.get("architectures")
    return names if isinstance(names, list) else []


def export_cross_encoder(model: PairEncoder, folder: str | os.PathLike) -> Path:
    """Writes a model for ``sentence_transformers.CrossEncoder`` and returns ``folder``.

    By default, its ``predict`` returns probabilities: the sigmoid of this package's logits. Writing
    works as in `export_sentence_transformers`.
    """
    _check_target(Path(folder))
    tensors = cross_encoder.to_tensors(model.state, model.config, model.model_type)
    write = functools.partial(_write_cross_encoder, model, tensors)
    return _write_folder(Path(folder), write)


def _write_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Replaces ``folder`` atomically, on process 0."""
    if jax.process_index() == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder) as aside:
            aside.mkdir()
            write(aside)
    return folder


def _check_target(folder: Path) -> None:
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / EXPORT_FILE).is_file():
            raise UserError(f"{folder} is neither empty nor an earlier export; choose a new folder")
    elif folder.exists():
        raise UserError(f"{folder} exists and is not a folder")


def _write(encoder: TextEncoder, models: dict[str, Any], folder: Path, units: str | None) -> None:
    """Writes a folder; ``models`` maps each route to tensors, or "" to the tensors of all texts."""
    dense = {}
    for route, tensors in models.items():
        dense = {name: tensors.pop(name) for name in dense_shapes(encoder.config.dense)}
        target = folder / f"{route}_0_Transformer" if route else folder
        target.mkdir(exist_ok=True)
        _write_transformer(encoder, tensors, target)
    if len(models) > 1:
        names = {route: f"{route}_0_Transformer" for route in models}
        content = {
            "types": dict.fromkeys(names.values(), "sentence_transformers.models.Transformer"),
            "structure": {route: [name] for route, name in names.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        }
        write_json(folder / "router_config.json", content)
    _write_modules(encoder, dense, folder, units, routed=len(models) > 1)


def _write_transformer(encoder: TextEncoder, tensors: dict[str, Any], folder: Path) -> None:
    config = {k: v for k, v in encoder.hf_config.items() if k not in ("torch_dtype", *TASK_FIELDS)}
    write_json(folder / "config.json", config | {"dtype": "float32"})
    save_tensors(tensors, folder / "model.safetensors")
    _write_tokenizer(encoder, folder)
    _write_limit(encoder, folder)


def _write_limit(encoder: TextEncoder, folder: Path) -> None:
    limit = {"max_seq_length": encoder.max_length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", limit)


def _write_modules(
    encoder: TextEncoder,
    dense: Mapping[str, Any],
    folder: Path,
    units: str | None,
    routed: bool = False,
) -> None:
    """Writes everything except the transformer; ``dense`` are the tensors of dense layers."""
    write_modules(
        folder,
        width=encoder.config.d_model,
        pooling=encoder.pooling,
        include_prompt=encoder.include_prompt,
        dense=encoder.config.dense,
        tensors=dense,
        first="Router" if routed else "Transformer",
    )
    if not routed:
        _write_limit(encoder, folder)
    prompts = read_prompts(encoder.folder)
    prompts |= {"query": encoder.query_prefix, "document": encoder.passage_prefix}
    if encoder.triple_prefix is not None:
        prompts["triple"] = encoder.triple_prefix
    write_json(
        folder / PROMPTS_FILE,
        {
            "prompts": prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            "truncate_dim": encoder.config.dimensions,
        },
    )
    write_json(folder / EXPORT_FILE, encoder.manifest() | {"max_length": encoder.max_length})
    _write_card(
        "aligner_card.md",
        folder,
        source=_name_of(encoder.source),
        encoder=encoder,
        texts=_texts(units),
    )


def _texts(units: Any) -> str:
    """Returns the model card's paragraph about the texts to rank."""
    examples = {
        "triple": chains.triple_text(Triple("HEAD", "RELATION", "TAIL")),
        "sentence": chains.sentence_text(Passage("", "TITLE", "", ("SENTENCE",)), 0),
        "passage": chains.passage_text(Passage("", "TITLE", "TEXT")),
    }
    if units not in examples:
        return ""
    query = chains.query_text("QUESTION", [examples[units]] * 2, units)
    return (
        f"\nIt ranks {units}s, each written as `{examples[units]}`. The first query is the "
        f"question. Later queries also contain the selected {units}s:\n\n```\n{query}\n```\n"
    )


def _write_cross_encoder(model: PairEncoder, tensors: dict[str, Any], folder: Path) -> None:
    config = {key: value for key, value in model.hf_config.items() if key != "torch_dtype"}
    count = tensors[cross_encoder.score_bias(model.model_type)].size
    # A head with one label is new, or has the labels of a regression.
    labels = cross_encoder.label_names(config, count) if count > 1 else ["LABEL_0"]
    config |= {
        "architectures": [cross_encoder.ARCHITECTURES[model.model_type]],
        "dtype": "float32",
        "id2label": {str(index): name for index, name in enumerate(labels)},
        "label2id": {name: index for index, name in enumerate(labels)},
    }
    if count == 1:
        probability = "torch.nn.modules.activation.Sigmoid"
        config["sentence_transformers"] = {"activation_fn": probability}
    # Other versions of sentence-transformers record the activation in this field.
    config.pop("sbert_ce_default_activation_function", None)
    write_json(folder / "config.json", config)
    save_tensors(tensors, folder / "model.safetensors")
    _write_tokenizer(model, folder)
    # sentence-transformers truncates pairs at the limit of the tokenizer.
    file = folder / "tokenizer_config.json"
    tokenizer_config = read_object(file, optional=True)
    write_json(file, tokenizer_config | {"model_max_length": model.max_length})
    write_json(
        folder / EXPORT_FILE,
        {"model": model.source, "revision": model.revision, "max_length": model.max_length},
    )
    _write_card("cross_encoder_card.md", folder, source=_name_of(model.source), model=model)


def _write_tokenizer(encoder: TextEncoder | PairEncoder, folder: Path) -> None:
    if not copy_companions(encoder.folder, folder):
        raise UserError(f"{encoder.folder}: the tokenizer's files are missing")


def _write_card(name: str, folder: Path, **fields: Any) -> None:
    card = Path(__file__).with_name(name).read_text("utf-8").format(**fields)
    (folder / "README.md").write_text(card, "utf-8")


def _name_of(source: str) -> str:
    """Returns the name of a folder without its path, because cards are uploaded, or a hub id."""
    return os.path.basename(os.path.normpath(source)) if os.path.isdir(source) else source
