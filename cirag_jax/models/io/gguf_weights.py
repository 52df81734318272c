"""Reads GGUF files of llama.cpp: quantized weights, hyper-parameters and tokenizer.

The ``gguf`` library dequantizes tensors, row by row as needed. llama.cpp rotates adjacent pairs of
dimensions, so its files have the query and key rows of Llama models in a different order. This
module restores the order of transformers and this package, which rotate dimensions i and i + H / 2.
llama.cpp also adds one to Gemma's norm scales; this module subtracts the one.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cirag_jax.errors import UserError, parsing
from cirag_jax.models.io.decoder_families import FAMILIES
from cirag_jax.models.io.tensor_files import check_tensor, gguf_parts
from cirag_jax.models.rope import Rope, RopeScaling, rope_frequencies

# Architecture of llama.cpp -> model_type in transformers. Mistral and Mixtral have "llama";
# see `GgufFile.model_type`.
ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "smollm3", "phi3")},
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
_ROW = "shared_expert_gate.weight"  # a matrix of one row, usually stored as a vector
ROPE_FACTORS = "rope_freqs.weight"  # rotary scaling of Llama 3, one divisor per plane
# LongRoPE's divisors for short and for long texts.
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_CLASS_NAMES = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3"}


def _model_type(architecture: str, metadata: Mapping[str, Any]) -> str:
    has_experts = architecture == "llama" and metadata.get("llama.expert_count")
    return "mixtral" if has_experts else ARCHITECTURES[architecture]


def _hf_names(architecture: str, model_type: str, layers: int) -> dict[str, str]:
    """Returns the mapping from llama.cpp's tensor names to transformers' tensor names."""
    import gguf

    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    name_map, hf_names = gguf.get_tensor_name_map(kind, layers), {}
    for entry in FAMILIES[model_type]:
        source = entry.fused or entry.source
        source = source.replace(".{expert}", "")  # one tensor for all experts of a layer
        for layer in range(layers if "{layer}" in source else 1):
            hf_name = source.format(layer=layer)
            if gguf_name := name_map.get_name(hf_name, (".weight", ".bias")):
                hf_names[gguf_name] = hf_name
    return hf_names


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A memory-mapped GGUF file, possibly split; implements `decoder_weights.TensorSource`.

    Attributes:
      file: path of the file, or of its first part.
      metadata: key -> value, except the long arrays of the tokenizer, which `array` reads.
      architecture: one of `ARCHITECTURES`.
      shapes: (transformers' name, shape) of every tensor.
    """

    file: Path
    metadata: Mapping[str, Any]
    architecture: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    _tensors: Mapping[str, Any]
    _fields: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """Family in `decoder_families.FAMILIES`."""
        return _model_type(self.architecture, self.metadata)

    def array(self, key: str) -> list[Any] | None:
        """Returns the array stored under ``key``, or None."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a slice of a tensor in transformers' layout, in fp32; dequantizes only its rows."""
        import gguf

        tensor = self._tensors[name]
        if name.endswith(_ROW) and len(tensor.shape) == 1 and len(index) == 2:
            return self.read(name, index[1:])[None]
        rows = self._rows(name, int(tensor.shape[-1]))[index[0]]
        try:  # quantization blocks never cross rows
            values = gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(f"{self.file}: tensor {name} cannot be dequantized: {error}") from None
        values = check_tensor(values[(slice(None), *index[1:])], name, self.file)
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values - np.float32(1.0)
        return np.asarray(values, np.float32)

    def _rows(self, name: str, count: int) -> np.ndarray:
        """Returns the indices of a tensor's stored rows in transformers' order."""
        rows = np.arange(count)
        match = re.search(r"self_attn\.([qk])_proj\.", name)
        if self.architecture not in ("llama", "smollm3") or match is None:
            return rows
        key = "attention.head_count" if match[1] == "q" else "attention.head_count_kv"
        heads = self.number(key, self.number("attention.head_count"))
        if type(heads) is not int or heads < 1 or count % (2 * heads):
            raise UserError(
                f"{self.file}: metadata field {self.architecture}.{key} is {heads}, which does not "
                f"fit the {count} rows of tensor {name}"
            )
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def number(self, key: str, default: Any = None) -> Any:
        """Returns the metadata value ``ARCHITECTURE.key``."""
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise UserError(f"{self.file}: metadata field {full} is missing")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise UserError(f"{self.file}: metadata field {full} is {value!r}")
        return value


