"""Reads embedding models over decoders; `pretrained.load_encoder` opens them.

Any decoder family of `decoder_families.FAMILIES` can be such a model, and NV-Embed-v2, whose
``config.json`` nests the decoder's settings.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.errors import UserError
from cirag_jax.models import lora
from cirag_jax.models.decoder_config import choose_attention
from cirag_jax.models.embedder import Embedder, EmbedderConfig, LatentConfig, latent_parameters
from cirag_jax.models.encoder import Encoder
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io import decoder_weights, peft_format, pretrained_decoder
from cirag_jax.models.io.folders import ConfigFields
from cirag_jax.models.io.modules import Modules, dense_places, read_dense, read_modules
from cirag_jax.models.io.tensor_files import TensorFiles
from cirag_jax.models.pooling import Pooling

NV_EMBED = "nvembed"
MODEL_TYPES = (*pretrained_decoder.MODEL_TYPES, NV_EMBED)


def parse_embedder_config(
    raw: Mapping[str, Any],
    where: Path,
    pooling: Pooling | None = None,
    bidirectional: bool | None = None,
) -> tuple[EmbedderConfig, Modules]:
    """Returns the hyper-parameters in a parsed ``config.json``, and the modules of its folder.

    The default pooling is of the last token, and the mean in bidirectional models.
    ``bidirectional`` overrides the file.
    """
    fields = ConfigFields(raw, str(where))
    latent = None
    if raw.get("model_type") == NV_EMBED:
        latent, text = _parse_nv_embed(raw, where)
        pooling = pooling or "mean"
        bidirectional = True if bidirectional is None else bidirectional
        model = pretrained_decoder.parse_decoder_config(text, f"{where}: field text_config")
        # The official attention ignores the window of the text part.
        model = dataclasses.replace(model, causal=not bidirectional, windows=())
    else:
        if bidirectional is not None:
            raw = {**raw, "is_causal": not bidirectional}
        if bidirectional is False:
            raw = {**raw, "use_bidirectional_attention": False}
        model = pretrained_decoder.parse_decoder_config(raw, where)
    modules = read_modules(where.parent, model.d_model)
    pad_id = int(fields.number("pad_token_id", 0))
    if not -1 <= pad_id < model.vocab_size:
        raise fields.unsupported("pad_token_id", pad_id, f"0 to {model.vocab_size - 1}")
    config = EmbedderConfig(
        # The output layer is not needed, and with tied embeddings there is none.
        decoder=dataclasses.replace(model, tie_embeddings=True),
        pad_id=max(pad_id, 0),  # -1 means none in Llama; padding is always masked
        pooling=pooling or modules.pooling or ("lasttoken" if model.causal else "mean"),
        latent=latent,
        dense=modules.dense,
    )
    return config, modules


def _parse_nv_embed(raw: Mapping[str, Any], where: Path) -> tuple[LatentConfig, dict[str, Any]]:
    """Returns the settings of latent attention, and the ``config.json`` of the decoder."""
    parts = {}
    for name in ("latent_attention_config", "text_config"):
        value = raw.get(name)
        if not isinstance(value, dict):
            raise UserError(f"{where}: field {name} is {value!r}, not an object")
        parts[name] = value
    text = {**parts["text_config"], "model_type": "mistral"}
    fields = ConfigFields(
        parts["latent_attention_config"], f"{where}: field latent_attention_config"
    )
    width = ConfigFields(text, f"{where}: field text_config").count("hidden_size")
    for name in ("hidden_dim", "latent_dim"):
        if (size := fields.count(name, width)) != width:
            raise fields.unsupported(name, size, f"{width}, the width of the text part")
    latent = LatentConfig(
        num_latents=fields.count("num_latents_value", 512),
        num_heads=fields.count("num_cross_heads", 8),
        head_dim=fields.count("cross_dim_head", 4096),
    )
    return latent, text


def with_compute_options(
    config: EmbedderConfig, *, dtype: Any, remat: bool = False, platform: str | None = None
) -> EmbedderConfig:
    """Returns ``config`` with settings of the computation; weights have dtype ``dtype``, too."""
    model = dataclasses.replace(
        config.decoder, dtype=dtype, param_dtype=dtype, remat="full" if remat else "off"
    )
    attention = choose_attention(model, platform=platform)
    return dataclasses.replace(config, decoder=dataclasses.replace(model, attention=attention))


def load_state(
    folder: Path,
    config: EmbedderConfig,
    model_type: str,
    mesh: jax.sharding.Mesh | None = None,
    adapter: Path | None = None,
) -> tuple[nnx.GraphDef, nnx.State, EmbedderConfig]:
    """Returns a split `Embedder` with the weights of ``folder``, and its hyper-parameters.

    ``adapter`` is a folder in PEFT's format. Without it, and with ``config.lora``, the adapter is
    new. The parameters are on ``mesh`` if given.
    """
    pairs: nnx.State | None = None
    if adapter is not None:
        pairs, lora_config = peft_format.load_adapter(adapter, config.decoder, mesh)
        config = dataclasses.replace(config, lora=lora_config)
    elif config.lora is not None:
        pairs = lora.init_adapter(config.decoder, config.lora, mesh=mesh)
    graphdef, state = abstract_state(config)
    flat: dict[Any, Any] = dict(nnx.to_flat_state(state))
    if pairs is not None:
        flat |= {("lora", *path): variable for path, variable in nnx.to_flat_state(pairs)}
    dense = read_dense(folder, config.dense)
    for name, (path, transpose) in dense_places(config.dense).items():
        array = dense[name].T if transpose else dense[name]
        flat[path] = sharding.place_variable(flat[path], array, mesh)
    outer = latent_parameters(config)
    with TensorFiles(folder) as files:
        loaded = decoder_weights.load_from_source(
            files, folder, config.decoder, model_type, mesh, outer
        )
    flat |= dict(nnx.to_flat_state(loaded))
    return graphdef, nnx.from_flat_state([*flat.items()]), config


def abstract_state(config: EncoderConfig | EmbedderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns a split `Encoder` or `Embedder` with shapes and dtypes in place of arrays."""
    kind: Any = Embedder if isinstance(config, EmbedderConfig) else Encoder
    return nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))


def split_state(
    config: EncoderConfig | EmbedderConfig, state: nnx.State
) -> tuple[nnx.State, nnx.State]:
    """Returns the parameters to train, and the frozen others.

    If there is an adapter, only the adapter is trained; otherwise all parameters are.
    """
    if isinstance(config, EmbedderConfig) and config.lora is not None:
        trained, frozen = nnx.split_state(state, nnx.LoRAParam, ...)
        return trained, frozen
    return state, nnx.State({})


def includes_prompt(raw: Mapping[str, Any], modules: Modules, folder: Path) -> bool:
    """Returns whether the tokens of a prompt are pooled; NV-Embed-v2 masks its instruction."""
    if raw["model_type"] == NV_EMBED:
        fields = ConfigFields(raw, str(folder / "config.json"))
        return not fields.flag("is_mask_instruction", True)
    return modules.include_prompt
