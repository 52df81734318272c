"""Tiny embedding models over decoders, as folders of sentence-transformers and of NV-Embed-v2."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import processors

from cirag_jax.models.io.tensor_files import read_tensors, save_tensors
from tests import tiny_decoder

INSTRUCTION = "Instruct: find the passage\nQuery:"
WIDTH = 32


def folder(
    path: pathlib.Path,
    family: str = "qwen3",
    *,
    pooling: str = "lasttoken",
    include_prompt: bool = True,
    dense: Sequence[dict[str, Any]] = (),
    prompts: dict[str, str] | None = None,
    **fields: Any,
) -> pathlib.Path:
    """Writes a decoder as sentence-transformers does, without an output layer; returns ``path``.

    Every text ends with ``<|endoftext|>``. ``dense`` are the configs of dense layers, and
    ``fields`` fields of ``config.json``.
    """
    tiny_decoder.folder(path, family, **{"tie_word_embeddings": True, **fields})
    tensors = {name.removeprefix("model."): array for name, _, array in read_tensors(path)}
    tensors.pop("lm_head.weight", None)
    save_tensors(tensors, path / "model.safetensors")
    _end_texts(path, "<|endoftext|>")
    add_modules(path, pooling=pooling, include_prompt=include_prompt, dense=dense)
    prompts = {"query": INSTRUCTION, "document": ""} if prompts is None else prompts
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return path


def _end_texts(path: pathlib.Path, token: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {token}", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    tokenizer.save(str(path / "tokenizer.json"))


def add_modules(
    path: pathlib.Path,
    *,
    width: int = WIDTH,
    pooling: str = "mean",
    include_prompt: bool = True,
    dense: Sequence[dict[str, Any]] = (),
) -> None:
    """Adds pooling, random dense layers and normalization to a model folder."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (path / module["path"]).mkdir()
    settings = {
        "embedding_dimension": width,
        "pooling_mode": pooling,
        "include_prompt": include_prompt,
    }
    (path / "1_Pooling/config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng(7)
    for config, module in zip(dense, modules[2:], strict=False):
        own = path / module["path"]
        (own / "config.json").write_text(json.dumps(config))
        shape = config["out_features"], config["in_features"]
        tensors = {"linear.weight": rng.normal(size=shape) / np.sqrt(shape[1])}
        if config.get("bias", True):
            tensors["linear.bias"] = rng.normal(size=shape[:1])
        tensors = {name: array.astype(np.float32) for name, array in tensors.items()}
        save_tensors(tensors, own / "model.safetensors")


def nv_embed(path: pathlib.Path, *, latents: int = 5, head_dim: int = 24, **fields: Any):
    """Writes a tiny NV-Embed-v2 with the names of its checkpoint; returns ``path``."""
    tiny_decoder.folder(path, "mistral", sliding_window=6, tie_word_embeddings=False)
    text = {**tiny_decoder.config("mistral", sliding_window=6), "model_type": "bidir_mistral"}
    raw = {
        "model_type": "nvembed",
        "architectures": ["NVEmbedModel"],
        "add_eos": True,
        "is_mask_instruction": True,
        "padding_side": "right",
        "hidden_size": WIDTH,
        "text_config": text,
        "latent_attention_config": {
            "model_type": "latent_attention",
            "num_latents_value": latents,
            "num_cross_heads": 2,
            "hidden_dim": WIDTH,
            "latent_dim": WIDTH,
            "cross_dim_head": head_dim,
        },
        **fields,
    }
    (path / "config.json").write_text(json.dumps(raw))
    tensors = {
        name.replace("model.", "embedding_model.", 1): array
        for name, _, array in read_tensors(path)
        if name != "lm_head.weight"
    }
    rng = np.random.default_rng(3)
    inner = 2 * head_dim
    for name, shape in {
        "latents": (latents, WIDTH),
        "cross_attend_blocks.0.norm.weight": (WIDTH,),
        "cross_attend_blocks.0.norm.bias": (WIDTH,),
        "cross_attend_blocks.0.norm_context.weight": (WIDTH,),
        "cross_attend_blocks.0.norm_context.bias": (WIDTH,),
        "cross_attend_blocks.0.fn.to_q.weight": (inner, WIDTH),
        "cross_attend_blocks.0.fn.to_kv.weight": (2 * inner, WIDTH),
        "cross_attend_blocks.0.fn.to_out.weight": (WIDTH, inner),
        "cross_attend_blocks.1.norm.weight": (WIDTH,),
        "cross_attend_blocks.1.norm.bias": (WIDTH,),
        "cross_attend_blocks.1.fn.net.0.weight": (8 * WIDTH, WIDTH),
        "cross_attend_blocks.1.fn.net.0.bias": (8 * WIDTH,),
        "cross_attend_blocks.1.fn.net.2.weight": (WIDTH, 4 * WIDTH),
        "cross_attend_blocks.1.fn.net.2.bias": (WIDTH,),
    }.items():
        scale = 0.5 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        values = scale * rng.normal(size=shape)
        tensors[f"latent_attention_model.{name}"] = values.astype(np.float32)
    save_tensors(tensors, path / "model.safetensors")
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path