def _reader(file: Path) -> Any:
    """Returns the ``gguf`` reader on a plain array, because slicing `np.memmap` is slow."""
    import gguf

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "data":
                value = value.view(np.ndarray)
            super().__setattr__(name, value)

    return Reader(str(file))


def _open_part(file: Path, number: int, count: int) -> tuple[Any, dict[str, Any]]:
    """Returns the reader and the metadata of a GGUF file, which is one of ``count`` parts."""
    import gguf

    with parsing(f"{file}: not a readable GGUF file"):
        reader = _reader(file)
        metadata = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("tokenizer.") or field.types[0] != gguf.GGUFValueType.ARRAY
        }
    place = metadata.get("split.no", 0), metadata.get("split.count") or 1  # merged files have 0
    if place != (number, count):
        raise UserError(
            f"{file}: metadata fields split.no and split.count are {place[0]!r} and {place[1]!r}, "
            f"but the name says part {number + 1} of {count}; parts are named "
            "NAME-00001-of-00002.gguf and so on, and only parts"
        )
    return reader, metadata


def open_gguf(file: str | os.PathLike) -> GgufFile:
    """Opens a GGUF file, and all parts if it is one part of a file that is split."""
    parts = gguf_parts(file)
    readers = [_open_part(part, number, len(parts)) for number, part in enumerate(parts)]
    file, (reader, metadata) = parts[0], readers[0]
    stored = [tensor for other, _ in readers for tensor in other.tensors]
    expected = metadata.get("split.tensors.count", len(stored))
    if expected != len(stored) or len({str(t.name) for t in stored}) != len(stored):
        raise UserError(
            f"{file}: metadata field split.tensors.count is {expected!r}, but the {len(parts)} "
            f"parts have {len(stored)} tensors, or some twice; copy all parts of one model"
        )
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{file}: metadata field general.architecture is {architecture!r}; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    layers = metadata.get(f"{architecture}.block_count", 0)
    if type(layers) is not int or not 0 <= layers <= len(stored):
        raise UserError(
            f"{file}: metadata field {architecture}.block_count is {layers!r}, with "
            f"{len(stored)} tensors"
        )
    names = _hf_names(architecture, _model_type(architecture, metadata), layers)
    tensors = {names.get(t.name) or str(t.name): t for t in stored}
    shapes = [
        (name, (1,) * (name.endswith(_ROW) and len(t.shape) == 1) + tuple(map(int, t.shape[::-1])))
        for name, t in tensors.items()
        if t.name not in (ROPE_FACTORS, *LONGROPE_FACTORS)
    ]
    return GgufFile(file, metadata, architecture, tuple(shapes), tensors, reader.fields)


