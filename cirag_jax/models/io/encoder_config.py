"""Reads the ``config.json`` of encoders, in the forms of transformers and of published models."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cirag_jax.errors import UserError
from cirag_jax.io import read_object
from cirag_jax.models.activations import TRANSFORMERS_NAMES, Activation
from cirag_jax.models.encoder import RELATIVE_BUCKETS
from cirag_jax.models.encoder_config import EncoderConfig
from cirag_jax.models.io import weights
from cirag_jax.models.io.folders import ConfigFields
from cirag_jax.models.io.rope_fields import (
    LAYER_TYPES,
    check_factors,
    parse_layer_types,
    parse_rope,
)

MODEL_TYPES = (*weights.FAMILIES, "new")
# Fields of task adapters, which a model without adapters does not have.
TASK_FIELDS = (
    *("lora_adaptations", "lora_rank", "lora_alpha", "lora_dropout_p"),
    *("lora_main_params_trainable", "load_trained_adapters", "task_instructions"),
)
RETRIEVAL_TASKS = ("retrieval.query", "retrieval.passage")
_ROPES = ("linear", "dynamic", "llama3", "yarn", "longrope")

# Family -> architecture and rotary base of transformers, for models whose published config.json
# differs from that of transformers.
_REMOTE = {
    "nomic_bert": ("NomicBertModel", 1000.0),
    "gte": ("GteModel", 160000.0),
    "jina_embeddings_v3": ("JinaEmbeddingsV3Model", 20000.0),
}
# Names in Nomic's config.json, which are those of GPT-2.
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
# Fields of published models that change the architecture, and their only supported values.
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "nomic_bert": {
        "prenorm": False,
        "use_rms_norm": False,
        "parallel_block": False,
        "causal": False,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "num_experts": 0,
    },
    "gte": {
        "layer_norm_type": "layer_norm",
        "pack_qkv": True,
        "logn_attention_scale": False,
        "position_embedding_type": "rope",
    },
    "jina_embeddings_v3": {"position_embedding_type": "rotary"},
}


def read_config(folder: Path) -> tuple[EncoderConfig, dict[str, Any]]:
    """Returns the hyper-parameters in ``folder/config.json``, and the config for transformers.

    The config is the parsed file, unless the file is for code that the model's authors publish
    (nomic-embed-text, gte-multilingual, jina-embeddings-v3).
    """
    file = folder / "config.json"
    parsed = read_object(file)
    fields = ConfigFields(parsed, str(file))
    if parsed.get("model_type") not in MODEL_TYPES:
        raise fields.unsupported("model_type", parsed.get("model_type"), ", ".join(MODEL_TYPES))
    raw = _for_transformers(fields)
    return _parse(ConfigFields(raw, str(file))), raw


def _parse(fields: ConfigFields) -> EncoderConfig:
    raw, family = fields.raw, fields.raw["model_type"]
    is_modernbert, has_table = family == "modernbert", family not in (*_REMOTE, "modernbert")
    position_type = raw.get("position_embedding_type")
    if has_table and position_type not in ("absolute", None):
        raise fields.unsupported("position_embedding_type", position_type, "absolute")
    is_mpnet = family == "mpnet"
    buckets = raw.get("relative_attention_num_buckets", RELATIVE_BUCKETS)
    if is_mpnet and buckets != RELATIVE_BUCKETS:  # transformers ignores the field and uses 32
        raise fields.unsupported("relative_attention_num_buckets", buckets, str(RELATIVE_BUCKETS))
    default_pad = {"bert": 0, "nomic_bert": 0, "modernbert": 50283}.get(family, 1)
    pad_id = int(fields.number("pad_token_id", default_pad))
    has_types = not is_mpnet and not is_modernbert
    heads = fields.count("num_attention_heads")
    settings: dict[str, Any] = {"max_positions": fields.count("max_position_embeddings")}
    settings |= _modernbert(fields) if is_modernbert else _rotary(fields, family)
    config = EncoderConfig(
        vocab_size=fields.count("vocab_size"),
        d_model=fields.count("hidden_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        d_ff=fields.count("intermediate_size"),
        type_vocab_size=_type_vocab_size(fields, family) if has_types else 0,
        layer_norm_eps=_layer_norm_eps(fields, family),
        # MPNet's position table has the padding position at 1, regardless of the padding id.
        position_offset={"bert": 0, "mpnet": 2}.get(family, pad_id + 1) if has_table else 0,
        hidden_act=_activation(fields, family),
        pad_id=pad_id,
        relative_bias=is_mpnet,
        initializer_range=float(fields.number("initializer_range", 0.02)),
        **settings,
    )
    if not 0 <= pad_id < config.vocab_size:
        raise fields.unsupported("pad_token_id", pad_id, f"0 to {config.vocab_size - 1}")
    if config.max_length < 1:
        positions = f"above {config.position_offset}"
        raise fields.unsupported("max_position_embeddings", config.max_positions, positions)
    if config.d_model % heads or (config.rope and config.head_dim % 2):
        multiple = f"multiples of {2 * heads if config.rope else heads} ({heads} heads)"
        raise fields.unsupported("hidden_size", config.d_model, multiple)
    for rope in filter(None, (config.rope, config.local_rope)):
        check_factors(fields, rope, (config.rotary_dim or config.head_dim) // 2)
    head_dim = raw.get("head_dim")
    if head_dim is not None and head_dim != config.head_dim:
        raise fields.unsupported("head_dim", head_dim, str(config.head_dim))
    return config


def _type_vocab_size(fields: ConfigFields, family: str) -> int:
    if family == "gte" and fields.raw.get("type_vocab_size") == 0:
        return 0
    return fields.count("type_vocab_size", 1 if family in ("gte", "jina_embeddings_v3") else 2)


def _layer_norm_eps(fields: ConfigFields, family: str) -> float:
    if family == "modernbert":
        return float(fields.number("norm_eps", 1e-5))
    return float(fields.number("layer_norm_eps", 1e-5 if family.startswith("jina") else 1e-12))


def _activation(fields: ConfigFields, family: str) -> Activation:
    name = "hidden_activation" if family == "modernbert" else "hidden_act"
    value = fields.raw.get(name) or ("silu" if family == "nomic_bert" else "gelu")
    if not isinstance(value, str) or value not in TRANSFORMERS_NAMES:
        raise fields.unsupported(name, value, ", ".join(TRANSFORMERS_NAMES))
    return TRANSFORMERS_NAMES[value]


def _rotary(fields: ConfigFields, family: str) -> dict[str, Any]:
    """Returns the settings that distinguish post-norm rotary models from BERT."""
    if family not in _REMOTE:
        return {}
    raw, name = fields.raw.get("rope_parameters"), "rope_parameters"
    if raw is None:
        raw, name = fields.raw.get("rope_scaling") or {}, "rope_scaling"
    theta = float(fields.number("rope_theta", _REMOTE[family][1]))
    gated = family != "jina_embeddings_v3"
    rope = parse_rope(fields, name, raw, theta, _ROPES)
    positions = fields.count("max_position_embeddings")
    if rope.scaling is not None and rope.scaling.kind == "dynamic":
        positions = fields.count("n_positions", int(positions * rope.scaling.factor))
    return {
        "rope": rope,
        "rotary_dim": _rotary_dim(fields, name, raw),
        "max_positions": positions,
        "gated": gated,
        "attention_bias": family != "nomic_bert",
        "up_bias": not gated,
        "down_bias": family != "nomic_bert",
    }


def _rotary_dim(fields: ConfigFields, name: str, raw: Mapping[str, Any]) -> int | None:
    """Returns how many dimensions of a head rotate; None is all."""
    rope = ConfigFields(raw, f"{fields.where}: field {name}")
    share = rope.number("partial_rotary_factor", 1.0)
    if share == 1.0:
        return None
    size = fields.count("hidden_size") // fields.count("num_attention_heads")
    dim = int(size * share)
    if not 0.0 < share < 1.0 or dim < 2 or dim % 2:
        raise rope.unsupported("partial_rotary_factor", share, f"even parts of {size} dimensions")
    return dim


def _modernbert(fields: ConfigFields) -> dict[str, Any]:
    raw, layers = fields.raw, fields.count("num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        every = fields.count("global_attn_every_n_layers", 3)
        types = [LAYER_TYPES[bool(index % every)] for index in range(layers)]
    sliding = parse_layer_types(fields, types, layers)
    window = fields.count("local_attention", 128) // 2
    if not window:
        raise fields.unsupported("local_attention", raw["local_attention"], "2 and above")
    by_type = raw.get("rope_parameters") or {}
    if not isinstance(by_type, dict) or (by_type and not {*by_type} <= {*LAYER_TYPES}):
        raise fields.unsupported("rope_parameters", by_type, f"one of {', '.join(LAYER_TYPES)}")
    theta = float(fields.number("global_rope_theta", 160000.0))
    # Older versions of transformers use the global base if the local one is null.
    is_null = "local_rope_theta" in raw and raw["local_rope_theta"] is None
    local_theta = theta if is_null else float(fields.number("local_rope_theta", 10000.0))
    ropes = []
    for kind, default in zip(LAYER_TYPES, (theta, local_theta), strict=True):
        scaling = {}
        for name, value in (
            (f"rope_parameters.{kind}", by_type.get(kind)),
            ("rope_scaling", raw.get("rope_scaling")),
        ):
            if not isinstance(value, dict | None):
                raise fields.unsupported(name, value, "an object")
            scaling |= value or {}
        ropes.append(parse_rope(fields, f"rope_parameters.{kind}", scaling, default, _ROPES))
    attention_bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    return {
        "rope": ropes[0],
        "local_rope": ropes[1],
        "windows": tuple(window if slides else 0 for slides in sliding),
        "pre_norm": True,
        "first_norm": False,
        "gated": True,
        "attention_bias": attention_bias,
        "up_bias": mlp_bias,
        "down_bias": mlp_bias,
        "norm_bias": fields.flag("norm_bias", False),
    }


def choose_tasks(
    config: EncoderConfig, raw: Mapping[str, Any], where: str, names: str | None
) -> tuple[EncoderConfig, tuple[str, ...]]:
    """Returns a config with the task adapters of queries and passages, and the tasks' names.

    Args:
      config: the encoder's hyper-parameters, without tasks.
      raw: the config for transformers.
      where: the path for error messages.
      names: the tasks of queries and of passages, separated by a comma; or one task for both; or
        "none", for the weights without adapters. The default is the tasks retrieval.query and
        retrieval.passage, if the model has them.
    """
    fields = ConfigFields(raw, where)
    known = raw.get("lora_adaptations") or []
    if not isinstance(known, list) or not all(isinstance(name, str) for name in known):
        raise fields.unsupported("lora_adaptations", known, "a list of names")
    default = [name for name in RETRIEVAL_TASKS if name in known]
    chosen = default if names is None else [name.strip() for name in names.split(",")]
    if not chosen or chosen == ["none"]:
        return config, ()
    for name in chosen:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UserError(f"{where}: the model has no task {name!r}; its tasks are: {listed}")
    if len(chosen) > 2:
        raise UserError(
            f"{where}: tasks {names!r} must be one task, or those of queries and of passages"
        )
    rank = fields.count("lora_rank", 4)
    return dataclasses.replace(
        config,
        tasks=tuple(dict.fromkeys(map(known.index, chosen))),
        num_tasks=len(known),
        task_rank=rank,
        task_scale=fields.number("lora_alpha", 1) / rank,
    ), tuple(chosen)


# ------------------------------------------------------------------------------- published configs


def _for_transformers(fields: ConfigFields) -> dict[str, Any]:
    """Returns the config that transformers reads, from one for code that the authors publish."""
    raw = dict(fields.raw)
    family = {"new": "gte"}.get(raw["model_type"], raw["model_type"])
    if family == "xlm-roberta" and raw.get("position_embedding_type") == "rotary":
        family = "jina_embeddings_v3"
    if family not in _REMOTE:
        return raw
    for name, value in _FIXED[family].items():
        if raw.get(name, value) != value and raw[name] is not None:
            raise fields.unsupported(name, raw[name], str(value).lower())
    raw.pop("auto_map", None)  # the names of code that an export does not have
    architecture, theta = _REMOTE[family]
    if family == "gte" and raw["model_type"] == "new":
        raw = {"rope_theta": 10000.0, "type_vocab_size": 2, "pad_token_id": 0, **raw}
    if family == "nomic_bert":
        raw |= {name: raw[old] for old, name in _GPT2_NAMES.items() if raw.get(old) is not None}
        act = raw.get("activation_function")
        if act is not None:
            if act not in ("swiglu", "geglu"):
                raise fields.unsupported("activation_function", act, "swiglu, geglu")
            raw["hidden_act"] = "silu" if act == "swiglu" else "gelu"
        factor = raw.get("rotary_scaling_factor")
        if factor is not None:  # transformers counts from max_position_embeddings
            raw["rope_scaling"] = {"rope_type": "dynamic", "factor": factor}
            raw["max_position_embeddings"] = fields.count("max_trained_positions", 2048)
            raw["rope_parameters"] = None
        share = fields.number("rotary_emb_fraction", 1.0)
        if share != 1.0:
            raw["rope_scaling"] = {
                **(raw.get("rope_scaling") or {}),
                "partial_rotary_factor": share,
            }
            raw["rope_parameters"] = None
    if raw.get("rope_parameters") is None:
        theta = fields.number(
            "rotary_emb_base", ConfigFields(raw, fields.where).number("rope_theta", theta)
        )
        raw["rope_parameters"] = _rope_parameters(fields, theta, raw)
    return raw | {"model_type": family, "architectures": [architecture]}


def _rope_parameters(fields: ConfigFields, theta: float, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``rope_parameters`` from the fields of published models."""
    scaling = raw.get("rope_scaling")
    parameters = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        if not isinstance(scaling, dict):
            raise fields.unsupported("rope_scaling", scaling, "an object")
        parameters |= scaling
        kind = parameters.pop("type", None)
        parameters["rope_type"] = scaling.get("rope_type", kind or "default")
    kinds = ("default", "linear", "dynamic", "ntk")
    if raw["model_type"] == "new" and parameters["rope_type"] not in kinds:
        raise fields.unsupported("rope_scaling.type", parameters["rope_type"], ", ".join(kinds))
    if parameters["rope_type"] == "ntk":
        # gte-multilingual divides frequencies by another number than transformers' dynamic NTK.
        rope = ConfigFields(parameters, f"{fields.where}: field rope_scaling")
        factor = rope.number("factor")
        if parameters.get("mixed_b") is not None:
            raise rope.unsupported("mixed_b", parameters["mixed_b"], "null")
        size = fields.count("hidden_size") // fields.count("num_attention_heads")
        parameters = {
            "rope_type": "linear",
            "rope_theta": theta * factor,
            "factor": factor ** (2 / size),
        }
    return parameters