def hf_config(source: GgufFile) -> dict[str, Any]:
    """Returns the file's settings as a ``config.json`` of transformers."""
    number, metadata = source.number, source.metadata
    heads, width = int(number("attention.head_count")), int(number("embedding_length"))
    embedding = dict(source.shapes).get("model.embed_tokens.weight")
    if not embedding:
        raise UserError(f"{source.file}: tensor token_embd.weight is missing")
    if not heads:
        raise UserError(
            f"{source.file}: metadata field {source.architecture}.attention.head_count is 0"
        )
    names = {name for name, _ in source.shapes}
    model_type = source.model_type
    name = "".join(part.capitalize() for part in model_type.split("_"))
    name = _CLASS_NAMES.get(model_type, name)
    raw: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": embedding[0],
        "hidden_size": width,
        "intermediate_size": int(number("feed_forward_length")),
        "num_hidden_layers": int(number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("attention.head_count_kv", heads)),
        "head_dim": int(number("attention.key_length", width // heads)),
        "max_position_embeddings": int(number("context_length")),
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "rope_parameters": _rope(source),
    }
    for field, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) not in (int, type(None)):
            raise UserError(
                f"{source.file}: metadata field tokenizer.ggml.{key}_token_id is not an integer"
            )
        raw[f"{field}_token_id"] = token
    if source.architecture in _LARGE_GEMMA:
        raw.update(_gemma(source, heads, width))
    else:
        raw["hidden_act"] = "silu"
    if model_type in ("llama", "qwen3", "qwen3_moe", "smollm3"):
        raw["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
    if model_type == "smollm3":
        raw["no_rope_layer_interval"] = 4  # as in llama.cpp; the file does not contain it
    if model_type == "phi3":
        window = int(number("attention.sliding_window", 0))  # 0 in Phi-4
        raw["sliding_window"] = window or None
        raw["original_max_position_embeddings"] = int(
            number("rope.scaling.original_context_length", raw["max_position_embeddings"])
        )
    if model_type in ("llama", "smollm3"):
        raw["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in names
    if model_type in ("qwen2_moe", "qwen3_moe", "mixtral"):
        name = "num_local_experts" if model_type == "mixtral" else "num_experts"
        raw.update({name: int(number("expert_count"))})
        raw.update(num_experts_per_tok=int(number("expert_used_count")))
    if model_type in ("qwen2_moe", "qwen3_moe"):
        # Older files lack the widths of experts, and llama.cpp has these defaults.
        width = raw["intermediate_size"]
        own = number("expert_feed_forward_length", width // max(raw["num_experts_per_tok"], 1))
        raw["moe_intermediate_size"] = int(own)
        # llama.cpp normalizes the weights in Qwen 3 only, and every layer has experts.
        raw["norm_topk_prob"] = model_type == "qwen3_moe"
    if model_type == "qwen2_moe":
        shared = number("expert_shared_feed_forward_length", width)
        raw["shared_expert_intermediate_size"] = int(shared)
    return raw


def _shortest(value: float) -> float:
    """Returns the shortest decimal for an fp32 number: 1e-5 instead of 9.99999974e-06."""
    return float(str(np.float32(value)))


# Number of layers of the 27B models.
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}


def _gemma(source: GgufFile, heads: int, width: int) -> dict[str, Any]:
    number = source.number
    # The file lacks the query scale, which is different for the 27B models.
    large = int(number("block_count")) == _LARGE_GEMMA[source.architecture]
    size = int(number("attention.key_length", width // heads))
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if large else size,
        "sliding_window": int(number("attention.sliding_window")),
    }
    if source.architecture == "gemma2":
        fields["attn_logit_softcapping"] = float(number("attn_logit_softcapping"))
        fields["final_logit_softcapping"] = float(number("final_logit_softcapping"))
        return fields
    # llama.cpp's defaults for what files usually lack.
    fields["final_logit_softcapping"] = float(number("final_logit_softcapping", 0.0)) or None
    pattern = source.metadata.get("gemma3.attention.sliding_window_pattern")
    if isinstance(pattern, list):  # whether each layer has a window
        kinds = ("full_attention", "sliding_attention")
        fields["layer_types"] = [kinds[bool(slides)] for slides in pattern]
    else:
        fields["sliding_window_pattern"] = int(number("attention.sliding_window_pattern", 6))
    local = {
        "rope_type": "default",
        "rope_theta": _shortest(number("rope.freq_base_swa", 10000.0)),
    }
    fields["rope_parameters"] = {"full_attention": _rope(source), "sliding_attention": local}
    return fields


def _rope(source: GgufFile) -> dict[str, Any]:
    """Returns transformers' ``rope_parameters``."""
    number = source.number
    width, heads = int(number("embedding_length")), int(number("attention.head_count"))
    size = int(number("attention.key_length", width // heads))
    rotated = int(number("rope.dimension_count", size))
    if rotated != size and source.architecture != "phi3":
        raise UserError(
            f"{source.file}: metadata field {source.architecture}.rope.dimension_count is not the "
            f"head size {size}: partial rotary embeddings are supported only in phi3"
        )
    theta = _shortest(number("rope.freq_base", 10000.0))
    kind = str(source.metadata.get(f"{source.architecture}.rope.scaling.type", "none"))
    if ROPE_FACTORS in source._tensors:
        return _llama3(source, theta, size)
    raw: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rotated != size:
        raw["partial_rotary_factor"] = rotated / size
    if LONGROPE_FACTORS[0] in source._tensors:
        return raw | _longrope(source)
    if kind == "none":
        return raw
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{source.file}: metadata field {source.architecture}.rope.scaling.type is {kind!r}; "
            "supported: none, linear, yarn"
        )
    raw.update(rope_type=kind, factor=_shortest(number("rope.scaling.factor")))
    if kind == "yarn":
        raw["original_max_position_embeddings"] = int(
            number("rope.scaling.original_context_length")
        )
        for field, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (value := number(f"rope.scaling.{key}", 0.0)) > 0.0:
                raw[field] = _shortest(value)
    return raw


def _longrope(source: GgufFile) -> dict[str, Any]:
    """Returns the parameters of LongRoPE, except those that stand outside ``rope_parameters``."""
    fields: dict[str, Any] = {"rope_type": "longrope"}
    for field, name in zip(("short_factor", "long_factor"), LONGROPE_FACTORS, strict=True):
        if name not in source._tensors:
            raise UserError(f"{source.file}: tensor {name} is missing")
        values = np.asarray(source._tensors[name].data, np.float32).reshape(-1)
        fields[field] = [_shortest(value) for value in values.tolist()]
    if attention := source.number("rope.scaling.attn_factor", 0.0):
        fields["attention_factor"] = _shortest(attention)
    return fields


def _llama3(source: GgufFile, theta: float, size: int) -> dict[str, Any]:
    """Returns the parameters of Llama 3.1's rotary scaling.

    The file contains only the divisor of each frequency. The largest divisor is the factor. The
    other parameters are the published ones (trained on 8192 tokens, ramp from 1 to 4 turns).
    Divisors that do not match these parameters raise an error.
    """
    divisors = np.asarray(source._tensors[ROPE_FACTORS].data, np.float64).reshape(-1)
    factor, original, low, high = float(divisors.max()), 8192, 1.0, 4.0
    scaling = RopeScaling("llama3", factor, original, low, high)
    plain, stretched = (rope_frequencies(size, Rope(theta, kind))[0] for kind in (None, scaling))
    expected = np.divide(plain, stretched)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise UserError(
            f"{source.file}: tensor {ROPE_FACTORS} is not Llama 3.1's rotary scaling; no other is "
            "supported"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# Vocabularies that were trained with separate digits. transformers' GGUF reader splits text as
# GPT-2 does instead, which tokenizes "\\n\\n1" differently.
_SEPARATE_DIGITS = ("smollm", "starcoder", "refact")


def tokenizer_from_gguf(source: GgufFile | str | os.PathLike) -> Any:
    """Returns the fast ``transformers`` tokenizer of a GGUF file, including its chat template.

    Loading with transformers' ``gguf_file=`` would import torch. This function calls the same
    conversion functions of transformers without torch.
    """
    source = source if isinstance(source, GgufFile) else open_gguf(source)
    with parsing(f"{source.file}: its tokenizer cannot be read"):
        return _tokenizer(source)


def _tokenizer(source: GgufFile) -> Any:
    from tokenizers import pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    metadata = source.metadata
    fields: dict[str, Any] = {}
    for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items():
        value = metadata.get(f"tokenizer.{key}")
        value = source.array(f"tokenizer.{key}") if value is None else value
        if value is not None:
            fields[name] = value
    backend, _ = convert_gguf_tokenizer(source.architecture, fields)
    if fields.get("pre_tokenizer_type") in _SEPARATE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokens, special = fields["tokens"], {}
    for field in ("bos", "eos", "unk", "pad"):
        index = fields.get(f"{field}_token_id")
        if index is not None:
            special[f"{field}_token"] = tokens[int(index)]
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", fields["tokenizer_type"] == "llama")
    if add_bos and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=int(source.number("context_length")),
        clean_up_tokenization_spaces=False,
        **special,
    )
